"""The products of a gradient in logits without its smallest entries, as ``skip_below`` asks.

Each token gives up its smallest entries as long as what it gives up is at most ``skip_below`` of the sum of all
their sizes: a property of the token alone, wherever chunks end. Tokens that keep similarly many words then share
a product, which is taken over the words that any of them keeps. A search on a sample of the words proposes where
to cut; what counts is the exact sum of what lies below, which is taken before anything is left out.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.linear.impl.loop import ROW_BLOCK
from kleash.linear.impl.pair import HeadInputs, Where
from kleash.linear.impl.project import add_rows_, widens
from kleash.linear.options import LinearOptions, Skipped

GROUP = 128
"""Tokens that share a product."""
SAMPLE = 2048
"""Words among which the place to cut is sought."""
CAUTION = 0.75
"""How much of what may be given up is aimed at, where only a sample of the words is looked at."""
STEPS = 10
"""Halvings of the range in which the place to cut is sought."""
OVERHEAD = 2.5
"""What an entry costs, gathered and multiplied, beside one in a product over all: measured by linear_skipping.py."""

_vecdot = cast("Any", torch.linalg).vecdot


class Group(NamedTuple):
    """Tokens of a chunk that share a product, and the words that any of them keeps."""

    rows: Int[Tensor, " rows"]
    words: Int[Tensor, " words"]


class Cutter:
    """Cuts one model's gradient, chunk by chunk, and keeps count."""

    def __init__(self, options: LinearOptions, model: HeadInputs) -> None:
        """Nothing has been cut yet."""
        self.model, self.below = model, options.skip_below
        self.room = options.chunk_bytes // 16
        self.left_out = torch.zeros(len(model.hidden), dtype=model.dtype, device=model.hidden.device)
        self.entries, self.multiplied = 0, 0

    def add_(
        self,
        where: Where,
        gradient: Float[Tensor, "chunk vocab"],
        hidden: Float[Tensor, "chunk dim"],
        sums: tuple[Tensor | None, Tensor | None],
        *,
        shared: bool = False,
    ) -> bool:
        """Put 0 for what is left out, and add the products of the rest, for hidden states and weight, to the sums.

        ``shared``: the sum for hidden states is that of both models.
        False if that is as dear as multiplying everything: then nothing has been added.
        """
        groups = self.groups_(where, gradient)
        work = sum(len(group.rows) * len(group.words) for group in groups)
        dear = OVERHEAD * work > gradient.numel()
        self.entries += gradient.numel()
        self.multiplied += gradient.numel() if dear else work
        if dear:
            return False
        into, total = sums
        part = None if into is None else into.new_zeros(hidden.shape, dtype=self.model.dtype)
        for group in groups:
            add_group_(group, gradient, self.model, (hidden, self.room), (part, total))
        if into is not None and part is not None:
            add_rows_(into, where, part, shared=shared)
        return True

    def groups_(self, where: Where, gradient: Float[Tensor, "chunk vocab"]) -> list[Group]:
        """Put 0 for what is left out, and say who shares a product."""
        need: list[Tensor] = []
        left_out: list[Tensor] = []
        block = max(1, ROW_BLOCK // gradient.shape[1])
        for rows in in_parts(gradient, block):
            kept, left = cut(rows, self.below, self.left_out.dtype)
            rows.mul_(kept)
            left_out.append(left)
            need.append(kept.sum(-1))
        self.left_out[where] = torch.cat(left_out)
        order = torch.cat(need).argsort(stable=True)
        return [Group(rows, kept_words(gradient, rows, block)) for rows in in_parts(order, GROUP)]


def cut(
    gradient: Float[Tensor, "rows vocab"], below: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, " rows"]]:
    """What to multiply each entry by, 0 or 1, and the sum of the sizes of those by 0.

    A row that is not finite keeps everything. Comparisons write numbers: they are faster than truth values.
    """
    size = gradient.abs().to(dtype)
    total = size.sum(-1, keepdim=True)
    finite = total.isfinite()
    if not finite.all():
        size, total = torch.where(finite, size, 0.0), torch.where(finite, total, 0.0)
    allowed = below * total
    bound, small = proposed(size, allowed), torch.empty_like(size)
    while True:
        left = below_sum(size, bound, small)
        over = left > allowed
        if not over.any():
            return torch.ge(size, bound, out=small), left[:, 0]
        bound = torch.where(over, bound / 2, bound)


def below_sum(size: Tensor, bound: Float[Tensor, "rows 1"], small: Tensor) -> Float[Tensor, "rows 1"]:
    """The sum of the sizes below a bound; ``small`` is room."""
    return _vecdot(size, torch.lt(size, bound, out=small))[:, None]


def proposed(size: Float[Tensor, "rows vocab"], allowed: Float[Tensor, "rows 1"]) -> Float[Tensor, "rows 1"]:
    """Below which size the entries of each row probably come to what is allowed, from a sample of the words."""
    words = size.shape[1]
    step = max(1, words // SAMPLE)
    sample = size[:, ::step].contiguous()
    aim, small = (allowed if step == 1 else CAUTION / step * allowed), torch.empty_like(sample)
    low, high = (allowed / words).log(), allowed.log()
    for _ in range(STEPS):
        middle = (low + high) / 2
        fits = below_sum(sample, middle.exp(), small) <= aim
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    return low.exp()


def kept_words(
    gradient: Float[Tensor, "chunk vocab"], rows: Int[Tensor, " rows"], block: int
) -> Int[Tensor, " words"]:
    """The words at which any of these rows is not 0."""
    kept = torch.zeros(gradient.shape[1], dtype=torch.bool, device=gradient.device)
    for some in in_parts(rows, block):
        kept |= gradient.index_select(0, some).abs_().amax(0) != 0
    return kept.nonzero()[:, 0]


def add_group_(
    group: Group,
    gradient: Float[Tensor, "chunk vocab"],
    model: HeadInputs,
    given: tuple[Float[Tensor, "chunk dim"], int],
    sums: tuple[Tensor | None, Tensor | None],
) -> None:
    """Add ``gradient W`` and ``gradient^T hidden`` to the sums, in pieces for which there is room twice."""
    (hidden, room), (into, total), rows = given, sums, group.rows
    weight, own = model.head.weight, hidden.index_select(0, rows).to(gradient.dtype)
    assert weight is not None
    size = model.dtype.itemsize
    at_once = max(1, room // (GROUP * size)), max(1, room // (3 * max(1, weight.shape[1]) * size))
    for words in in_parts(group.words, at_once[0]):
        piece = gathered(gradient, rows, words)
        for part, some in zip(in_parts(piece.T, at_once[1]), in_parts(words, at_once[1]), strict=True):
            if into is not None:
                rows_of_weight = weight.index_select(0, some).to(gradient.dtype)
                into.index_add_(0, rows, product(part.T, rows_of_weight).to(into.dtype))
            if total is not None:
                total.index_add_(0, some, product(part, own).to(total.dtype))


def gathered(
    gradient: Float[Tensor, "chunk vocab"], rows: Int[Tensor, " rows"], words: Int[Tensor, " words"]
) -> Float[Tensor, "rows words"]:
    """Some words of some rows, a few rows at a time, because words are found faster in memory that is near."""
    piece = gradient.new_empty(len(rows), len(words))
    block = max(1, ROW_BLOCK // gradient.shape[1])
    for some, out in zip(in_parts(rows, block), in_parts(piece, block), strict=True):
        torch.index_select(gradient.index_select(0, some), 1, words, out=out)
    return piece


def in_parts(x: Tensor, size: int) -> Iterator[Tensor]:
    """``size`` of them at a time."""
    for start in range(0, len(x), size):
        yield x[start : start + size]


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a b``, in float32 where the device gives that out of half-precision factors."""
    wide = a.new_empty(0, dtype=torch.float32)
    return torch.mm(a, b, out_dtype=wide.dtype) if widens(a, b, wide) else a @ b


def tell(
    options: LinearOptions, needed: tuple[bool, ...], cutters: tuple[Cutter | None, Cutter | None]
) -> None:
    """Report what was left out of a gradient, if anybody wants to know."""
    if options.report is None or options.skip_below == 0.0 or not any(needed):
        return
    of_p, of_q = (None if cutter is None else cutter.left_out for cutter in cutters)
    counted = [cutter for cutter in cutters if cutter is not None]
    entries, multiplied = (sum(c.entries for c in counted), sum(c.multiplied for c in counted))
    options.report(Skipped(of_p, of_q, multiplied / entries if entries else 1.0))


def flipped(options: LinearOptions) -> LinearOptions:
    """The options of a call in which q stands in p's place."""
    report = options.report
    if report is None:
        return options

    def back(skipped: Skipped) -> None:
        report(Skipped(skipped.left_out_q, skipped.left_out_p, skipped.multiplied))

    return replace(options, report=back)
