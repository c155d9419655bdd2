"""From linearised estimates to estimates with an interval and doubts."""

import math
from collections import defaultdict
from collections.abc import Sequence

from kleash.uncertainty.bootstrap import studentised_quantiles
from kleash.uncertainty.estimate import Estimate
from kleash.uncertainty.linearised import MOST_DRAWN, Linearised
from kleash.uncertainty.student import student_t_quantile

FEW_CLUSTERS = 30
LARGE_SHARE = 0.2
FARTHEST = 4.0
"""No end lies farther away than so many times Student's: few clusters, or many alike, leave the bootstrap without
a bound."""

Interval = tuple[float, float]


def estimates_of(
    linearised: Sequence[Linearised], units: Sequence[str], bounds: Sequence[Interval], fitted: int = 0
) -> tuple[Estimate, ...]:
    """Each with its error, interval and doubts; ``fitted`` parameters cost a degree of freedom each."""
    errors = [standard_error(one, fitted) for one in linearised]
    groups: dict[int, list[int]] = defaultdict(list)
    for index, (one, error) in enumerate(zip(linearised, errors, strict=True)):
        if error > 0 and one.clusters <= MOST_DRAWN:
            groups[one.clusters].append(index)
    strays: dict[int, Interval] = {}
    for members in groups.values():
        found = studentised_quantiles([linearised[index] for index in members])
        strays.update(zip(members, found, strict=True))
    return tuple(
        Estimate(
            value=one.value,
            unit=unit,
            standard_error=error,
            clusters=one.clusters,
            ci95=cut(_interval(one, error, strays.get(index, (0.0, 0.0)), fitted), one.value, ends),
            doubts=doubts_about(one, error),
        )
        for index, (one, error, unit, ends) in enumerate(zip(linearised, errors, units, bounds, strict=True))
    )


def standard_error(one: Linearised, fitted: int = 0) -> float:
    """sqrt(C / (C - 1) sum of squared influences); NaN where that says nothing."""
    freedom = one.clusters - 1 - fitted
    if one.trouble or freedom < 1:
        return math.nan
    return math.sqrt(one.clusters / freedom * float(one.influence @ one.influence))


def _interval(one: Linearised, error: float, stray: Interval, fitted: int) -> Interval:
    """At each end Student's t or the bootstrap-t, whichever reaches further."""
    if one.trouble or one.clusters == 0:
        return math.nan, math.nan
    if math.isnan(error):
        return -math.inf, math.inf
    if error == 0:
        return one.value, one.value
    student = student_t_quantile(0.975, one.clusters - 1 - fitted)
    down, up = (min(max(student, -end), FARTHEST * student) for end in (-stray[1], stray[0]))
    return one.value - down * error, one.value + up * error


def cut(interval: Interval, value: float, bounds: Interval) -> Interval:
    """The part of the interval that the quantity can be in; the value itself is never cut off."""
    low, high = interval
    return min(max(low, bounds[0]), max(value, low)), max(min(high, bounds[1]), min(value, high))


def doubts_about(one: Linearised, error: float) -> tuple[str, ...]:
    """What the clusters give reason to doubt; nothing about an exact constant."""
    if one.trouble:
        return (one.trouble,)
    if error == 0:
        return ()
    found = list(few_clusters(one.clusters))
    if error > 0:
        share = float((one.influence**2).max() / (one.influence @ one.influence))
        if share > LARGE_SHARE:
            found.append(f"one cluster carries {share:.0%} of the variance")
    return tuple(found)


def few_clusters(clusters: int) -> tuple[str, ...]:
    """The doubt that there are too few clusters to know the error well, if there are."""
    if clusters >= FEW_CLUSTERS:
        return ()
    noun = "cluster" if clusters == 1 else "clusters"
    return (f"only {clusters} {noun}; below {FEW_CLUSTERS} the error itself is uncertain",)
