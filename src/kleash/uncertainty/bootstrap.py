"""Bootstrap-t: how far an estimate strays from the truth in units of its own standard error."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kleash.uncertainty.linearised import Linearised

DRAWS = 1999
MOST_CLUSTERS = 4096
SEED = 1908_09593
BUFFER_NUMBERS = 2_000_000

Array = NDArray[np.float64]


def studentised_quantiles(estimates: Sequence[Linearised]) -> list[tuple[float, float]]:
    """The 2.5 % and 97.5 % points of (estimate* - estimate) / standard error*, whole clusters drawn again.

    All estimates must stand on equally many clusters: they share the draws, which depend on nothing but
    that number. A draw that holds no token, or whose clusters are all alike, strays infinitely far to its
    side (by 0 standard errors where it does not stray at all).

    References:
        Efron & Tibshirani (1993), "An Introduction to the Bootstrap", section 12.5.
    """
    moments = [_moments(estimate.basis) for estimate in estimates]
    edges = np.cumsum([0, *(block.shape[1] for block in moments)])
    stacked = np.concatenate(moments, axis=1)
    drawn = np.concatenate([weights @ stacked for weights in _resamples(estimates[0].clusters)])
    ends: list[tuple[float, float]] = []
    for estimate, begin, end in zip(estimates, edges[:-1], edges[1:], strict=True):
        strays = np.sort(_strays(estimate, drawn[:, begin:end]))
        ends.append(
            (float(strays[round(0.025 * (DRAWS + 1)) - 1]), float(strays[round(0.975 * (DRAWS + 1)) - 1]))
        )
    return ends


def _moments(basis: Array) -> Array:
    """The columns of the basis, and the products of all pairs of them."""
    rows, columns = np.triu_indices(basis.shape[1])
    return np.concatenate([basis, basis[:, rows] * basis[:, columns]], axis=1)


def _strays(estimate: Linearised, drawn: Array) -> Array:
    """(estimate* - estimate) / standard error* of each draw, from the sums of the moments in it."""
    size = estimate.basis.shape[1]
    with np.errstate(invalid="ignore", divide="ignore"):
        shifts = drawn[:, 0:size:2] / drawn[:, 1:size:2]
        coefficients = np.empty((len(drawn), size))
        coefficients[:, 0::2] = np.array(estimate.signs) / drawn[:, 1:size:2]
        coefficients[:, 1::2] = -coefficients[:, 0::2] * shifts
        rows, columns = np.triu_indices(size)
        doubled = np.where(rows == columns, 1.0, 2.0)
        squares = (coefficients[:, rows] * coefficients[:, columns] * doubled * drawn[:, size:]).sum(1)
        moved = shifts @ np.array(estimate.signs)
        correction = estimate.clusters / (estimate.clusters - 1)
        strays = moved / np.sqrt(correction * np.maximum(squares, 0.0))
    return np.where(np.isnan(strays), np.where(moved == 0, 0.0, math.inf), strays)


def _resamples(clusters: int) -> Iterator[Array]:
    """How often each cluster is drawn, [draw, cluster], a buffer full at a time."""
    random = np.random.default_rng([SEED, clusters])
    step = max(1, BUFFER_NUMBERS // clusters)
    for begin in range(0, DRAWS, step):
        draws = min(step, DRAWS - begin)
        chosen = random.integers(clusters, size=(draws, clusters), dtype=np.int32)
        chosen += np.arange(draws, dtype=np.int32)[:, None] * np.int32(clusters)
        yield (
            np.bincount(chosen.ravel(), minlength=draws * clusters)
            .reshape(draws, clusters)
            .astype(np.float64)
        )
