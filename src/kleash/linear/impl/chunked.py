"""A chunk of tokens at a time, the elementwise work a few rows at a time: no ``[tokens, vocab]`` ever."""

from jaxtyping import Float, Int
from torch import Tensor

from kleash.divergences import Divergence
from kleash.linear.impl import lean, record_rows, rows
from kleash.linear.impl.across import ALONE, Alone
from kleash.linear.impl.careful import KL, careful_kl
from kleash.linear.impl.gradient import REVERSE_KL, gradients
from kleash.linear.impl.loop import Core, RowCore, per_token
from kleash.linear.impl.objective import judged
from kleash.linear.impl.pair import Pair
from kleash.linear.impl.reference import divergence_of_logits, statistics_of_logits
from kleash.linear.options import LinearOptions
from kleash.linear.statistics import TokenStatistics

__all__ = ["divergence", "gradients", "judged", "token_statistics"]


def plainly(record: Divergence) -> RowCore:
    """The record's divergence, by the specification."""

    def rows(zp: Tensor, zq: Tensor, across: Alone = ALONE) -> tuple[Tensor]:
        return (divergence_of_logits(record, zp, zq, across),)

    return rows


KL_CORE = Core(lean.kl_rows, careful_kl, slice(0, 1), lean.ROOMS, apart=True)
STATISTICS = Core(rows.statistics_rows, statistics_of_logits, slice(2, 4), rows.ROOMS)


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


def token_statistics(pair: Pair, tokens: Int[Tensor, " tokens"], options: LinearOptions) -> TokenStatistics:
    """The statistics of each token."""
    return TokenStatistics(*per_token(STATISTICS, pair, options, tokens))
