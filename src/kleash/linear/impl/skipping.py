"""The products of a gradient in logits without its smallest entries, for ``skip_below``.

Each token skips its smallest entries as long as the sum of their absolute values is at most ``skip_below`` of the sum
over all entries. This depends on the token only, not on where chunks end. Tokens that keep similarly many entries then
share a product, over the columns of the vocabulary that any of them keeps. A search on a sample of the columns proposes
the bound; before anything is skipped, the exact sum below the bound is checked.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.linear.impl.base import HeadInputs, TokenIndex
from kleash.linear.impl.chunk_loop import ROW_BLOCK
from kleash.linear.impl.project import set_rows_, widens
from kleash.linear.options import LinearOptions, Skipped

GROUP = 128
"""Tokens that share a product."""
SAMPLE = 2048
"""Columns on which the bound is searched."""
SAMPLE_TARGET = 0.75
"""The fraction of the allowed sum that the search aims at, where it reads only a sample of the columns."""
STEPS = 10
"""Bisection steps of the search."""
OVERHEAD = 2.5
"""The cost of a gathered and multiplied entry, relative to one of the full product: measured by linear_skipping.py."""

_vecdot = cast("Any", torch.linalg).vecdot


class ProductGroup(NamedTuple):
    """Tokens of a chunk that share a product, and the columns that any of them keeps."""

    rows: Int[Tensor, " rows"]
    columns: Int[Tensor, " columns"]


class SkippingProducts:
    """The products of one model's gradient without its smallest entries, and what they skipped."""

    def __init__(self, options: LinearOptions, model: HeadInputs) -> None:
        """Counts start at 0."""
        self.model, self.below = model, options.skip_below
        self.buffer_bytes = options.chunk_bytes // 16
        self.left_out = torch.zeros(len(model.hidden), dtype=model.dtype, device=model.hidden.device)
        self.entries, self.multiplied = 0, 0

    def add_(
        self,
        index: TokenIndex,
        gradient: Float[Tensor, "chunk vocab"],
        hidden: Float[Tensor, "chunk dim"],
        sums: tuple[Tensor | None, Tensor | None],
        *,
        shared: bool = False,
    ) -> bool:
        """Set the skipped entries to 0, and add the products of the others to the sums.

        Args:
            index: the tokens of the chunk.
            gradient: the gradient in their ``hidden W^T``.
            hidden: their hidden states.
            sums: the gradients of the hidden states and of the weight so far.
            shared: whether the sum of the hidden states is that of both models.

        Returns:
            False if this would take as long as the full product; then no product has been added.
        """
        groups = self.grouped_(index, gradient)
        work = sum(len(group.rows) * len(group.columns) for group in groups)
        is_slower = OVERHEAD * work > gradient.numel()
        self.entries += gradient.numel()
        self.multiplied += gradient.numel() if is_slower else work
        if is_slower:
            return False
        sum_hidden, sum_weight = sums
        part = None if sum_hidden is None else sum_hidden.new_zeros(hidden.shape, dtype=self.model.dtype)
        for group in groups:
            add_group_(group, gradient, self.model, (hidden, self.buffer_bytes), (part, sum_weight))
        if sum_hidden is not None and part is not None:
            set_rows_(sum_hidden, index, part, add=shared)
        return True

    def grouped_(self, index: TokenIndex, gradient: Float[Tensor, "chunk vocab"]) -> list[ProductGroup]:
        """Set the skipped entries to 0, and return the groups of tokens."""
        counts: list[Tensor] = []
        left_out: list[Tensor] = []
        block = max(1, ROW_BLOCK // gradient.shape[1])
        for rows in in_parts(gradient, block):
            mask, row_left_out = keep_mask(rows, self.below, self.left_out.dtype)
            rows.mul_(mask)
            left_out.append(row_left_out)
            counts.append(mask.sum(-1))
        self.left_out[index] = torch.cat(left_out)
        order = torch.cat(counts).argsort(stable=True)
        return [ProductGroup(rows, nonzero_columns(gradient, rows, block)) for rows in in_parts(order, GROUP)]


def keep_mask(
    gradient: Float[Tensor, "rows vocab"], below: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, " rows"]]:
    """1 for each entry to keep and 0 for each to skip, and the sum of the absolute values of the skipped ones.

    A row that is not finite keeps everything. The mask is of numbers, since torch compares into them faster.
    """
    size = gradient.abs().to(dtype)
    total = size.sum(-1, keepdim=True)
    finite = total.isfinite()
    if not finite.all():
        size, total = torch.where(finite, size, 0.0), torch.where(finite, total, 0.0)
    allowed = below * total
    bound, mask = proposed_bound(size, allowed), torch.empty_like(size)
    while True:
        left_out = sum_below(size, bound, mask)
        over = left_out > allowed
        if not over.any():
            return torch.ge(size, bound, out=mask), left_out[:, 0]
        bound = torch.where(over, bound / 2, bound)


def sum_below(size: Tensor, bound: Float[Tensor, "rows 1"], buffer: Tensor) -> Float[Tensor, "rows 1"]:
    """The sum of the sizes below a bound; ``buffer`` has the shape of ``size``."""
    return _vecdot(size, torch.lt(size, bound, out=buffer))[:, None]


def proposed_bound(
    size: Float[Tensor, "rows vocab"], allowed: Float[Tensor, "rows 1"]
) -> Float[Tensor, "rows 1"]:
    """The bound below which the entries of each row sum to about the allowed sum, from a sample of the columns."""
    vocab_size = size.shape[1]
    step = max(1, vocab_size // SAMPLE)
    sample = size[:, ::step].contiguous()
    target, buffer = (
        (allowed if step == 1 else SAMPLE_TARGET / step * allowed),
        torch.empty_like(sample),
    )
    low, high = (allowed / vocab_size).log(), allowed.log()
    for _ in range(STEPS):
        middle = (low + high) / 2
        fits = sum_below(sample, middle.exp(), buffer) <= target
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    return low.exp()


def nonzero_columns(
    gradient: Float[Tensor, "chunk vocab"], rows: Int[Tensor, " rows"], block: int
) -> Int[Tensor, " columns"]:
    """The columns at which any of these rows is not 0."""
    nonzero = torch.zeros(gradient.shape[1], dtype=torch.bool, device=gradient.device)
    for part in in_parts(rows, block):
        nonzero |= gradient.index_select(0, part).abs_().amax(0) != 0
    return nonzero.nonzero()[:, 0]


def add_group_(
    group: ProductGroup,
    gradient: Float[Tensor, "chunk vocab"],
    model: HeadInputs,
    hidden_and_bytes: tuple[Float[Tensor, "chunk dim"], int],
    sums: tuple[Tensor | None, Tensor | None],
) -> None:
    """Add a group's ``gradient W`` and ``gradient^T hidden`` to the sums, in pieces that fit the buffer bytes twice."""
    (hidden, buffer_bytes), (sum_hidden, sum_weight), rows = hidden_and_bytes, sums, group.rows
    weight, group_hidden = model.head.weight, hidden.index_select(0, rows).to(gradient.dtype)
    assert weight is not None
    size = model.dtype.itemsize
    gathered_at_once = max(1, buffer_bytes // (GROUP * size))
    multiplied_at_once = max(1, buffer_bytes // (3 * max(1, weight.shape[1]) * size))
    for columns in in_parts(group.columns, gathered_at_once):
        piece = gathered(gradient, rows, columns)
        for part, some in zip(
            in_parts(piece.T, multiplied_at_once), in_parts(columns, multiplied_at_once), strict=True
        ):
            if sum_hidden is not None:
                weight_rows = weight.index_select(0, some).to(gradient.dtype)
                sum_hidden.index_add_(0, rows, product(part.T, weight_rows).to(sum_hidden.dtype))
            if sum_weight is not None:
                sum_weight.index_add_(0, some, product(part, group_hidden).to(sum_weight.dtype))


def gathered(
    gradient: Float[Tensor, "chunk vocab"], rows: Int[Tensor, " rows"], columns: Int[Tensor, " columns"]
) -> Float[Tensor, "rows columns"]:
    """Some columns of some rows, a few rows at a time, so that columns are gathered from memory in the cache."""
    piece = gradient.new_empty(len(rows), len(columns))
    block = max(1, ROW_BLOCK // gradient.shape[1])
    for part, out in zip(in_parts(rows, block), in_parts(piece, block), strict=True):
        torch.index_select(gradient.index_select(0, part), 1, columns, out=out)
    return piece


def in_parts(x: Tensor, size: int) -> Iterator[Tensor]:
    """``size`` entries of ``x`` at a time."""
    for start in range(0, len(x), size):
        yield x[start : start + size]


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a b``, in float32 where the device computes that from half-precision factors."""
    float32 = a.new_empty(0, dtype=torch.float32)
    return torch.mm(a, b, out_dtype=float32.dtype) if widens(a, b, float32) else a @ b


def report_skipped(
    options: LinearOptions, needed: bool, products: tuple[SkippingProducts | None, SkippingProducts | None]
) -> None:
    """Call ``options.report`` with what a gradient skipped, if it is set and a gradient was ``needed``."""
    if options.report is None or options.skip_below == 0.0 or not needed:
        return
    left_out_p, left_out_q = (None if x is None else x.left_out for x in products)
    counted = [x for x in products if x is not None]
    entries, multiplied = (sum(x.entries for x in counted), sum(x.multiplied for x in counted))
    options.report(Skipped(left_out_p, left_out_q, multiplied / entries if entries else 1.0))
