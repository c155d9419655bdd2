"""Unpacking integers of a few bits from words of 32 bits, floating-point numbers of 4 bits, and scaling both."""

import numpy as np
import torch
from jaxtyping import Int, Shaped, UInt8
from torch import Tensor

WORD_BITS = 32
FLOAT_4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Absolute values of the 4-bit floating-point numbers E2M1, by their three lower bits."""
EXPONENT_BIAS = 127
"""Of powers of two that are stored as their exponents (E8M0)."""


def words_of(count: int, bits: int) -> int:
    """The number of words that hold ``count`` integers of ``bits`` bits without gaps."""
    return -(-count * bits // WORD_BITS)


def unpack_words(words: Int[Tensor, "rows words"], bits: int, count: int) -> UInt8[Tensor, "rows count"]:
    """Unpack unsigned integers that are stored without gaps, the lowest bits of a word first.

    Integer ``i`` of a row has the bits ``i·bits`` to ``(i + 1)·bits - 1`` of the row, and may begin in one word and
    end in the next.

    Args:
        words: int32; a row holds at least ``count · bits`` bits.
        bits: 1 to 8.
        count: integers in a row.

    Returns:
        The integers from 0 to 2^bits - 1.
    """
    stored = words.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return ((stored[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :count]
    unpacked = np.unpackbits(stored.numpy(), axis=1, count=count * bits, bitorder="little")
    return torch.from_numpy(unpacked.reshape(-1, count, bits) @ (1 << np.arange(bits)).astype(np.uint8))


def scale_groups(
    codes: Tensor, zeros: Tensor | None, scales: Tensor, groups: Int[Tensor, " columns"]
) -> Tensor:
    """The numbers that codes stand for: (codes - zeros) scales, with the zero point and scale of each column's group.

    Args:
        codes: [rows, columns], integers of 8 bits or floating-point numbers.
        zeros: [rows, groups], likewise; None for 0.
        scales: [rows, groups] in the dtype of the result.
        groups: the group of each column.
    """
    rows, columns = codes.shape
    count = scales.shape[1]
    if columns % count == 0 and torch.equal(groups, torch.arange(columns) // (columns // count)):
        codes, scales = codes.reshape(rows, count, -1), scales[:, :, None]  # no copies of the scales
        zeros = None if zeros is None else zeros[:, :, None]
    else:
        scales, zeros = scales[:, groups], None if zeros is None else zeros[:, groups]
    values = codes.to(scales.dtype, copy=True)  # a byte is exact in it, and so is a difference of two
    if zeros is not None:
        values -= zeros
    values *= scales
    return values.reshape(rows, columns)


def unpack_float_4(codes: UInt8[Tensor, "rows bytes"], dtype: torch.dtype) -> Tensor:
    """Unpack 4-bit floating-point numbers E2M1 from bytes, the lower half of a byte first: [rows, 2 · bytes]."""
    table = torch.tensor((*FLOAT_4_VALUES, *(-value for value in FLOAT_4_VALUES)), dtype=dtype)
    return look_up_halves(codes, table)


def look_up_halves(codes: UInt8[Tensor, "*bytes"], table: Shaped[Tensor, "16"]) -> Tensor:
    """The entries of a table for both halves of each byte, the lower first; the last dimension is twice as long."""
    numbers = torch.arange(256)
    pairs = torch.stack((table[numbers & 15], table[numbers >> 4]), dim=-1)
    taken = pairs.numpy().take(codes.numpy(), axis=0)  # faster than an index of torch, which is of 64 bits
    return torch.from_numpy(taken).flatten(-2)


def decode_powers_of_two(codes: UInt8[Tensor, "*sizes"], dtype: torch.dtype) -> Tensor:
    """The powers of two whose exponents bytes hold, 2^(code - 127), in ``dtype``."""
    return torch.exp2(codes.to(dtype) - EXPONENT_BIAS)
