"""Student's t, corrected for the skewness of the clusters: how far each end of an interval reaches."""

import math
from typing import NamedTuple

import numpy as np

from kleash.uncertainty.linearised import Array
from kleash.uncertainty.student import student_t_quantile

FEW_CLUSTERS = 30
"""Below so many clusters the skewness of a sample is mostly noise, and the correction trusts it less."""
SMALL_SAMPLE = 18.0
"""How much more a sample's skewness counts than the population's would, times sqrt(clusters): a sample of a
long-tailed quantity mostly lacks the tail. Chosen by simulation: benchmarks/intervals.py."""
LONGEST = 2.5
"""No end is farther away than so many times Student's."""


class Reach(NamedTuple):
    """How many standard errors below and above the estimate a 95 % interval ends."""

    down: float
    up: float


def skewness_of_mean(influence: Array) -> float:
    """The skewness of the estimate's error: sum u^3 / (sum u^2)^(3/2), between -1 and 1.

    It is the skewness of the clusters over the square root of their number. 0 where none differs.
    """
    largest = float(np.abs(influence).max(initial=0.0))
    if largest == 0:
        return 0.0
    u = influence / largest
    squares = u * u
    return float(squares @ u) / float(squares.sum()) ** 1.5


def skewed_reach(skewness: float, clusters: int, freedom: int) -> Reach:
    """Student's t, and on the side of the long tail more than that.

        t min(exp(w |g|), LONGEST),    w = (1 + 2 t^2) / (6 t) + SMALL_SAMPLE min(1, C / 30) / sqrt(C)

    To first order ``t w |g|``, without its second term, is the term of the Edgeworth expansion by which Johnson
    (1978) and Hall (1992) correct a studentised mean for a known skewness g; w tends to it as the clusters grow in
    number. The exponential keeps the end monotone in g, as Hall's cubic does. The other end is not drawn in: the
    skewness of a sample may be one cluster's, and chance.

    Args:
        skewness: of the mean, ``skewness_of_mean``; above 0 where the long tail is above.
        clusters: C.
        freedom: Student's degrees of freedom.

    References:
        Johnson (1978), "Modified t Tests and Confidence Intervals for Asymmetrical Populations".
        Hall (1992), "On the Removal of Skewness by Transformation".
    """
    t = student_t_quantile(0.975, freedom)
    expansion = (1 + 2 * t * t) / (6 * t)
    weight = expansion + SMALL_SAMPLE * min(1.0, clusters / FEW_CLUSTERS) / math.sqrt(clusters)
    tail = t * min(math.exp(weight * abs(skewness)), LONGEST)
    return Reach(t, tail) if skewness > 0 else Reach(tail, t)


def logarithmic_reach(room: float, error: float, freedom: int) -> float:
    """Standard errors to the end away from a bound, by Student's t of the logarithm of the distance to it.

        (exp(t error / room) - 1) room / error,    at most LONGEST t

    What cannot pass a bound has its tail on the other side: a mean KL of 0.1 with an error of 0.05 ends at
    0.1 exp(0.5 t). 0 where the estimate is not inside the bound.

    Args:
        room: from the bound to the estimate; infinite where there is no bound.
        error: the standard error, above 0.
        freedom: Student's degrees of freedom.
    """
    if not 0 < room < math.inf:
        return 0.0
    t = student_t_quantile(0.975, freedom)
    exponent = t * error / room
    return t * LONGEST if exponent > LONGEST else t * min(math.expm1(exponent) / exponent, LONGEST)
