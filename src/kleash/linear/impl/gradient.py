"""Value and gradient of a divergence in one go: the logits of a chunk become their gradient where they are."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.divergences import DIVERGENCES, Divergence
from kleash.linear.impl.compiling import goes_native
from kleash.linear.impl.divergence_rows import NUM_BUFFERS as DIVERGENCE_BUFFERS
from kleash.linear.impl.divergence_rows import plain_rows, record_gradient_rows
from kleash.linear.impl.fallback import KL, fallback_gradient_, replace_rows_
from kleash.linear.impl.forward_saved import SavedForward
from kleash.linear.impl.kl_fast import NUM_BUFFERS, kl_gradient_rows
from kleash.linear.impl.loop import Chunk, Plan, blocks, chunks, in_room, plan
from kleash.linear.impl.native.rows import kl_gradient_, scratch
from kleash.linear.impl.pair import HeadPair
from kleash.linear.impl.project import narrow, pull_back_
from kleash.linear.impl.results import Needed, ValueAndGrad
from kleash.linear.impl.skipping import flipped, tell
from kleash.linear.impl.sums import WHOLE, GradientSums, both_sums
from kleash.linear.impl.vocab_shards import LocalVocab
from kleash.linear.options import LinearOptions

Turn: TypeAlias = Callable[["Chunk", Tensor, "tuple[GradientSums, GradientSums]"], Tensor]
"""Makes a chunk's logits the gradient of these weights' sum, has it taken in, and returns the values."""
Step: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None, Tensor | None]]
"""From a few rows of both logits, their weights, and whether q's are a difference, to each row's value and
the gradients of ``weight value`` in both logits. Where the logits are it writes their own gradient, or nothing."""
Begin: TypeAlias = Callable[[int], "tuple[Plan, Turn]"]
"""How so many tokens are cut, and what is done to a chunk of them."""
REVERSE_KL = DIVERGENCES["reverse_kl"]


def gradients(
    pair: HeadPair,
    record: Divergence,
    weights: Float[Tensor, " tokens"],
    needed: Needed,
    options: LinearOptions,
    kept: SavedForward | None = None,
) -> ValueAndGrad:
    """The divergence of each token, and the gradient of ``sum weights D``.

    Of tokens whose gradient was ``kept``, and of those of weight 0, 0 is said and not the divergence.
    """
    if record == REVERSE_KL:
        formed = gradients(pair.swapped, KL, weights, needed[3:] + needed[:3], flipped(options), kept)
        return ValueAndGrad(formed.per_token, formed.gradients[3:] + formed.gradients[:3])
    begin = beginning(pair, record, needed, options)
    return formed_by(pair, weights, needed, begin, apart=record == KL, options=options, kept=kept)


def beginning(pair: HeadPair, record: Divergence, needed: Needed, options: LinearOptions) -> Begin:
    """How so many tokens are cut, and what is done to a chunk."""
    needs = any(needed[:3]), any(needed[3:])

    def begin(tokens: int) -> tuple[Plan, Turn]:
        if record == KL and goes_native(pair, options):
            cut = plan(pair, options, 0 if replaceable(pair) else 2, tokens, native=True)
            step = native_kl_step(pair, cut, needs)
        elif record == KL:
            cut = plan(pair, options, NUM_BUFFERS + 1, tokens)
            step = kl_step(pair, cut, options, needs)
        else:
            cut = plan(pair, options, DIVERGENCE_BUFFERS, tokens)
            step = record_step(record, needs, pair.across)
        return cut, lambda chunk, weights, sums: in_place(chunk, step, weights, cut, sums)

    return begin


def formed_by(
    pair: HeadPair,
    weights: Float[Tensor, " tokens"],
    needed: Needed,
    begin: Begin,
    *,
    apart: bool,
    options: LinearOptions = WHOLE,
    kept: SavedForward | None = None,
) -> ValueAndGrad:
    """What ``begin`` makes of each chunk, and what was kept, weighed; sums of weights in float32."""
    sums = both_sums(pair, needed, options)
    weights = weights.detach().to(pair.p.dtype)
    if kept is not None:
        weights = kept.pour_(weights, sums)
    per_token = walked(pair, weights, sums, begin, apart)
    tell(options, needed, (sums[0].cutter, sums[1].cutter))
    return ValueAndGrad(per_token, sums[0].done + sums[1].done)


def walked(
    pair: HeadPair,
    weights: Float[Tensor, " tokens"],
    sums: tuple[GradientSums, GradientSums],
    begin: Begin,
    apart: bool,
) -> Float[Tensor, " tokens"]:
    """The divergence of each token, whose gradients are taken in by the sums.

    A token of weight 0 is not read: 0 is what is said of it, and what its hidden states get.
    """
    read = weights != 0
    positions = None if bool(read.all()) else read.nonzero()[:, 0]
    cut, turn = begin(pair.tokens if positions is None else len(positions))
    per_token = torch.zeros_like(weights)
    for chunk in chunks(pair, cut, positions=positions, apart=apart):
        per_token[chunk.where] = turn(chunk, weights[chunk.where], sums)
    return per_token


def in_place(
    chunk: Chunk,
    step: Step,
    weights: Float[Tensor, " chunk"],
    cut: Plan,
    sums: tuple[GradientSums, GradientSums],
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
            put_(room_q[here], in_q)
        if in_p is not None:
            put_(room_p[here], in_p)
    if sums[0].wanted:
        sums[0].add(chunk.where, room_p, p.hidden, cut.tile)
    if sums[1].wanted:
        sums[1].add(chunk.where, room_q, q.hidden, cut.tile)
    return values


def put_(room: Float[Tensor, "rows vocab"], gradient: Float[Tensor, "rows vocab"]) -> None:
    """Copy the gradient into the room, unless that is where it is."""
    if room.data_ptr() != gradient.data_ptr() or room.dtype != gradient.dtype:
        room.copy_(gradient)


def replaceable(pair: HeadPair) -> bool:
    """Whether gradients may take the place of their logits at once: nothing after needs those, nor is narrower."""
    return all(model.head.softcap is None and not narrow(model) for model in (pair.p, pair.q))


def native_kl_step(pair: HeadPair, cut: Plan, needs: tuple[bool, bool]) -> Step:
    """The library in C, and for rows that it cannot do the careful functions."""
    words, in_place = pair.p.vocabulary, replaceable(pair)
    room = scratch(words, cut.threads)
    outs = [torch.empty(cut.rows, words) if needed and not in_place else None for needed in needs]

    def step(
        zp: Tensor, zq: Tensor, weight: Tensor, apart: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        free = [z if out is None else out[: len(z)] for z, out in zip((zp, zq), outs, strict=True)]
        in_p, in_q = (z if needed else None for z, needed in zip(free, needs, strict=True))
        found = kl_gradient_(zp, zq, weight, (in_p, in_q), room, apart=apart), in_p, in_q
        fallback_gradient_(found, zp, zq, weight, apart)
        return found

    return step


def kl_step(pair: HeadPair, cut: Plan, options: LinearOptions, needs: tuple[bool, bool]) -> Step:
    """The fast core, and for rows that it cannot do the careful ones."""
    core = in_room(kl_gradient_rows, pair, cut, options)

    def step(
        zp: Tensor, zq: Tensor, weight: Tensor, apart: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        found = core(zp, zq, weight, apart=apart, needs=needs)
        fallback_gradient_(found, zp, zq, weight, apart, pair.across)
        return found[0], found[1], found[2]

    return step


def record_step(record: Divergence, needs: tuple[bool, bool], across: LocalVocab) -> Step:
    """The core made from the record, and the specification for rows that it cannot do."""

    def step(
        zp: Tensor, zq: Tensor, weight: Tensor, apart: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        found = record_gradient_rows(record, zp, zq, weight, needs, across)
        for rare in across.row_parts(~found[0].isfinite(), zp.shape[1]):
            replace_rows_(found, rare, plain_rows(record, zp[rare], zq[rare], weight[rare], across))
        return found

    return step
