"""The loop of ``chunked`` with a kernel for each row: matmuls by the vendor's library, two reads of the logits.

A chunk's products are made as there, then one kernel reads them for all that is to be known about a row and one
reads them again for the gradient, which it writes over them. The host waits for nothing in between. Values
alone are fused with their products where the memory is for few tokens at a time.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.divergences import Divergence
from kleash.linear.impl import chunked
from kleash.linear.impl.gradient import REVERSE_KL, GradientSums, Turn, both_sums, formed_by
from kleash.linear.impl.loop import Chunk, Plan, chunks, plan
from kleash.linear.impl.pair import HeadPair
from kleash.linear.impl.project import finish_
from kleash.linear.impl.results import (
    Needed,
    Objective,
    ObjectiveResult,
    ValueAndGrad,
    objective_value_and_grad,
)
from kleash.linear.impl.row_statistics import top_rows, with_top
from kleash.linear.impl.triton import fused
from kleash.linear.impl.triton.rows import measured, statistics, turned
from kleash.linear.options import LinearOptions
from kleash.linear.statistics import StatisticsAndTop, TokenStatistics, TokenTerms

FEW = 512
"""Tokens in a chunk below which reading the weights costs a GPU more than multiplying by them."""


def divergence(pair: HeadPair, record: Divergence, options: LinearOptions) -> Float[Tensor, " tokens"]:
    """KL of each token, of p from q or of q from p."""
    pair = pair.swapped if record == REVERSE_KL else pair
    cut = cut_for(pair, options)
    if cut.chunk < min(FEW, pair.tokens) and fused.possible(pair):
        return fused.divergence(pair)
    found = torch.empty(pair.tokens, dtype=pair.p.dtype, device=pair.p.hidden.device)
    for chunk in chunks(pair, cut, apart=shared_exactly(pair)):
        found[chunk.where] = measured(chunk).kl
    return found


def values_saving_forward(
    pair: HeadPair, record: Divergence, needed: Needed, options: LinearOptions
) -> tuple[Float[Tensor, " tokens"], None]:
    """KL of each token; nothing of its gradient is kept."""
    return divergence(pair, record, options), None


def token_statistics(
    pair: HeadPair, tokens: Int[Tensor, " tokens"], options: LinearOptions
) -> TokenStatistics:
    """The statistics of each token."""
    parts = [
        statistics(measured(chunk, tokens[chunk.where]))
        for chunk in chunks(pair, cut_for(pair, options), apart=shared_exactly(pair))
    ]
    if not parts:
        whole = pair.p.hidden.new_empty(0, dtype=pair.p.dtype)
        places = ("top1_p", "top1_q", "rank_q")
        return TokenStatistics(*(whole.long() if x in places else whole for x in TokenStatistics._fields))
    return TokenStatistics(*(torch.cat(numbers) for numbers in zip(*parts, strict=True)))


def statistics_and_top(
    pair: HeadPair, tokens: Int[Tensor, " tokens"], options: LinearOptions, top: int
) -> StatisticsAndTop:
    """The statistics of each token, and both models' likeliest tokens there, from the same logits."""
    if not pair.tokens:
        return chunked.statistics_and_top(pair, tokens, options, top)
    parts: list[tuple[Tensor, ...]] = []
    for chunk in chunks(pair, cut_for(pair, options)):
        numbers = statistics(measured(chunk, tokens[chunk.where]))
        tops: list[Tensor] = []
        for z, model in ((chunk.zp, chunk.pair.p), (chunk.zq, chunk.pair.q)):
            finish_(z, model.head, model.divisor(slice(0, len(z))))
            tops += top_rows(z, top)
        parts.append((*numbers, *tops))
    *numbers, zp, ids_p, zq, ids_q = (torch.cat(each) for each in zip(*parts, strict=True))
    return with_top(TokenStatistics(*numbers), (zp, ids_p), (zq, ids_q))


def gradients(
    pair: HeadPair,
    record: Divergence,
    weights: Float[Tensor, " tokens"],
    needed: Needed,
    options: LinearOptions,
) -> ValueAndGrad:
    """KL of each token, and the gradient of ``sum weights KL``."""
    if record == REVERSE_KL:
        back = needed[3:] + needed[:3]
        formed = formed_by(
            pair.swapped, weights, back, beginning(pair.swapped, options), apart=shared_exactly(pair)
        )
        return ValueAndGrad(formed.per_token, formed.gradients[3:] + formed.gradients[:3])
    return formed_by(pair, weights, needed, beginning(pair, options), apart=shared_exactly(pair))


def evaluate_objective(
    pair: HeadPair,
    tokens: Int[Tensor, " tokens"],
    objective: Objective,
    needed: Needed,
    options: LinearOptions,
) -> ObjectiveResult:
    """The sum of the objective's losses, the terms, and the gradients that are needed."""
    sums = both_sums(pair, needed)
    dtype, device = pair.p.dtype, pair.p.hidden.device
    loss = torch.zeros((), dtype=dtype, device=device)
    found = TokenTerms(*(torch.empty(pair.tokens, dtype=dtype, device=device) for _ in TokenTerms._fields))
    cut = cut_for(pair, options)
    for chunk in chunks(pair, cut, apart=shared_exactly(pair)):
        where = chunk.where
        assert isinstance(where, slice)
        rows = measured(chunk, tokens[where])
        for numbers, new in zip(found, rows.terms, strict=True):
            numbers[where] = new
        part, c = objective_value_and_grad(objective, rows.terms, where)
        loss += part
        if any(needed):
            rooms = room(sums[0], chunk.zp), room(sums[1], chunk.zq)
            turned(rows, c, *rooms)
            unused = (c.token_logp == 0) & (c.token_logq == 0) & (c.kl == 0) & (c.entropy == 0)
            take_in(chunk, rooms, sums, cut.tile, unused)
    return ObjectiveResult(loss, found, sums[0].done + sums[1].done)


def beginning(pair: HeadPair, options: LinearOptions) -> Callable[[int], tuple[Plan, Turn]]:
    """How so many tokens are cut, and what is done to a chunk."""

    def begin(tokens: int) -> tuple[Plan, Turn]:
        cut = cut_for(pair, options, tokens)

        def turn(chunk: Chunk, weights: Tensor, sums: tuple[GradientSums, GradientSums]) -> Tensor:
            rows = measured(chunk)
            rooms = room(sums[0], chunk.zp), room(sums[1], chunk.zq)
            turned(rows, weights, *rooms)
            take_in(chunk, rooms, sums, cut.tile)
            return rows.kl

        return cut, turn

    return begin


def take_in(
    chunk: Chunk,
    rooms: tuple[Tensor | None, Tensor | None],
    sums: tuple[GradientSums, GradientSums],
    tile: int,
    unused: Tensor | None = None,
) -> None:
    """Add a chunk's gradient to the sums; a row of zeros times a hidden state that is NaN would still be NaN."""
    for model, gradient, total in zip((chunk.pair.p, chunk.pair.q), rooms, sums, strict=True):
        if gradient is not None:
            hidden = model.hidden if unused is None else model.hidden.masked_fill(unused[:, None], 0.0)
            total.add(chunk.where, gradient, hidden, tile)


def room(total: GradientSums, z: Float[Tensor, "chunk vocab"]) -> Tensor | None:
    """Where a chunk's gradient goes: over its logits, each row where its own begins, as narrow as may be."""
    if not total.wanted:
        return None
    return z.view(torch.bfloat16)[:, : z.shape[1]] if total.narrow else z


def shared_exactly(pair: HeadPair) -> bool:
    """Whether q's logits come as their difference from p's, where one head serves both.

    More exact, and free unless the products are of bfloat16, in which a difference has no exact place.
    """
    return all(x is None or x.dtype == torch.float32 for x in pair.tensors)


def cut_for(pair: HeadPair, options: LinearOptions, tokens: int | None = None) -> Plan:
    """The plan of a loop whose elementwise work needs no room; one row's worth of it is set aside."""
    return plan(pair, options, 1, tokens)
