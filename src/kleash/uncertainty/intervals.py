"""95 % confidence intervals of linearised estimates: Student's t with a correction for skewness and for bounds."""

import math

import numpy as np

from kleash.estimate import Estimate
from kleash.uncertainty.diagnostics import FEW_CLUSTERS, unseen_share, warnings_about
from kleash.uncertainty.linearisation import LinearisedEstimate
from kleash.uncertainty.student_t import student_t_quantile

SMALL_SAMPLE_WEIGHT = 18.0
"""Additional weight of the skewness of a sample, times sqrt(clusters): a sample of a long-tailed quantity mostly lacks
the tail. Chosen by simulation: benchmarks/intervals.py."""
MAX_T_RATIO = 2.5
"""No end of an interval is farther from the estimate than this many times Student's t."""

Interval = tuple[float, float]


def estimate_of(
    linearised: LinearisedEstimate,
    unit: str,
    lower: float | None,
    upper: float | None,
    *,
    fitted: int = 0,
    known_value: float | None = None,
) -> Estimate:
    """The ``Estimate`` with standard error, interval and warnings of a linearised estimate.

    Args:
        linearised: the estimate.
        unit: of it.
        lower: its smallest possible value; None if there is none.
        upper: its largest possible value; None if there is none.
        fitted: number of parameters that were fitted to the same clusters; each costs a degree of freedom.
        known_value: the mean that every cluster has by construction, if it is known; an estimate whose clusters all
            have this mean is exact.
    """
    value, clusters = linearised.value, linearised.clusters
    if clusters and value == known_value and not linearised.influence.any():
        return Estimate(value=value, unit=unit, standard_error=0.0, clusters=clusters, ci95=(value, value))
    bounds = (-math.inf if lower is None else lower, math.inf if upper is None else upper)
    error = standard_error(linearised, fitted)
    interval = (
        constant_interval(linearised, bounds) if error == 0 else _interval(linearised, error, bounds, fitted)
    )
    return Estimate(
        value=value,
        unit=unit,
        standard_error=error,
        clusters=clusters,
        ci95=clip_interval(interval, value, bounds),
        warnings=tuple(warnings_about(linearised, bounds)),
    )


def standard_error(linearised: LinearisedEstimate, fitted: int = 0) -> float:
    """The cluster-robust standard error, sqrt(C / (C - 1 - fitted) sum of squared influences); NaN if not defined."""
    degrees_of_freedom = linearised.clusters - 1 - fitted
    if linearised.why_no_standard_error or degrees_of_freedom < 1:
        return math.nan
    # by hypot, since the squares of large influences, as on a mean of weights, overflow
    return math.sqrt(linearised.clusters / degrees_of_freedom) * float(np.hypot.reduce(linearised.influence))


def _interval(linearised: LinearisedEstimate, error: float, bounds: Interval, fitted: int) -> Interval:
    """The interval by Student's t corrected for skewness, extended away from a bound to that of the logarithm.

    A few long clusters decide the error of a mean over tokens. It varies as that of as many clusters of equal length as
    have the same information, whose number, and not that of all clusters, gives the degrees of freedom.
    """
    if linearised.why_no_standard_error or math.isnan(linearised.value):
        return math.nan, math.nan
    if math.isnan(error):
        return -math.inf, math.inf
    degrees_of_freedom = max(1.0, linearised.effective_clusters - 1 - fitted)
    below, above = skewness_corrected_t(linearised.skewness, linearised.clusters, degrees_of_freedom)
    below = max(below, log_scale_t(bounds[1] - linearised.value, error, degrees_of_freedom))
    above = max(above, log_scale_t(linearised.value - bounds[0], error, degrees_of_freedom))
    return linearised.value - below * error, linearised.value + above * error


def skewness_corrected_t(skewness: float, clusters: int, degrees_of_freedom: float) -> tuple[float, float]:
    """Student's t below and above the estimate, with a larger value on the side of the long tail.

        t min(exp(w |g|), MAX_T_RATIO),    w = (1 + 2 t^2) / (6 t) + SMALL_SAMPLE_WEIGHT min(1, C / 30) / sqrt(1 + nu)

    To first order ``t w |g|``, without the second term of w, is the term of the Edgeworth expansion by which Johnson
    (1978) and Hall (1992) correct a studentised mean for a known skewness g; w converges to it as the number of
    clusters grows. The exponential keeps the end monotone in g, as Hall's cubic does. The other end is not moved
    inwards, since the skewness of a sample may come from one cluster by chance.

    Args:
        skewness: of the mean, ``LinearisedEstimate.skewness``; above 0 if the long tail is above.
        clusters: C.
        degrees_of_freedom: nu of Student's t, which clusters of different lengths make smaller than C - 1.

    References:
        Johnson (1978), "Modified t Tests and Confidence Intervals for Asymmetrical Populations".
        Hall (1992), "On the Removal of Skewness by Transformation".
    """
    t = student_t_quantile(0.975, degrees_of_freedom)
    edgeworth_weight = (1 + 2 * t * t) / (6 * t)
    weight = edgeworth_weight + (
        SMALL_SAMPLE_WEIGHT * min(1.0, clusters / FEW_CLUSTERS) / math.sqrt(1 + degrees_of_freedom)
    )
    tail = t * min(math.exp(weight * abs(skewness)), MAX_T_RATIO)
    return (t, tail) if skewness > 0 else (tail, t)


def log_scale_t(distance: float, error: float, degrees_of_freedom: float) -> float:
    """How many standard errors the interval extends away from a bound, by Student's t of the log distance to the bound.

        (exp(t error / distance) - 1) distance / error,    at most MAX_T_RATIO t

    A quantity that cannot pass a bound has its tail on the other side: for a mean KL of 0.1 with an error of 0.05 the
    end is 0.1 exp(0.5 t). 0, so that the caller's own t decides, without a bound or for an estimate outside it.

    Args:
        distance: from the bound to the estimate; infinite if there is no bound.
        error: the standard error, above 0.
        degrees_of_freedom: of Student's t.
    """
    if not 0 < distance < math.inf:
        return 0.0
    t = student_t_quantile(0.975, degrees_of_freedom)
    exponent = t * error / distance
    return (
        t * MAX_T_RATIO if exponent > MAX_T_RATIO else t * min(math.expm1(exponent) / exponent, MAX_T_RATIO)
    )


def constant_interval(linearised: LinearisedEstimate, bounds: Interval) -> Interval:
    """The interval of a mean whose clusters are all equal, although they need not be equal by construction.

    A share of up to 1 - 0.025^(1/C) of all clusters can be missing from the sample and have any mean within the
    bounds: the Clopper-Pearson interval for a share of 0, with the effective number of clusters as in Korn and
    Graubard. Infinite on a side without a bound.

    References:
        Clopper & Pearson (1934), "The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial".
        Korn & Graubard (1998), "Confidence Intervals for Proportions With Small Expected Number of Positive Counts
        Estimated From Survey Data".
    """
    unseen = unseen_share(linearised.effective_clusters, 0.975)
    lower, upper = bounds
    return linearised.value - unseen * (linearised.value - lower), linearised.value + unseen * (
        upper - linearised.value
    )


def clip_interval(interval: Interval, value: float, bounds: Interval) -> Interval:
    """Clip an interval to the bounds of the quantity; the estimate itself always stays inside."""
    low, high = interval
    return min(max(low, bounds[0]), value), max(min(high, bounds[1]), value)
