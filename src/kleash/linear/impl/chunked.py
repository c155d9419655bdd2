"""A chunk of tokens at a time, the elementwise work a few rows at a time: no ``[tokens, vocab]`` ever."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.divergences import Divergence
from kleash.linear.impl import lean, record_rows, rows
from kleash.linear.impl.across import ALONE, Alone
from kleash.linear.impl.careful import KL, careful_kl
from kleash.linear.impl.gradient import REVERSE_KL, beginning, gradients, walked
from kleash.linear.impl.keeping import Keep, Kept
from kleash.linear.impl.loop import Core, RowCore, per_token
from kleash.linear.impl.native import rows as native_rows
from kleash.linear.impl.objective import judged
from kleash.linear.impl.pair import Pair
from kleash.linear.impl.reference import divergence_of_logits, statistics_of_logits
from kleash.linear.impl.results import Needed
from kleash.linear.options import LinearOptions
from kleash.linear.statistics import StatisticsAndTop, TokenStatistics

__all__ = ["divergence", "gradients", "judged", "keeping", "statistics_and_top", "token_statistics"]


def plainly(record: Divergence) -> RowCore:
    """The record's divergence, by the specification."""

    def rows(zp: Tensor, zq: Tensor, across: Alone = ALONE) -> tuple[Tensor]:
        return (divergence_of_logits(record, zp, zq, across),)

    return rows


KL_CORE = Core(lean.kl_rows, careful_kl, slice(0, 1), lean.ROOMS, native=native_rows.kl_rows, apart=True)
STATISTICS = Core(
    rows.statistics_rows, statistics_of_logits, slice(2, 4), rows.ROOMS, native=native_rows.statistics_rows
)


def divergence(pair: Pair, record: Divergence, options: LinearOptions) -> Float[Tensor, " tokens"]:
    """The divergence of each token."""
    if record == REVERSE_KL:
        return divergence(pair.swapped, KL, options)
    if record == KL:
        return per_token(KL_CORE, pair, options)[0]
    core = Core(
        record_rows.record_rows(record), plainly(record), slice(0, 1), record_rows.ROOMS, compiles=False
    )
    return per_token(core, pair, options)[0]


def keeping(
    pair: Pair, record: Divergence, needed: Needed, options: LinearOptions
) -> tuple[Float[Tensor, " tokens"], Kept | None]:
    """The divergence of each token, and of those of the last chunk the gradient too, for ``gradients`` to weigh.

    Ranks that share a vocabulary keep nothing.
    """
    if record == REVERSE_KL:
        return keeping(pair.swapped, KL, needed[3:] + needed[:3], options)
    if pair.across is not ALONE or pair.tokens == 0:
        return divergence(pair, record, options), None
    planned = beginning(pair, record, needed, options)(pair.tokens)
    cut, _ = planned
    start = (pair.tokens - 1) // cut.chunk * cut.chunk
    first, last = pair.at(slice(0, start)), pair.at(slice(start, None))
    values = [divergence(first, record, options)] if start else []
    keep = Keep(any(needed[:3])), Keep(any(needed[3:]))
    ones = torch.ones(last.tokens, dtype=pair.p.dtype, device=pair.p.hidden.device)
    # Cut as all tokens are: by themselves the last might become two chunks, of which only one could be kept.
    values.append(walked(last, ones, keep, lambda _: planned, record == KL))
    kept = Kept(start=start, last=last, gradients=(keep[0].gradient, keep[1].gradient), tile=cut.tile)
    return torch.cat(values), kept


def token_statistics(pair: Pair, tokens: Int[Tensor, " tokens"], options: LinearOptions) -> TokenStatistics:
    """The statistics of each token."""
    return TokenStatistics(*per_token(STATISTICS, pair, options, tokens))


def statistics_and_top(
    pair: Pair, tokens: Int[Tensor, " tokens"], options: LinearOptions, top: int
) -> StatisticsAndTop:
    """The statistics of each token, and both models' likeliest tokens there, from the same logits."""

    def tops(zp: Tensor, zq: Tensor) -> tuple[Tensor, ...]:
        return *rows.top_rows(zp, top), *rows.top_rows(zq, top)

    *numbers, zp, ids_p, zq, ids_q = per_token(STATISTICS, pair, options, tokens, of_logits=tops)
    return rows.with_top(TokenStatistics(*numbers), (zp, ids_p), (zq, ids_q))
