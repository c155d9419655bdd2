"""Coverage of 95 % intervals by simulation: python benchmarks/coverage.py

Prompts have lognormal means, samples of a prompt are lognormal around its mean, and samples have different lengths.
The true value is 1 nat per token. The first table has the share of simulated measurements whose interval contains it,
for three intervals: plain (1.96 standard errors, samples treated as independent), clustered (1.96 cluster-robust
standard errors), and kleash's. The second has that of quantiles. The last ones have it by what the sample shows, from
which the limits of warnings are chosen: on one set of distributions, and on another to see whether they hold.
docs/reference/evidence.md has some of these figures.
"""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from harness import parser_of, write_result
from intervals import Array, lognormal

from kleash.uncertainty import quantiles, ratio_of_many

CLUSTERS, SAMPLES = (8, 64, 512), 4
SPREAD, SAMPLE_SPREAD = 1.0, 0.5
"""Log standard deviation of the prompts, and of the samples of one."""
TOKENS = (16, 128)
LEVELS = (0.5, 0.9, 0.99)
TOKENS_PER_CLUSTER = 64
COLUMNS = 50
CLUSTERS_SEEN = (30, 64, 128, 256, 512)
"""Numbers of clusters in the tables of what the sample shows; below 30 there is a warning about that."""
LIMITS = {"share": (0.0, 0.1, 0.2, 0.4, 0.6, 1.0), "effective": (0, 5, 10, 15, 20, 30, math.inf)}
"""Of the share of the variance that one cluster carries, and of the clusters of equal length with the same information:
(sum n)^2 / sum n^2."""

Distribution = Callable[[np.random.Generator, tuple[int, ...]], tuple[Array, Array, float]]
"""Draws sums and counts, [cluster, measurement], and knows their true mean."""


def simulate(random: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Sums and counts of each sample, [cluster, sample, measurement]; the mean per token is 1."""
    prompts = lognormal(random, (shape[0], 1, shape[2]), SPREAD)
    samples = lognormal(random, shape, SAMPLE_SPREAD)
    counts = random.integers(*TOKENS, endpoint=True, size=shape).astype(np.float64)
    return prompts * samples * counts, counts


def cell(clusters: int, measurements: int, seed: int) -> dict[str, Any]:
    """Coverage of the three intervals."""
    random = np.random.default_rng([seed, clusters, SAMPLES, round(100 * SPREAD)])
    hits = {"plain": 0, "clustered": 0, "kleash": 0}
    for _ in range(measurements // COLUMNS):
        sums, counts = simulate(random, (clusters, SAMPLES, COLUMNS))
        ours = ratio_of_many(sums.sum(1), counts.sum(1), lower=0.0)
        plain = plain_errors(sums.reshape(-1, COLUMNS), counts.reshape(-1, COLUMNS))
        for estimate, error in zip(ours, plain, strict=True):
            low, high = estimate.ci95
            hits["plain"] += abs(estimate.value - 1) <= 1.96 * error
            hits["clustered"] += abs(estimate.value - 1) <= 1.96 * estimate.standard_error
            hits["kleash"] += low <= 1.0 <= high
    total = measurements // COLUMNS * COLUMNS
    return {"clusters": clusters, **{name: count / total for name, count in hits.items()}}


def plain_errors(sums: Array, counts: Array) -> list[float]:
    """Standard errors of the means of all columns, with samples treated as independent."""
    residuals = sums - sums.sum(0) / counts.sum(0) * counts
    return (np.sqrt(len(sums) / (len(sums) - 1) * (residuals**2).sum(0)) / counts.sum(0)).tolist()


def lognormal_pair(spread: float, length_spread: float, correlation: float = 0.0) -> Distribution:
    """Lognormal means and lengths of clusters, whose logarithms are correlated."""

    def draw(random: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, Array, float]:
        length, rest = random.standard_normal((2, *shape))
        mean = correlation * length + math.sqrt(1 - correlation**2) * rest
        counts = np.ceil(1000 * np.exp(length_spread * length))
        truth = math.exp(spread**2 / 2 + correlation * spread * length_spread)  # weighted by length
        return np.exp(spread * mean) * counts, counts, truth

    return draw


def other_pair(means: str, lengths: str) -> Distribution:
    """Means and lengths of clusters from distributions without a logarithm that is normal."""
    draws = {
        "gamma 0.3": lambda random, shape: random.gamma(0.3, 1 / 0.3, shape),
        "gamma 1": lambda random, shape: random.gamma(1.0, 1.0, shape),
        "Lomax 3": lambda random, shape: 2.0 * random.pareto(3.0, shape),
        "uniform": lambda random, shape: random.uniform(16, 128, shape),
        "gamma 0.5": lambda random, shape: 100 * random.gamma(0.5, 2.0, shape),
        "Pareto 1.8": lambda random, shape: 20 * (1 + random.pareto(1.8, shape)),
    }

    def draw(random: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, Array, float]:
        counts = np.ceil(draws[lengths](random, shape))
        return draws[means](random, shape) * counts, counts, 1.0

    return draw


DISTRIBUTIONS: dict[str, tuple[Distribution, ...]] = {
    "chosen on": tuple(
        lognormal_pair(spread, length_spread)
        for spread in (0.5, 1.0, 1.5)
        for length_spread in (0.3, 1.0, 1.3, 1.6)
    ),
    "tested on": (
        *(
            other_pair(means, lengths)
            for means in ("gamma 0.3", "gamma 1", "Lomax 3")
            for lengths in ("uniform", "gamma 0.5", "Pareto 1.8")
        ),
        lognormal_pair(1.0, 1.3, 0.4),
        lognormal_pair(1.0, 1.0, 0.7),
    ),
}
"""Distributions on which the limits of warnings were chosen, and others on which they are tested."""


def seen_rows(measurements: int, seed: int) -> pd.DataFrame:
    """What the sample of each simulated measurement shows, and whether its interval has the truth."""
    parts: list[pd.DataFrame] = []
    for (place, (name, group)), clusters in itertools.product(
        enumerate(DISTRIBUTIONS.items()), CLUSTERS_SEEN
    ):
        random = np.random.default_rng([seed, clusters, place])
        for distribution in group:
            for _ in range(measurements // COLUMNS):
                sums, counts, truth = distribution(random, (clusters, COLUMNS))
                low, high = np.array([estimate.ci95 for estimate in ratio_of_many(sums, counts, lower=0.0)]).T
                squares = (sums - sums.sum(0) / counts.sum(0) * counts) ** 2
                columns = {
                    "share": squares.max(0) / squares.sum(0),
                    "effective": counts.sum(0) ** 2 / (counts**2).sum(0),
                    "covered": (low <= truth) & (truth <= high),
                }
                parts.append(pd.DataFrame(columns).assign(set=name, clusters=clusters))
    return pd.concat(parts)


def seen_table(rows: pd.DataFrame, what: str, by: list[str]) -> pd.DataFrame:
    """Coverage, and number of measurements, by what the sample shows and these columns."""
    bins = pd.cut(rows[what], LIMITS[what], right=False)
    return pd.DataFrame(rows.groupby([*by, bins], observed=True)["covered"].agg(["mean", "size"]))


def quantile_row(clusters: int, measurements: int, seed: int) -> dict[str, Any]:
    """Coverage of the intervals of quantiles, prompts and tokens both lognormal."""
    random = np.random.default_rng([seed, clusters])
    spread = math.hypot(1.0, SAMPLE_SPREAD)
    truths = [math.exp(spread * statistics.NormalDist().inv_cdf(level)) for level in LEVELS]
    index = np.repeat(np.arange(clusters), TOKENS_PER_CLUSTER)
    hits = [0] * len(LEVELS)
    for _ in range(measurements):
        effects = random.standard_normal((clusters, 1))
        noise = SAMPLE_SPREAD * random.standard_normal((clusters, TOKENS_PER_CLUSTER))
        values = np.exp(effects + noise).ravel().astype(np.float32)
        estimates = quantiles(values, index, LEVELS, lower=0.0)
        for place, (truth, estimate) in enumerate(zip(truths, estimates, strict=True)):
            hits[place] += estimate.ci95[0] <= truth <= estimate.ci95[1]
    shares = {str(level): count / measurements for level, count in zip(LEVELS, hits, strict=True)}
    return {"clusters": clusters, **shares}


def main() -> None:
    options = parser_of(__doc__, measurements=10_000, seed=20).parse_args()
    size, seed = options.measurements, options.seed
    rows: dict[str, Any] = {
        "means": [cell(clusters, size, seed) for clusters in CLUSTERS],
        "quantiles": [quantile_row(clusters, size // 10, seed) for clusters in (32, 128, 512)],
    }
    for name, of in rows.items():
        print(f"{name}\n{pd.DataFrame(of).round(3).to_string(index=False)}\n")
    seen = seen_rows(size // 5, seed)
    for what in LIMITS:
        print(f"{seen_table(seen, what, ['set']).round(3).to_string()}\n")
        by_clusters = seen_table(seen, what, ["set", "clusters"]).reset_index()
        rows[what] = by_clusters.astype({what: str}).to_dict("records")
    print(write_result("coverage", vars(options) | rows, packages=["numpy"]))


if __name__ == "__main__":
    main()
