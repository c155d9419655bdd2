"""Value and gradient of a divergence in one go: the logits of a chunk become their gradient where they are."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.divergences import DIVERGENCES, Divergence
from kleash.linear.impl.across import Alone
from kleash.linear.impl.careful import KL, careful_gradient_, replace_
from kleash.linear.impl.lean import ROOMS, kl_gradient_rows
from kleash.linear.impl.loop import Chunk, Plan, blocks, chunks, in_room, plan
from kleash.linear.impl.pair import OneModel, Pair, Where
from kleash.linear.impl.project import into_hidden, into_weight_, narrow, pull_back_
from kleash.linear.impl.record_rows import ROOMS as RECORD_ROOMS
from kleash.linear.impl.record_rows import plain_rows, record_gradient_rows
from kleash.linear.impl.results import Formed, Needed
from kleash.linear.impl.skipping import Cutter, flipped, tell
from kleash.linear.options import LinearOptions

Turn: TypeAlias = Callable[["Chunk", Tensor, "tuple[Sums, Sums]"], Tensor]
"""Makes a chunk's logits the gradient of these weights' sum, has it taken in, and returns the values."""
Step: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None, Tensor | None]]
"""From a few rows of both logits, their weights, and whether q's are a difference, to each row's value and
the gradients of ``weight value`` in both logits. It may not write where the logits are."""
REVERSE_KL = DIVERGENCES["reverse_kl"]
WHOLE = LinearOptions()


class Sums:
    """The gradients of one model's tensors, while they are being added up."""

    def __init__(
        self,
        model: OneModel,
        needed: Needed,
        options: LinearOptions,
        weight: Tensor | None = None,
        *,
        wide: bool = False,
    ) -> None:
        """Zeros where a gradient is needed; ``weight`` is a sum to go on with; ``wide`` forbids bfloat16."""

        def zeros(tensor: Tensor | None, wanted: bool, dtype: torch.dtype) -> Tensor | None:
            return torch.zeros_like(tensor, dtype=dtype) if wanted and tensor is not None else None

        self.model, self.wanted, self.shared = model, any(needed), weight is not None
        self.narrow = self.wanted and narrow(model) and not wide
        self.hidden = zeros(model.hidden, needed[0], model.hidden.dtype)
        self.weight = zeros(model.head.weight, needed[1], model.dtype) if weight is None else weight
        self.bias = zeros(model.head.bias, needed[2], model.dtype)
        multiplied = model.head.weight is not None and any(needed[:2])
        self.cutter = Cutter(options, model) if options.skip_below and multiplied else None

    def room(self, z: Float[Tensor, "chunk vocab"]) -> Float[Tensor, "chunk vocab"]:
        """Where a chunk's gradient is put: where its logits are, as narrow as may be."""
        if not self.narrow:
            return z
        # Row n of the narrow gradient lies on row n/2 of the logits, which has been read by then.
        return z.view(torch.bfloat16).flatten()[: z.numel()].view(z.shape)

    def add(self, where: Where, gradient: Float[Tensor, "chunk vocab"], hidden: Tensor, tile: int) -> None:
        """Take in the gradient in a chunk's ``hidden W^T + bias``; of its products only what counts."""
        if self.bias is not None:
            self.bias.add_(gradient.sum(0, dtype=self.bias.dtype))
        if self.cutter is not None and self.cutter.add_(where, gradient, hidden, (self.hidden, self.weight)):
            return
        if self.hidden is not None:
            self.hidden[where] = into_hidden(gradient, self.model, tile).to(self.hidden.dtype)
        if self.weight is not None:
            into_weight_(self.weight, gradient, hidden, tile)

    @property
    def done(self) -> tuple[Tensor | None, ...]:
        """The gradients, each in its tensor's dtype."""
        sums = (self.hidden, None if self.shared else self.weight, self.bias)
        pairs = zip(sums, self.model.tensors, strict=True)
        return tuple(None if s is None or x is None else s.to(x.dtype) for s, x in pairs)


def both_sums(pair: Pair, needed: Needed, options: LinearOptions = WHOLE) -> tuple[Sums, Sums]:
    """For p and for q; one weight that is both heads' is summed once, as p's.

    In float32 then: what the two sides add to it nearly cancels where they nearly agree.
    """
    one = pair.p.head.weight is pair.q.head.weight and needed[1] and needed[4]
    sums_p = Sums(pair.p, needed[:3], options, wide=one)
    return sums_p, Sums(pair.q, needed[3:], options, sums_p.weight if one else None, wide=one)


def gradients(
    pair: Pair, record: Divergence, weights: Float[Tensor, " tokens"], needed: Needed, options: LinearOptions
) -> Formed:
    """The divergence of each token, and the gradient of ``sum weights D``."""
    if record == REVERSE_KL:
        formed = gradients(pair.swapped, KL, weights, needed[3:] + needed[:3], flipped(options))
        return Formed(formed.per_token, formed.gradients[3:] + formed.gradients[:3])
    needs = any(needed[:3]), any(needed[3:])

    def begin(tokens: int) -> tuple[Plan, Turn]:
        cut = plan(pair, options, ROOMS + 1 if record == KL else RECORD_ROOMS, tokens)
        step = kl_step(pair, cut, options, needs) if record == KL else record_step(record, needs, pair.across)
        return cut, lambda chunk, weights, sums: in_place(chunk, step, weights, cut, sums)

    return formed_by(pair, weights, needed, begin, apart=record == KL, options=options)


def formed_by(
    pair: Pair,
    weights: Float[Tensor, " tokens"],
    needed: Needed,
    begin: Callable[[int], tuple[Plan, Turn]],
    *,
    apart: bool,
    options: LinearOptions = WHOLE,
) -> Formed:
    """What ``begin`` makes of each chunk, for so many tokens as are read; sums of weights in float32.

    A token of weight 0 is not read: 0 is what is said of it, and what its hidden states get.
    """
    weights = weights.detach().to(pair.p.dtype)
    read = weights != 0
    positions = None if bool(read.all()) else read.nonzero()[:, 0]
    cut, turn = begin(pair.tokens if positions is None else len(positions))
    sums = both_sums(pair, needed, options)
    per_token = torch.zeros_like(weights)
    for chunk in chunks(pair, cut, positions=positions, apart=apart):
        per_token[chunk.where] = turn(chunk, weights[chunk.where], sums)
    tell(options, needed, (sums[0].cutter, sums[1].cutter))
    return Formed(per_token, sums[0].done + sums[1].done)


def in_place(
    chunk: Chunk, step: Step, weights: Float[Tensor, " chunk"], cut: Plan, sums: tuple[Sums, Sums]
) -> Float[Tensor, " chunk"]:
    """Replace a chunk's logits by their gradient, take it in, and return the values."""
    values = torch.empty_like(weights)
    room_p, room_q = sums[0].room(chunk.zp), sums[1].room(chunk.zq)
    p, q = chunk.pair.p, chunk.pair.q
    for here in blocks(chunk, cut.rows):
        zp, zq = chunk.zp[here], chunk.zq[here]
        values[here], in_p, in_q = step(zp, zq, weights[here], chunk.apart)
        if in_p is not None:
            pull_back_(in_p, zp, p.head, p.divisor(here))
        if in_q is not None:
            pull_back_(in_q, zq, q.head, q.divisor(here))
            room_q[here] = in_q
        if in_p is not None:
            room_p[here] = in_p
    if sums[0].wanted:
        sums[0].add(chunk.where, room_p, p.hidden, cut.tile)
    if sums[1].wanted:
        sums[1].add(chunk.where, room_q, q.hidden, cut.tile)
    return values


def kl_step(pair: Pair, cut: Plan, options: LinearOptions, needs: tuple[bool, bool]) -> Step:
    """The fast core, and for rows that it cannot do the careful ones."""
    core = in_room(kl_gradient_rows, pair, cut, options)

    def step(
        zp: Tensor, zq: Tensor, weight: Tensor, apart: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        found = core(zp, zq, weight, apart=apart, needs=needs)
        careful_gradient_(found, zp, zq, weight, apart, pair.across)
        return found[0], found[1], found[2]

    return step


def record_step(record: Divergence, needs: tuple[bool, bool], across: Alone) -> Step:
    """The core made from the record, and the specification for rows that it cannot do."""

    def step(
        zp: Tensor, zq: Tensor, weight: Tensor, apart: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        found = record_gradient_rows(record, zp, zq, weight, needs, across)
        for rare in across.parts(~found[0].isfinite()):
            replace_(found, rare, plain_rows(record, zp[rare], zq[rare], weight[rare], across))
        return found

    return step
