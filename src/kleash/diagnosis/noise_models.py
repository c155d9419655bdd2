"""Likelihoods of the differences between two columns of log-probabilities, under models of rounding and of faults.

Independent errors of standard deviation sigma in the logits change the log-probability of a token of probability p by
about sigma (1 - p): a token that is nearly certain stays so. All scales here are in this unit, "nats of a logit".
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MACHINE_EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Relative spacing of numbers, by dtype."""
HEALTHY_EPSILONS = 4
"""Largest healthy error of a logit in units of its dtype's epsilon: logits are of size 4 to 32, and the hidden states
behind them have been rounded some dozens of times."""
FLOOR_NATS = 1e-5
"""Error of a log-probability that is there in any case: the softmax in float32, and the digits of the file."""
OUTLIER_SHARE = 1e-4
"""Share of outliers that a healthy engine may have."""
HEALTHY_TAIL, FAULT_TAIL = 5.0, 3.0
"""Degrees of freedom of Student's t for rounding, and for errors on a share of the tokens."""
COARSE_TAILS = (HEALTHY_TAIL, 10.0, 30.0)
"""Degrees of freedom for coarse rounding: tails no heavier than those of healthy rounding."""
MODEL_TAILS = (1.0, 1.5, 2.0, 3.0)
"""Degrees of freedom of Student's t for differences between two models, which are fitted: how much positions differ."""
SCALES_PER_DECADE = 6
LARGEST_COARSE_SCALE = 16 * MACHINE_EPSILON["bfloat16"] / math.sqrt(12)
"""Error of logits between 16 and 32 that are rounded to bfloat16: 0.036 nats."""


class Residuals(NamedTuple):
    """What is left of the differences between trainer and engine under a hypothesis."""

    values: Floats
    """In nats, one for each token."""
    unit: Floats
    """1 - p of each token."""
    extra: Floats | float = 0.0
    """Standard deviation of a further error of each token, in nats."""

    def scale(self, logit_scale: Floats | float) -> Floats:
        """The standard deviation of each token, for errors of ``logit_scale`` nats in the logits."""
        return np.sqrt((logit_scale * self.unit) ** 2 + FLOOR_NATS**2 + np.square(self.extra))


@dataclass(frozen=True, kw_only=True)
class NoiseFit:
    """The best parameters of a noise model."""

    log_likelihood: Floats
    """Per token."""
    scale: float
    """Of the errors of logits, in nats."""
    share: float = 0.0
    """Of the tokens that are far out."""
    parameters: int = 1

    @property
    def total(self) -> float:
        """The log-likelihood of all tokens."""
        return float(self.log_likelihood.sum())


def healthy_scale(dtype: str) -> float:
    """The largest error of logits that rounding explains, in nats, where networks run in ``dtype``."""
    return HEALTHY_EPSILONS * MACHINE_EPSILON[dtype]


def token_unit(log_probabilities: Floats) -> Floats:
    """1 - p, the change of a log-probability for each nat of error in its logit."""
    return -np.expm1(np.minimum(log_probabilities, 0.0))


def scales_between(low: float, high: float) -> Floats:
    """Scales at equal ratios, both ends included."""
    count = 2 + int(SCALES_PER_DECADE * math.log10(high / low))
    return np.geomspace(low, high, count)


def rounding_scales(largest_scale: float) -> Floats:
    """The scales of rounding that are tried, in nats: down to 1e-7, or to a tenth of the largest."""
    return scales_between(min(1e-7, largest_scale / 10), largest_scale)


def rounding(residuals: Residuals, largest_scale: float) -> NoiseFit:
    """The fit of rounding errors of at most ``largest_scale``: the model of a healthy engine.

    Student's t with 5 degrees of freedom, and one token in 10 000 anywhere. Either all tokens have one scale, or a
    mixture of all scales up to the largest, whose weights are fitted: kernels and batches differ in rounding.
    """
    scales = rounding_scales(largest_scale)
    fits = [_contaminated(residuals, scale, OUTLIER_SHARE) for scale in scales]
    log_likelihoods = np.stack([fit.log_likelihood for fit in fits])
    highest = log_likelihoods.max(axis=0)
    likelihoods = np.exp(log_likelihoods - highest)
    weights = np.full(len(scales), 1 / len(scales))
    for _ in range(MIXTURE_STEPS):
        weights *= (likelihoods / (weights @ likelihoods)).mean(axis=1)
    mixture = NoiseFit(
        log_likelihood=highest + np.log(weights @ likelihoods), scale=float(np.sqrt(weights @ scales**2))
    )
    return max([mixture, *fits], key=lambda fit: fit.total)


MIXTURE_STEPS = 30
"""Steps of expectation maximisation."""


def rounding_by_sequence(residuals: Residuals, largest_scale: float, sequence: NDArray[np.int64]) -> NoiseFit:
    """The fit of rounding errors whose scale differs from response to response, with equal weight for each scale."""
    scales = rounding_scales(largest_scale)
    log_likelihoods = np.stack(
        [_contaminated(residuals, scale, OUTLIER_SHARE).log_likelihood for scale in scales]
    )
    sums = np.stack([np.bincount(sequence, weights=row) for row in log_likelihoods])
    highest = sums.max(axis=0)
    share = np.exp(sums - highest)
    integrated = highest + np.log(share.mean(axis=0))
    lengths = np.bincount(sequence)
    return NoiseFit(
        log_likelihood=(integrated / np.maximum(lengths, 1))[sequence],
        scale=float(np.sqrt(np.mean((share / share.sum(axis=0)).T @ scales**2))),
    )


def coarse_rounding(residuals: Residuals, smallest_scale: float, largest_scale: float) -> NoiseFit | None:
    """The fit of errors of logits between two scales without heavy tails, as of low precision.

    None if the scales are in the wrong order.
    """
    if smallest_scale >= largest_scale:
        return None
    fits = (
        _contaminated(residuals, scale, OUTLIER_SHARE, freedom=freedom)
        for scale in scales_between(smallest_scale, largest_scale)
        for freedom in COARSE_TAILS
    )
    return max(fits, key=lambda fit: fit.total)


def equal_noise(residuals: Residuals, largest_scale: float, smallest_noise: float) -> NoiseFit | None:
    """The fit of errors of one size in all log-probabilities, also where a token is nearly certain.

    None if the tokens at which rounding of the logits is smaller do not show them.

    Args:
        residuals: of the tokens.
        largest_scale: of rounding of the logits, which is there as well.
        smallest_noise: of the errors of the log-probabilities, in nats.
    """
    fits = [
        (_contaminated(noisy, part * largest_scale, OUTLIER_SHARE), float(noise))
        for noise in scales_between(smallest_noise, max(LARGEST_EQUAL_NOISE, 2 * smallest_noise))
        for noisy in [residuals._replace(extra=np.hypot(residuals.extra, noise))]
        for part in (1e-3, 0.03, 0.1, 0.3, 1.0)
    ]
    fit, noise = max(fits, key=lambda pair: pair[0].total)
    is_certain = residuals.unit * fit.scale < noise / 3
    is_visible = is_certain & (np.abs(residuals.values) > noise / 2)
    if is_visible.sum() < max(LEAST_VISIBLE, LEAST_VISIBLE_SHARE * is_certain.sum()):
        return None
    # Errors of a token of probability 1 have one sign, since no probability is larger. Others have both.
    free = residuals.values[is_visible & (residuals.unit > 2 * noise)]
    if len(free) >= LEAST_VISIBLE and min(np.mean(free > 0), np.mean(free < 0)) < LEAST_SIGN_SHARE:
        return None
    return replace(fit, scale=noise, parameters=2)


LARGEST_EQUAL_NOISE = 0.3
"""Errors of one size in all log-probabilities, in nats, that are not larger than those of 8 bits."""
LEAST_SIGN_SHARE = 0.1
"""Share of the errors that have the rarer sign, if they are rounding."""
LEAST_VISIBLE, LEAST_VISIBLE_SHARE = 5, 0.2
"""Tokens, and share of those with small errors of logits, that show an error of one size in all log-probabilities."""


def other_model(
    residuals: Residuals, smallest_scale: float, weight: Floats | None = None, rounding_scale: float = 0.0
) -> NoiseFit:
    """The fit of differences on every token with heavy tails, as between two models.

    Args:
        residuals: of the tokens.
        smallest_scale: of a difference that counts as one.
        weight: a factor of the scale for each token; None for 1.
        rounding_scale: of errors of logits that are there as well.
    """
    factor = np.ones_like(residuals.unit) if weight is None else weight
    fits = (
        NoiseFit(
            log_likelihood=log_t(
                residuals.values, residuals.scale(np.hypot(scale * factor, rounding_scale)), freedom
            ),
            scale=float(scale),
            parameters=2,
        )
        for scale in scales_between(smallest_scale, 20.0)
        for freedom in MODEL_TAILS
    )
    return max(fits, key=lambda fit: fit.total)


def some_tokens(residuals: Residuals, largest_scale: float, smallest_scale: float) -> NoiseFit:
    """The fit of rounding on most tokens and larger errors on a share of 2 to 80 %, as of changed routing.

    Args:
        residuals: of the tokens.
        largest_scale: of rounding.
        smallest_scale: of the larger errors.
    """
    cores = [
        rounding(residuals, largest_scale),
        *(_contaminated(residuals, scale, OUTLIER_SHARE) for scale in core_scales(largest_scale)),
    ]
    fits = (
        NoiseFit(
            log_likelihood=np.logaddexp(math.log1p(-share) + core.log_likelihood, math.log(share) + fault),
            scale=float(scale),
            share=share,
            parameters=3,
        )
        for scale in scales_between(smallest_scale, max(1.0, 2 * smallest_scale))
        for fault in [log_t(residuals.values, residuals.scale(scale), FAULT_TAIL)]
        for share in (0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8)
        for core in cores
    )
    return max(fits, key=lambda fit: fit.total)


def few_tokens_far_out(residuals: Residuals, largest_scale: float) -> NoiseFit:
    """The fit of rounding on nearly all tokens and differences of nats on at most 2 %, as of a missing shard."""
    cores = [
        rounding(residuals, largest_scale),
        *(_contaminated(residuals, scale, 0.0) for scale in core_scales(largest_scale)),
    ]
    fits = (
        _with_outliers(residuals, core, share, width)
        for core in cores
        for share in (5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02)
        for width in (1.0, 3.0, 8.0, math.inf)
    )
    return replace(max(fits, key=lambda fit: fit.total), parameters=3)


def core_scales(largest_scale: float) -> Floats:
    """The scales of rounding that are tried where some tokens have larger errors: the upper two decades of all."""
    scales = rounding_scales(largest_scale)
    return scales[scales >= largest_scale / 100]


def _contaminated(
    residuals: Residuals, scale: float, share: float, *, freedom: float = HEALTHY_TAIL
) -> NoiseFit:
    """The fit of Student's t for rounding, with a share of outliers of a Laplace distribution."""
    core = log_t(residuals.values, residuals.scale(scale), freedom)
    fit = NoiseFit(log_likelihood=core, scale=float(scale))
    return _with_outliers(residuals, fit, share, width=1.0) if share else fit


def _with_outliers(residuals: Residuals, core: NoiseFit, share: float, width: float) -> NoiseFit:
    """The fit of rounding with a share of outliers of a Laplace distribution.

    For an infinite width, they have a Cauchy distribution, whose tail reaches to probabilities of 0.
    """
    if math.isinf(width):
        outlier = log_t(residuals.values, np.ones_like(residuals.values), 1.0)
    else:
        outlier = -np.abs(residuals.values) / width - math.log(2 * width)
    log_likelihood = np.logaddexp(math.log1p(-share) + core.log_likelihood, math.log(share) + outlier)
    return replace(core, log_likelihood=log_likelihood, share=share)


def log_t(values: Floats, scale: Floats, freedom: float) -> Floats:
    """The log-density of Student's t."""
    constant = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    return constant - np.log(scale) - (freedom + 1) / 2 * np.log1p((values / scale) ** 2 / freedom)
