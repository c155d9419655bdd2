"""Unpacking integers of a few bits from words of 32 bits."""

import torch
from jaxtyping import Int
from torch import Tensor

WORD_BITS = 32
FLOAT_4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Absolute values of the 4-bit floating-point numbers E2M1, by their three lower bits."""


def words_of(count: int, bits: int) -> int:
    """The number of words that hold ``count`` integers of ``bits`` bits without gaps."""
    return -(-count * bits // WORD_BITS)


def unpack_words(words: Int[Tensor, "rows words"], bits: int, count: int) -> Int[Tensor, "rows count"]:
    """Unpack unsigned integers that are stored without gaps, the lowest bits of a word first.

    Integer ``i`` of a row has the bits ``i·bits`` to ``(i + 1)·bits - 1`` of the row, and may begin in one word and
    end in the next.

    Args:
        words: int32; a row holds at least ``count · bits`` bits.
        bits: 1 to 8.
        count: integers in a row.

    Returns:
        The integers from 0 to 2^bits - 1, in int32.
    """
    mask = (1 << bits) - 1
    if WORD_BITS % bits == 0:
        shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
        return ((words[:, :, None] >> shifts) & mask).reshape(len(words), -1)[:, :count]
    first_bits = torch.arange(count) * bits
    first_words, shifts = first_bits // WORD_BITS, first_bits % WORD_BITS
    unsigned = words.long() & 0xFFFFFFFF
    last_words = (first_words + 1).clamp(max=words.shape[1] - 1)
    values = (unsigned[:, first_words] >> shifts) | (unsigned[:, last_words] << (WORD_BITS - shifts))
    return (values & mask).int()


def scale_groups(
    codes: Tensor, zeros: Tensor | None, scales: Tensor, groups: Int[Tensor, " columns"]
) -> Tensor:
    """The numbers that codes stand for: (codes - zeros) scales, with the zero point and scale of each column's group.

    Args:
        codes: [rows, columns], integers or floating-point numbers.
        zeros: [rows, groups]; None for 0.
        scales: [rows, groups] in the dtype of the result.
        groups: the group of each column.
    """
    rows, columns = codes.shape
    count = scales.shape[1]
    if columns % count == 0 and torch.equal(groups, torch.arange(columns) // (columns // count)):
        codes, scales = codes.view(rows, count, -1), scales[:, :, None]  # no copies of the scales
        zeros = None if zeros is None else zeros[:, :, None]
    else:
        scales, zeros = scales[:, groups], None if zeros is None else zeros[:, groups]
    shifted = codes if zeros is None else codes - zeros
    return (shifted.to(scales.dtype) * scales).view(rows, columns)


def unpack_float_4(codes: Int[Tensor, "rows bytes"], dtype: torch.dtype) -> Tensor:
    """Unpack 4-bit floating-point numbers E2M1 from bytes, the lower half of a byte first: [rows, 2 · bytes]."""
    table = torch.tensor((*FLOAT_4_VALUES, *(-value for value in FLOAT_4_VALUES)), dtype=dtype)
    halves = torch.stack((codes & 15, codes >> 4), dim=-1).reshape(len(codes), -1)
    return table[halves.long()]
