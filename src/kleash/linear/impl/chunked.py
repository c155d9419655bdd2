"""A chunk of tokens at a time, the elementwise work a few rows at a time: no ``[tokens, vocab]`` ever."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.divergences import Divergence
from kleash.linear.impl import divergence_rows, kl_fast
from kleash.linear.impl import row_statistics as rows
from kleash.linear.impl.fallback import KL, fallback_kl
from kleash.linear.impl.forward_saved import SavedForward, SavedGradient
from kleash.linear.impl.gradient import REVERSE_KL, beginning, gradients, walked
from kleash.linear.impl.loop import Core, RowCore, per_token
from kleash.linear.impl.native import rows as native_rows
from kleash.linear.impl.objective import evaluate_objective
from kleash.linear.impl.pair import HeadPair
from kleash.linear.impl.reference import divergence_of_logits, statistics_of_logits
from kleash.linear.impl.results import Needed
from kleash.linear.impl.vocab_shards import LOCAL_VOCAB, LocalVocab
from kleash.linear.options import LinearOptions
from kleash.linear.statistics import StatisticsAndTop, TokenStatistics

__all__ = [
    "divergence",
    "evaluate_objective",
    "gradients",
    "statistics_and_top",
    "token_statistics",
    "values_saving_forward",
]


def plainly(record: Divergence) -> RowCore:
    """The record's divergence, by the specification."""

    def rows(zp: Tensor, zq: Tensor, across: LocalVocab = LOCAL_VOCAB) -> tuple[Tensor]:
        return (divergence_of_logits(record, zp, zq, across),)

    return rows


KL_CORE = Core(
    kl_fast.kl_rows, fallback_kl, slice(0, 1), kl_fast.NUM_BUFFERS, native=native_rows.kl_rows, apart=True
)
STATISTICS = Core(
    rows.statistics_rows,
    statistics_of_logits,
    slice(2, 4),
    rows.NUM_BUFFERS,
    native=native_rows.statistics_rows,
)


def divergence(pair: HeadPair, record: Divergence, options: LinearOptions) -> Float[Tensor, " tokens"]:
    """The divergence of each token."""
    if record == REVERSE_KL:
        return divergence(pair.swapped, KL, options)
    if record == KL:
        return per_token(KL_CORE, pair, options)[0]
    core = Core(
        divergence_rows.record_rows(record),
        plainly(record),
        slice(0, 1),
        divergence_rows.NUM_BUFFERS,
        compiles=False,
    )
    return per_token(core, pair, options)[0]


def values_saving_forward(
    pair: HeadPair, record: Divergence, needed: Needed, options: LinearOptions
) -> tuple[Float[Tensor, " tokens"], SavedForward | None]:
    """The divergence of each token, and of those of the last chunk the gradient too, for ``gradients`` to weigh.

    Ranks that share a vocabulary keep nothing.
    """
    if record == REVERSE_KL:
        return values_saving_forward(pair.swapped, KL, needed[3:] + needed[:3], options)
    if pair.across is not LOCAL_VOCAB or pair.tokens == 0:
        return divergence(pair, record, options), None
    planned = beginning(pair, record, needed, options)(pair.tokens)
    cut, _ = planned
    start = (pair.tokens - 1) // cut.chunk * cut.chunk
    first, last = pair.at(slice(0, start)), pair.at(slice(start, None))
    values = [divergence(first, record, options)] if start else []
    keep = SavedGradient(any(needed[:3])), SavedGradient(any(needed[3:]))
    ones = torch.ones(last.tokens, dtype=pair.p.dtype, device=pair.p.hidden.device)
    # Cut as all tokens are: by themselves the last might become two chunks, of which only one could be kept.
    values.append(walked(last, ones, keep, lambda _: planned, record == KL))
    kept = SavedForward(start=start, last=last, gradients=(keep[0].gradient, keep[1].gradient), tile=cut.tile)
    return torch.cat(values), kept


def token_statistics(
    pair: HeadPair, tokens: Int[Tensor, " tokens"], options: LinearOptions
) -> TokenStatistics:
    """The statistics of each token."""
    return TokenStatistics(*per_token(STATISTICS, pair, options, tokens))


def statistics_and_top(
    pair: HeadPair, tokens: Int[Tensor, " tokens"], options: LinearOptions, top: int
) -> StatisticsAndTop:
    """The statistics of each token, and both models' likeliest tokens there, from the same logits."""

    def tops(zp: Tensor, zq: Tensor) -> tuple[Tensor, ...]:
        return *rows.top_rows(zp, top), *rows.top_rows(zq, top)

    *numbers, zp, ids_p, zq, ids_q = per_token(STATISTICS, pair, options, tokens, of_logits=tops)
    return rows.with_top(TokenStatistics(*numbers), (zp, ids_p), (zq, ids_q))
