"""The row functions of ``rows`` for torch's compiler: in the dtype of the logits, for whole vocabularies on one rank.

Most GPUs compute float64 at a thirtieth of the rate of float32 or less. Float32 loses nothing here because no small
number is a difference of large ones. With ``d = z_p - z_q``, ``c`` its mean under p and ``r = d - c``,

    KL(p || q) = log E_p exp(-r) = log1p(E_p phi(r)),    phi(r) = expm1(-r) + r,    log p - log q = d - c + KL

where phi is a series near 0. A mean that is rounded is corrected by the mean of ``r``, which would be 0. Columns are
float64. Rows that these sums cannot hold, because logits are not finite or the models 88 nats apart, get a column that
is not finite.
"""

import os
import sysconfig
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.divergences.generator import phi_series
from kleash.errors import CannotRunError
from kleash.linear.pair import HeadPair
from kleash.linear.rows import StatisticRows, TermRows, cut_rounding, nan_unless_finite
from kleash.linear.types import LinearOptions, TokenTerms
from kleash.linear.vocab_shards import VocabShards

NEAR = 1.0
"""The log ratio up to which a series is taken; beyond it, differences lose no digit."""
PHI_SERIES = {torch.float32: 11, torch.float64: 20}
"""The highest power in the series of phi, by dtype."""
GAP_SERIES = {torch.float32: 10, torch.float64: 24}
"""The terms of the series of ``entropy_gap``, by dtype."""

MOST_GRAPHS = 64
"""The most graphs of one function."""
PAYS_FROM = 5 * 10**9
"""Logits of one model above which compiling (about 10 s) saves time (about 2 ns a logit) on a CPU."""
PAYS_FROM_ON_A_GPU = 10**8
"""Such logits on a GPU: a tenth of a nanosecond is saved for each, in a thousand such calls of a training run."""


def should_compile(pair: HeadPair, options: LinearOptions) -> bool:
    """Whether torch compiles this call's row functions.

    This depends on the call and the installation only, so that a number never depends on earlier calls.

    Raises:
        CannotRunError: if ``compile=True`` and something is missing.
    """
    if options.compile is False or (options.compile is None and pair.is_sharded):
        return False
    if pair.is_sharded:
        raise CannotRunError(
            "compile=True cannot compile the collectives of a head on several ranks; leave compile out"
        )
    missing = missing_for_compiling(pair.device.type)
    if options.compile and missing is not None:
        raise CannotRunError(f"compile=True needs {missing}; install it, or leave compile out")
    pays_from = PAYS_FROM if pair.device.type == "cpu" else PAYS_FROM_ON_A_GPU
    is_long = pair.tokens * pair.vocab_shards.local_size >= pays_from
    return missing is None and (options.compile is True or is_long)


@cache
def missing_for_compiling(device: str) -> str | None:
    """What torch's compiler needs for this type of device and is missing; None if nothing is."""
    # Triton, which compiles for GPUs, builds what loads its kernels with a C compiler.
    language, variable, usual = ("C++", "CXX", ["g++"]) if device == "cpu" else ("C", "CC", ["gcc", "clang"])
    compilers = [os.environ[variable]] if variable in os.environ else usual
    if not any(map(which, compilers)):
        return f"a {language} compiler ({' or '.join(compilers)}), which is not there"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.exists() else f"Python's headers, and {header} is not there"


@cache
def compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """A row function, compiled by torch: for all sizes, on a GPU for all numbers of rows.

    There it is tuned to the sizes of its first call, and the vocabulary of that call may be a small one. Torch compiles
    a graph for each dtype, for one row and for several, and for what needs a gradient, of which its own limit is 8.
    """
    # Torch says so where a GPU gets few rows at a time; it is slower, and no caller's doing.
    warnings.filterwarnings("ignore", r"\s*Online softmax is disabled", UserWarning)
    from torch._dynamo import config  # takes a second
    from torch._dynamo.decorators import maybe_mark_dynamic

    is_cpu = device == "cpu"
    graphs = cast("Any", torch).compile(function, fullgraph=True, dynamic=is_cpu or None)

    @torch.no_grad()
    def call(*arguments: Tensor | tuple[Tensor, ...] | VocabShards, **options: Any) -> tuple[Any, ...]:
        for argument in arguments:
            for column in argument if isinstance(argument, tuple) else (argument,):
                if isinstance(column, Tensor) and not is_cpu:
                    maybe_mark_dynamic(column, 0)
        with config.patch(recompile_limit=MOST_GRAPHS):
            return graphs(*arguments, **options)

    return call


class Exponentials(NamedTuple):
    """The logits of a distribution, and their exponentials without overflow."""

    z: Float[Tensor, "rows vocab"]
    top: Float[Tensor, "rows 1"]
    """The largest logits."""
    masses: Float[Tensor, "rows vocab"]
    """``exp(z - top)``: proportional to the probabilities."""


class Moments(NamedTuple):
    """Sums over the words under a distribution p, of its logits and those of another, q; columns."""

    total: Float[Tensor, "rows 1"]
    """Of the masses of p."""
    mean: Float[Tensor, "rows 1"]
    """Mean under p of the difference of the logits, p's minus q's."""
    kl: Float[Tensor, "rows 1"]
    """KL(p || q)."""
    entropy: Float[Tensor, "rows 1"]
    """Of p."""
    log_sum: Float[Tensor, "rows 1"]
    """Log-sum-exp of p's logits."""

    @property
    def shift(self) -> Float[Tensor, "rows 1"]:
        """Log-sum-exp of p's logits minus that of q's: what their difference exceeds the log ratio by."""
        return self.mean - self.kl

    @property
    def log_sum_of_q(self) -> Float[Tensor, "rows 1"]:
        """Log-sum-exp of q's logits."""
        return self.log_sum - self.shift


def difference(
    zp: Float[Tensor, "rows vocab"], zq: Float[Tensor, "rows vocab"], shift: Float[Tensor, "rows 1"]
) -> Float[Tensor, "rows vocab"]:
    """``zp - zq - shift``, rounded once: models that nearly agree may differ by a large constant.

    What the rounded difference loses is a number of the same type (Knuth, The Art of Computer Programming, 4.2.2).
    """
    d = zp - zq
    of_zq = d - zp
    lost = (zp - (d - of_zq)) - (zq + of_zq)
    rounded = shift.to(zp.dtype)
    return d - rounded + (lost - (shift - rounded).to(zp.dtype))


def exponentials(z: Float[Tensor, "rows vocab"]) -> Exponentials:
    """The exponentials of some logits."""
    top = z.amax(-1, keepdim=True)
    return Exponentials(z, top, (z - top).exp())


def moments(p: Exponentials, q: Exponentials) -> Moments:
    """The sums under p."""
    below = p.z - p.top
    total = p.masses.sum(-1, keepdim=True)
    centre = (p.masses * (p.z - q.z)).sum(-1, keepdim=True) / total
    r = difference(p.z, q.z, centre)
    first = p.masses * r
    # Beyond the series, q's mass is not exp(-r) times p's, which may be 0.
    terms = torch.where(
        r.abs() <= NEAR,
        p.masses * phi_series(-r, PHI_SERIES[r.dtype]),
        q.masses * (centre + q.top - p.top).exp() - p.masses + first,
    )
    summed = (x.sum(-1, keepdim=True).double() for x in (first, terms, p.masses * below))
    total = total.double()
    rounding, excess, mean_below = (x / total for x in summed)
    log_total = total.log()
    return Moments(
        total=total,
        mean=centre + rounding,
        kl=(rounding + torch.log1p(excess - rounding)).clamp(min=0),
        entropy=log_total - mean_below,
        log_sum=p.top.double() + log_total,
    )


def probabilities(z: Float[Tensor, "rows vocab"], log_sum: Float[Tensor, "rows 1"]) -> Tensor:
    """``exp(z - log_sum)``, where the column has more digits than the logits."""
    rounded = log_sum.to(z.dtype)
    return (z - rounded).exp() * (rounded - log_sum).exp().to(z.dtype)


def mass_ahead(p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
    """``p - q``, without cancellation where the two nearly agree."""
    return (p + q) * relative_difference(log_ratio.abs()).copysign(log_ratio)


def relative_difference(size: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """``|p - q|/(p + q) = tanh(size/2)`` where the log ratio has this size."""
    ratio = torch.expm1(-size)
    return ratio / -(ratio + 2)


def kl_gradient_rows(
    zp: Tensor,
    zq: Tensor,
    weight: Float[Tensor, "rows 1"],
    vocab_shards: VocabShards,
    *,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """KL(p || q), and the gradients of ``weight KL`` in both logits, where needed; ``rows.kl_gradient_rows``."""
    p, q = exponentials(zp), exponentials(zq)
    x, dtype, in_p, in_q = moments(p, q), zp.dtype, None, None
    weighted_p = p.masses * (weight / x.total).to(dtype)
    if needs[0]:
        in_p = weighted_p * difference(zp, zq, x.mean)
    if needs[1]:
        weighted_q = weight.to(dtype) * probabilities(zq, x.log_sum_of_q)
        in_q = mass_ahead(weighted_p, weighted_q, difference(zp, zq, x.shift)).neg()
    return x.kl, in_p, in_q


def term_rows(
    zp: Tensor, zq: Tensor, tokens: Int[Tensor, " rows"], vocab_shards: VocabShards
) -> tuple[Tensor, ...]:
    """The fields of TermRows; ``rows.term_rows``. ``vocab_shards`` is not read: compiled rows are on one rank."""
    x = moments(exponentials(zp), exponentials(zq))
    token_logs = (
        z.gather(-1, tokens[:, None]) - log_sum for z, log_sum in ((zp, x.log_sum), (zq, x.log_sum_of_q))
    )
    return *token_logs, x.kl, x.entropy, x.log_sum, x.log_sum_of_q


def objective_gradient_rows(
    zp: Tensor,
    zq: Tensor,
    tokens: Int[Tensor, " rows"],
    known: TermRows,
    c: TokenTerms,
    vocab_shards: VocabShards,
    *,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """The KL, and the gradients of ``sum of c term`` in both logits, where needed; ``rows.objective_gradient_rows``."""
    dtype, in_p, in_q = zp.dtype, None, None
    p, shift = probabilities(zp, known.log_sum_p), known.log_sum_p - known.log_sum_q
    of_logp, of_logq, of_kl, of_entropy = (x.to(dtype) for x in c)
    if needs[0]:
        logp_and_entropy = zp + (known.entropy - known.log_sum_p).to(dtype)
        in_p = p * (of_kl * difference(zp, zq, shift + known.kl) - of_entropy * logp_and_entropy - of_logp)
        in_p = in_p.scatter_add(-1, tokens[:, None], of_logp)
    if needs[1]:
        q = probabilities(zq, known.log_sum_q)
        in_q = -of_kl * mass_ahead(p, q, difference(zp, zq, shift)) - of_logq * q
        in_q = in_q.scatter_add(-1, tokens[:, None], of_logq)
    return nan_unless_finite(known.kl, zp, zq, vocab_shards), in_p, in_q


def statistics_rows(
    zp: Tensor, zq: Tensor, tokens: Int[Tensor, " rows"], vocab_shards: VocabShards
) -> tuple[Tensor, ...]:
    """The fields of StatisticRows; ``rows.statistics_sums`` with ``rows.finished_statistics``."""
    p, q = exponentials(zp), exponentials(zq)
    x, y = moments(p, q), moments(q, p)
    sum_of_both = p.masses / x.total.to(zp.dtype) + q.masses / y.total.to(zp.dtype)
    size = difference(zp, zq, x.shift).abs()
    distance = (sum_of_both * relative_difference(size)).sum(-1, keepdim=True).double() / 2
    jensen_shannon = (sum_of_both * entropy_gap(size)).sum(-1, keepdim=True).double() / 2
    return tuple(
        StatisticRows(
            token_logp=zp.gather(-1, tokens[:, None]) - x.log_sum,
            token_logq=zq.gather(-1, tokens[:, None]) - x.log_sum_of_q,
            kl_pq=x.kl,
            kl_qp=y.kl,
            jensen_shannon=cut_rounding(jensen_shannon, distance),
            total_variation=distance,
            entropy_p=x.entropy,
            entropy_q=y.entropy,
            log_sum_p=x.log_sum,
            log_sum_q=x.log_sum_of_q,
        )
    )


def entropy_gap(size: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """log 2 minus the entropy of a coin whose log odds have this size, in nats. With ``t = tanh(size/2)`` it is

        t^2/2 + t^4/12 + ... + t^2k/(2k (2k - 1)) + ... = log(1 + t) - (1 - t) size/2

    The Jensen-Shannon divergence is the sum of (p + q)/2 times this gap for the log ratio of p and q.
    """
    t = relative_difference(size)
    square, series = t * t, torch.zeros_like(t)
    for k in range(GAP_SERIES[t.dtype], 0, -1):
        series = (series + 1 / (2 * k * (2 * k - 1))) * square
    return torch.where(size <= NEAR, series, torch.log1p(t) - (1 - t) * size / 2)
