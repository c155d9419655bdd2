"""Coverage, misses at each end, width and warnings of 95 % intervals, by simulation: python benchmarks/intervals.py

For processes with a known mean: how often kleash's interval contains it, on which side it misses, its width relative to
the spread of the estimate, how often it comes with a warning, and its coverage without a warning.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from harness import parser_of, write_result
from numpy.typing import NDArray

from kleash.uncertainty import Estimate, cluster_labels, ratio_of_many
from kleash.uncertainty.clusters import BLOCK_WINDOWS

CLUSTERS = (5, 8, 12, 20, 30, 64, 300)
COLUMNS = 500

Array = NDArray[np.float64]
Random = np.random.Generator


class Sample(NamedTuple):
    """Simulated measurements: sums and counts are [cluster, measurement]."""

    sums: Array
    counts: Array
    truth: float
    lower: float | None = None
    upper: float | None = None
    warnings: tuple[str, ...] = ()
    """Warnings about the clusters, which apply to all numbers of a run."""


def lengths(random: Random, shape: tuple[int, ...]) -> Array:
    return random.integers(16, 128, endpoint=True, size=shape).astype(np.float64)


def lognormal(random: Random, shape: tuple[int, ...], spread: float) -> Array:
    """Lognormal numbers with mean 1; ``spread`` is the standard deviation of the logarithm."""
    return np.exp(spread * random.standard_normal(shape) - spread**2 / 2)


def normal(random: Random, shape: tuple[int, ...]) -> Sample:
    return Sample(1 + 0.3 * random.standard_normal(shape), np.ones(shape), 1.0)


def skewed(spread: float) -> Callable[[Random, tuple[int, ...]], Sample]:
    def draw(random: Random, shape: tuple[int, ...]) -> Sample:
        counts = lengths(random, shape)
        return Sample(lognormal(random, shape, spread) * counts, counts, 1.0, lower=0.0)

    return draw


def zeros(random: Random, shape: tuple[int, ...]) -> Sample:
    counts = lengths(random, shape)
    values = np.where(random.random(shape) < 0.03, lognormal(random, shape, 0.5), 0.0)
    return Sample(values * counts, counts, 0.03, lower=0.0)


def rare_long(random: Random, shape: tuple[int, ...]) -> Sample:
    counts, values = lengths(random, shape), lognormal(random, shape, 0.5)
    rare = random.random(shape) < 0.02
    counts, values = np.where(rare, 30, 1) * counts, np.where(rare, 5, 1) * values
    return Sample(values * counts, counts, (0.98 + 0.02 * 30 * 5) / (0.98 + 0.02 * 30), lower=0.0)


def agreement(random: Random, shape: tuple[int, ...]) -> Sample:
    counts = np.full(shape, 15.0)
    return Sample(random.binomial(15, 0.98, size=shape).astype(np.float64), counts, 0.98, 0.0, 1.0)


def agreement_by_prompt(random: Random, shape: tuple[int, ...]) -> Sample:
    counts = lengths(random, shape)
    hits = random.binomial(counts.astype(np.int64), random.beta(9.8, 0.2, size=shape))
    return Sample(hits.astype(np.float64), counts, 0.98, 0.0, 1.0)


def random_lengths(random: Random, shape: tuple[int, ...]) -> Sample:
    counts = np.ceil(40 * lognormal(random, shape, 1.0))
    return Sample(lognormal(random, shape, 0.5) * counts, counts, 1.0, lower=0.0)


def longer_drift_more(random: Random, shape: tuple[int, ...]) -> Sample:
    """log KL and log length correlate by 0.7; weighted by length, the mean of exp(0.5 e) is exp(0.35 + 0.125)."""
    z = random.standard_normal(shape)
    e = 0.7 * z + math.sqrt(0.51) * random.standard_normal(shape)
    counts = np.exp(z)
    return Sample(np.exp(0.5 * e) * counts, counts, math.exp(0.5 * 0.7 + 0.125), lower=0.0)


def autoregressive(random: Random, shape: tuple[int, ...]) -> Array:
    """[window, ...]: the logarithms of the KL of neighbouring windows, each correlated by 0.8 with the one before."""
    windows = np.empty(shape)
    windows[0] = random.standard_normal(shape[1:])
    for place in range(1, shape[0]):
        windows[place] = 0.8 * windows[place - 1] + 0.6 * random.standard_normal(shape[1:])
    return windows


def documents(random: Random, shape: tuple[int, ...]) -> Sample:
    """Documents of 4 to 16 windows."""
    values = np.exp(0.7 * autoregressive(random, (16, *shape)) - 0.245)
    windows = random.integers(4, 16, endpoint=True, size=shape)
    there = np.arange(16)[:, None, None] < windows
    return Sample((values * there).sum(0), windows.astype(np.float64), 1.0, lower=0.0)


def blocks(random: Random, shape: tuple[int, ...]) -> Sample:
    """One long text, cut into blocks of 8 windows."""
    values = np.exp(0.7 * autoregressive(random, (BLOCK_WINDOWS * shape[0], shape[1])) - 0.245)
    _, warnings = cluster_labels(
        np.zeros(BLOCK_WINDOWS * shape[0], np.int64), np.arange(BLOCK_WINDOWS * shape[0])
    )
    sums = values.reshape(shape[0], BLOCK_WINDOWS, shape[1]).sum(1)
    return Sample(sums, np.full(shape, float(BLOCK_WINDOWS)), 1.0, lower=0.0, warnings=warnings)


PROCESSES: Mapping[str, Callable[[Random, tuple[int, ...]], Sample]] = {
    "normal": normal,
    "lognormal 0.5": skewed(0.5),
    "lognormal 1": skewed(1.0),
    "lognormal 1.5": skewed(1.5),
    "97 % zeros": zeros,
    "2 % long and heavy": rare_long,
    "agreement 0.98": agreement,
    "agreement by prompt": agreement_by_prompt,
    "random lengths": random_lengths,
    "longer drift more": longer_drift_more,
    "documents, AR(1)": documents,
    "one text in blocks": blocks,
    "lognormal 2": skewed(2.0),
}


def cell(name: str, clusters: int, measurements: int, seed: int) -> dict[str, Any]:
    """Coverage, misses, width and warnings of the intervals of one process and number of clusters."""
    random = np.random.default_rng([seed, list(PROCESSES).index(name), clusters])
    estimates: list[Estimate] = []
    truth, has_shared_warnings = 0.0, False
    for _ in range(measurements // COLUMNS):
        sums, counts, truth, lower, upper, warnings = PROCESSES[name](random, (clusters, COLUMNS))
        estimates += ratio_of_many(sums, counts, lower=lower, upper=upper)
        has_shared_warnings = bool(warnings)
    values = np.array([estimate.value for estimate in estimates])
    low, high = np.array([estimate.ci95 for estimate in estimates]).T
    warned = np.array([has_shared_warnings or bool(estimate.warnings) for estimate in estimates])
    missed = (truth < low) | (truth > high)
    spread = float(np.subtract(*np.quantile(values, [0.975, 0.025])))
    with np.errstate(invalid="ignore"):
        width = float(np.median(high - low))
    return {
        "process": name,
        "clusters": clusters,
        "coverage": 1 - float(missed.mean()),
        "truth_below": float((truth < low).mean()),
        "truth_above": float((truth > high).mean()),
        "width": width / spread if math.isfinite(width) else None,
        "warned": float(warned.mean()),
        "coverage_without_warning": 1 - float(missed[~warned].mean()) if (~warned).any() else None,
        "missed_without_warning": float((missed & ~warned).mean()),
    }


def main() -> None:
    options = parser_of(__doc__, measurements=10_000, seed=13).parse_args()
    cells = [
        cell(name, clusters, options.measurements, options.seed)
        for name in PROCESSES
        for clusters in CLUSTERS
    ]
    table = pd.DataFrame(cells).pivot(index="process", columns="clusters").loc[list(PROCESSES)]
    for name in table.columns.levels[0]:  # pyrefly: ignore[missing-attribute]
        print(f"\n{name}\n{table[name].round(3).to_string()}")
    print(f"\n{write_result('intervals', vars(options) | {'processes': cells}, packages=['numpy'])}")


if __name__ == "__main__":
    main()
