"""Bootstrap-t: how far an estimate strays from the truth in units of its own standard error."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kleash.uncertainty.linearised import ROUNDING, Linearised
from kleash.uncertainty.student import student_t_quantile

DRAWS = 1999
SEED = 1908_09593
BUFFER_NUMBERS = 500_000
"""Numbers in a buffer of draws: four such buffers of 4 MB exist at once."""

Array = NDArray[np.float64]


def studentised_quantiles(estimates: Sequence[Linearised]) -> list[tuple[float, float]]:
    """The outer points of (estimate* - estimate) / standard error*, whole clusters drawn again.

    All estimates must stand on equally many clusters: they share the draws, which depend on nothing but
    that number. A draw whose clusters are all alike strays infinitely far to its side (by 0 standard
    errors where it does not stray at all).

    The points are not 2.5 % and 97.5 %: clusters drawn again vary less than clusters drawn anew, so the
    tails are Phi(-sqrt(C / (C - 1)) t), with Student's t at 97.5 %, which tends to 2.5 %.

    References:
        Efron & Tibshirani (1993), "An Introduction to the Bootstrap", section 12.5.
        Hesterberg (2015), "What Teachers Should Know About the Bootstrap", on expanded percentiles.
    """
    clusters = estimates[0].clusters
    moments = [_moments(estimate.basis) for estimate in estimates]
    edges = np.cumsum([0, *(block.shape[1] for block in moments)])
    stacked = np.concatenate(moments, axis=1)
    drawn = np.concatenate([weights @ stacked for weights in _resamples(clusters)])
    expanded = math.sqrt(clusters / (clusters - 1)) * student_t_quantile(0.975, clusters - 1)
    place = max(0, math.floor(math.erfc(expanded / math.sqrt(2)) / 2 * (DRAWS + 1)) - 1)
    ends: list[tuple[float, float]] = []
    for estimate, begin, end in zip(estimates, edges[:-1], edges[1:], strict=True):
        strays = np.sort(_strays(estimate, drawn[:, begin:end]))
        ends.append((float(strays[place]), float(strays[DRAWS - 1 - place])))
    return ends


def _moments(basis: Array) -> Array:
    """The columns of the basis, and the products of all pairs of them."""
    rows, columns = np.triu_indices(basis.shape[1])
    return np.concatenate([basis, basis[:, rows] * basis[:, columns]], axis=1)


def _strays(estimate: Linearised, drawn: Array) -> Array:
    """(estimate* - estimate) / standard error* of each draw, from the sums of the moments in it."""
    size, signs = estimate.basis.shape[1], np.array(estimate.signs)
    totals = drawn[:, 1:size:2]
    shifts = drawn[:, 0:size:2] / totals
    coefficients = np.empty((len(drawn), size))
    coefficients[:, 0::2] = signs / totals
    coefficients[:, 1::2] = -signs / totals * shifts
    rows, columns = np.triu_indices(size)
    terms = coefficients[:, rows] * coefficients[:, columns] * drawn[:, size:]
    terms[:, rows != columns] *= 2
    squares = terms.sum(1)
    squares[squares <= ROUNDING * np.abs(terms).sum(1)] = 0.0
    moved = shifts @ signs
    errors = np.sqrt(estimate.clusters / (estimate.clusters - 1) * squares)
    infinite = np.where(moved == 0, 0.0, np.copysign(math.inf, moved))
    return np.divide(moved, errors, out=infinite, where=errors > 0)


def _resamples(clusters: int) -> Iterator[Array]:
    """How often each cluster is drawn, [draw, cluster], a buffer full at a time."""
    if clusters * DRAWS <= BUFFER_NUMBERS:
        yield _few_resamples(clusters)
        return
    random = np.random.default_rng([SEED, clusters])
    step = BUFFER_NUMBERS // clusters
    for begin in range(0, DRAWS, step):
        yield _resample(random, clusters, min(step, DRAWS - begin))


@lru_cache(maxsize=2)
def _few_resamples(clusters: int) -> Array:
    """All draws at once, kept for the next quantity on as many clusters."""
    return _resample(np.random.default_rng([SEED, clusters]), clusters, DRAWS)


def _resample(random: np.random.Generator, clusters: int, draws: int) -> Array:
    chosen = random.integers(clusters, size=(draws, clusters))
    chosen += clusters * np.arange(draws)[:, None]
    times = np.bincount(chosen.ravel(), minlength=draws * clusters)
    return np.reshape(times, (draws, clusters)).astype(np.float64)
