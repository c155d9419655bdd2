"""The products of a gradient in logits without its smallest entries, as ``skip_below`` asks.

Each token gives up its smallest entries as long as what it gives up is at most ``skip_below`` of the sum of all
their sizes: a property of the token alone, wherever chunks end. Tokens that keep similarly many words then share
a product, which is taken over the words that any of them keeps. A search on a sample of the words proposes where
to cut; what counts is the exact sum of what lies below, which is taken before anything is left out.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kleash.linear.impl.loop import ROW_BLOCK
from kleash.linear.impl.pair import OneModel, Where
from kleash.linear.impl.project import into_weight_, widens
from kleash.linear.options import LinearOptions, Skipped

GROUP = 128
"""Tokens that share a product."""
SAMPLE = 2048
"""Words among which the place to cut is sought."""
CAUTION = 0.75
"""How much of what may be given up is aimed at, where only a sample of the words is looked at."""
OVERHEAD = 1.3
"""What an entry costs in a product over gathered words, beside one in a product over all."""


class Group(NamedTuple):
    """Tokens of a chunk that share a product, and the words that any of them keeps."""

    rows: Int[Tensor, " rows"]
    words: Int[Tensor, " words"]


class Cutter:
    """Cuts one model's gradient, chunk by chunk, and keeps count."""

    def __init__(self, options: LinearOptions, model: OneModel) -> None:
        """Nothing has been cut yet."""
        self.model, self.below = model, options.skip_below
        self.width = words_at_once(model, options.buffer_bytes)
        self.left_out = torch.zeros(len(model.hidden), dtype=model.dtype, device=model.hidden.device)
        self.entries, self.multiplied = 0, 0

    def add_(
        self,
        where: Where,
        gradient: Float[Tensor, "chunk vocab"],
        hidden: Float[Tensor, "chunk dim"],
        sums: tuple[Tensor | None, Tensor | None],
    ) -> bool:
        """Put 0 for what is left out, and add the products of the rest, for hidden states and weight, to the sums.

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
            add_group_(group, gradient, self.model, (hidden, self.width), (part, total))
        if into is not None and part is not None:
            into[where] = part.to(into.dtype)
        return True

    def groups_(self, where: Where, gradient: Float[Tensor, "chunk vocab"]) -> list[Group]:
        """Put 0 for what is left out, and say who shares a product."""
        need: list[Tensor] = []
        left_out: list[Tensor] = []
        block = max(1, ROW_BLOCK // gradient.shape[1])
        for rows in in_parts(gradient, block):
            small, left = cut(rows, self.below, self.left_out.dtype)
            rows.masked_fill_(small, 0.0)
            left_out.append(left)
            need.append((~small).sum(-1))
        self.left_out[where] = torch.cat(left_out)
        order = torch.cat(need).argsort(stable=True)
        return [Group(rows, kept_words(gradient, rows, block)) for rows in in_parts(order, GROUP)]


def words_at_once(model: OneModel, buffer_bytes: int) -> int:
    """Words whose products are taken together: they, and rows of the weight and of its sum, fill an eighth."""
    width = 0 if model.head.weight is None else model.head.weight.shape[1]
    return max(1, buffer_bytes // 8 // ((GROUP + 3 * width) * model.dtype.itemsize))


def cut(
    gradient: Float[Tensor, "rows vocab"], below: float, dtype: torch.dtype
) -> tuple[Bool[Tensor, "rows vocab"], Float[Tensor, " rows"]]:
    """Which entries are left out of each row, and the sum of their sizes; nothing of a row that is not finite."""
    size = gradient.abs().to(dtype)
    total = size.sum(-1, keepdim=True)
    allowed = below * total
    bound = torch.where(total.isfinite(), proposed(size, allowed), 0.0)
    while True:
        small = size < bound
        left = torch.where(small, size, 0.0).sum(-1, keepdim=True)
        over = left > allowed
        if not over.any():
            return small, left[:, 0]
        bound = torch.where(over, bound / 2, bound)


def proposed(size: Float[Tensor, "rows vocab"], allowed: Float[Tensor, "rows 1"]) -> Float[Tensor, "rows 1"]:
    """Below which size the entries of each row probably come to what is allowed."""
    step = max(1, size.shape[1] // SAMPLE)
    ordered = size[:, ::step].sort(-1).values
    aim = allowed if step == 1 else CAUTION / step * allowed
    fitting = (ordered.cumsum(-1) <= aim).sum(-1, keepdim=True)
    return ordered.gather(-1, fitting.clamp(max=ordered.shape[1] - 1))


def kept_words(
    gradient: Float[Tensor, "chunk vocab"], rows: Int[Tensor, " rows"], block: int
) -> Int[Tensor, " words"]:
    """The words at which any of these rows is not 0."""
    kept = torch.zeros(gradient.shape[1], dtype=torch.bool, device=gradient.device)
    for some in in_parts(rows, block):
        kept |= (gradient[some] != 0).any(0)
    return kept.nonzero()[:, 0]


def add_group_(
    group: Group,
    gradient: Float[Tensor, "chunk vocab"],
    model: OneModel,
    given: tuple[Float[Tensor, "chunk dim"], int],
    sums: tuple[Tensor | None, Tensor | None],
) -> None:
    """Add ``gradient W`` and ``gradient^T hidden`` to the sums, so many words at a time."""
    (hidden, width), (into, total), rows = given, sums, group.rows
    weight, own = model.head.weight, hidden[rows]
    assert weight is not None
    for words in in_parts(group.words, width):
        piece = gradient[rows[:, None], words]
        if into is not None:
            into.index_add_(0, rows, product(piece, weight[words].to(piece.dtype)).to(into.dtype))
        if total is not None:
            part = total[words]
            into_weight_(part, piece, own, len(words))
            total[words] = part


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
