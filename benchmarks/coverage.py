"""Coverage of 95 % intervals by simulation: python benchmarks/coverage.py

Prompts have lognormal means, samples of a prompt are lognormal around its mean, and samples have different lengths.
The true value is 1 nat per token. Each cell of the first table is the share of simulated measurements whose interval
contains it, for three intervals: plain (1.96 standard errors, samples treated as independent), clustered (1.96
cluster-robust standard errors), and kleash's. The last table has the coverage by what the sample shows, from which the
limits of warnings are chosen: on one set of distributions, and on another to see whether they hold.
docs/reference/evidence.md has some of these figures.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import markdown_table, write_result
from numpy.typing import NDArray

from kleash.uncertainty import Estimate, quantiles, ratio_of_many

CLUSTERS = (8, 16, 32, 64, 128, 512)
SAMPLES = (1, 4, 16)
SPREAD = 1.0
"""Log standard deviation of the prompts."""
NAMES = ("plain", "clustered", "kleash")
SAMPLE_SPREAD = 0.5
TOKENS = (16, 128)
LEVELS = (0.5, 0.9, 0.99)
TOKENS_PER_CLUSTER = 64
COLUMNS = 50
CLUSTERS_SEEN = (30, 64, 128, 256, 512)
"""Numbers of clusters in the table of what the sample shows; below 30 there is a warning about that."""
SHARES = (0.0, 0.1, 0.2, 0.4, 0.6, 1.0)
"""Of the variance, carried by the cluster that carries most."""
EFFECTIVE = (0, 5, 10, 15, 20, 30, math.inf)
"""Clusters of equal length with the same information: (sum n)^2 / sum n^2."""

Array = NDArray[np.float64]
Distribution = Callable[[np.random.Generator, tuple[int, ...]], tuple[Array, Array, float]]
"""Draws sums and counts, [cluster, measurement], and knows their true mean."""


def simulate(random: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Sums and counts of each sample, [cluster, sample, measurement]; the mean per token is 1."""
    prompts = lognormal(random, (shape[0], 1, shape[2]), SPREAD)
    samples = lognormal(random, shape, SAMPLE_SPREAD)
    counts = random.integers(*TOKENS, endpoint=True, size=shape).astype(np.float64)
    return prompts * samples * counts, counts


def lognormal(random: np.random.Generator, shape: tuple[int, ...], spread: float) -> Array:
    """Lognormal numbers with mean 1; ``spread`` is the standard deviation of the logarithm."""
    return np.exp(spread * random.standard_normal(shape) - spread**2 / 2)


def cell(clusters: int, samples: int, measurements: int, seed: int) -> dict[str, Any]:
    """Coverage and median width (in nats) of the three intervals."""
    random = np.random.default_rng([seed, clusters, samples, round(100 * SPREAD)])
    hits = {"plain": 0, "clustered": 0, "kleash": 0}
    widths: dict[str, list[float]] = {name: [] for name in hits}
    for _ in range(measurements // COLUMNS):
        sums, counts = simulate(random, (clusters, samples, COLUMNS))
        ours = ratio_of_many(sums.sum(1), counts.sum(1), lower=0.0)
        plain = plain_errors(sums.reshape(-1, COLUMNS), counts.reshape(-1, COLUMNS))
        for estimate, error in zip(ours, plain, strict=True):
            intervals = {
                "plain": normal(estimate, error),
                "clustered": normal(estimate, estimate.standard_error),
                "kleash": estimate.ci95,
            }
            for name, (low, high) in intervals.items():
                hits[name] += low <= 1.0 <= high
                widths[name].append(high - max(low, 0.0))
    total = measurements // COLUMNS * COLUMNS
    return {
        "clusters": clusters,
        "samples": samples,
        "coverage": {name: count / total for name, count in hits.items()},
        "median_width": {name: statistics.median(values) for name, values in widths.items()},
    }


def plain_errors(sums: Array, counts: Array) -> list[float]:
    """Standard errors of the means of all columns, with samples treated as independent."""
    residuals = sums - sums.sum(0) / counts.sum(0) * counts
    return (np.sqrt(len(sums) / (len(sums) - 1) * (residuals**2).sum(0)) / counts.sum(0)).tolist()


def normal(estimate: Estimate, error: float) -> tuple[float, float]:
    return estimate.value - 1.96 * error, estimate.value + 1.96 * error


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


def seen_rows(name: str, measurements: int, seed: int) -> list[dict[str, Any]]:
    """Coverage by what the sample shows, over a set of distributions, for each number of clusters."""
    rows: list[dict[str, Any]] = []
    for clusters in CLUSTERS_SEEN:
        random = np.random.default_rng([seed, clusters, list(DISTRIBUTIONS).index(name)])
        hits: list[NDArray[np.bool_]] = []
        shares, effective = list[Array](), list[Array]()
        for distribution in DISTRIBUTIONS[name]:
            for _ in range(measurements // COLUMNS):
                sums, counts, truth = distribution(random, (clusters, COLUMNS))
                ends = np.array([estimate.ci95 for estimate in ratio_of_many(sums, counts, lower=0.0)])
                hits.append((ends[:, 0] <= truth) & (truth <= ends[:, 1]))
                squares = (sums - sums.sum(0) / counts.sum(0) * counts) ** 2
                shares.append(squares.max(0) / squares.sum(0))
                effective.append(counts.sum(0) ** 2 / (counts**2).sum(0))
        hit = np.concatenate(hits)
        for what, values, limits in (
            ("share", np.concatenate(shares), SHARES),
            ("effective", np.concatenate(effective), EFFECTIVE),
        ):
            for low, high in itertools.pairwise(limits):
                there = (low <= values) & (values < high)
                rows.append(
                    {
                        "set": name,
                        "clusters": clusters,
                        "what": what,
                        "low": low,
                        "high": high if math.isfinite(high) else "Infinity",
                        "measurements": int(there.sum()),
                        "covered": int(hit[there].sum()),
                    }
                )
    return rows


def seen_table(rows: list[dict[str, Any]]) -> str:
    """Coverage in percent by what the sample shows, and in brackets the percentage of measurements that show it."""
    lines: list[list[str]] = []
    for what, low, high in dict.fromkeys((row["what"], row["low"], row["high"]) for row in rows):
        cells: list[str] = []
        for name in DISTRIBUTIONS:
            of_set = [row for row in rows if row["set"] == name and row["what"] == what]
            there = [row for row in of_set if row["low"] == low]
            count, covered = (sum(row[key] for row in there) for key in ("measurements", "covered"))
            part = count / sum(row["measurements"] for row in of_set)
            cells.append(f"{100 * covered / count:.1f} ({100 * part:.1f})" if count else "–")
        if what == "share":
            label = f"one cluster carries {100 * low:.0f} to {100 * high:.0f} % of the variance"
        elif high == "Infinity":
            label = f"worth {low} clusters of equal length or more"
        else:
            label = f"worth {low} to {high} clusters of equal length"
        lines.append([label, *cells])
    return markdown_table(["the sample shows", *DISTRIBUTIONS], lines) + "\n"


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
    return {
        "clusters": clusters,
        "coverage": {str(level): count / measurements for level, count in zip(LEVELS, hits, strict=True)},
    }


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """The tables by name: coverage in percent, by clusters."""
    return {
        "coverage": table(figures["means"]),
        "coverage by what the sample shows": seen_table(figures["seen"]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each number of clusters, a column for each interval and number of samples."""
    lines: list[list[str]] = []
    for clusters in CLUSTERS:
        shares = {row["samples"]: row["coverage"] for row in rows if row["clusters"] == clusters}
        cells = (f"{100 * shares[samples][name]:.1f}" for name in NAMES for samples in SAMPLES)
        lines.append([str(clusters), *cells])
    heads = (f"{name}, {samples}" for name in NAMES for samples in SAMPLES)
    return markdown_table(["clusters", *heads], lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulated coverage of 95 % intervals.")
    parser.add_argument(
        "--measurements", type=int, default=10_000, help="simulated for each cell of the table"
    )
    parser.add_argument("--seed", type=int, default=20)
    options = parser.parse_args()
    start = time.perf_counter()
    size, seed = options.measurements, options.seed
    means = [cell(clusters, samples, size, seed) for clusters in CLUSTERS for samples in SAMPLES]
    quantiles = [quantile_row(clusters, size // 10, seed) for clusters in (32, 128, 512)]
    seen = [row for name in DISTRIBUTIONS for row in seen_rows(name, size // 5, seed)]
    figures = {
        "what": "share of simulated measurements whose 95 % interval holds the truth",
        "numpy": np.__version__,
        "seed": seed,
        "measurements": size,
        "sample_spread": SAMPLE_SPREAD,
        "tokens_per_sample": TOKENS,
        "seconds": round(time.perf_counter() - start, 1),
        "means": means,
        "quantiles": quantiles,
        "seen": seen,
    }
    for name, text in tables(figures).items():
        print(f"{name}, in percent, {size} measurements\n{text}")
    print(f"Quantiles, {TOKENS_PER_CLUSTER} tokens per prompt, {size // 10} measurements")
    for row in quantiles:
        print(
            f"{row['clusters']:5d}", {level: f"{100 * share:.1f}" for level, share in row["coverage"].items()}
        )
    print(f"\n{write_result('coverage', figures)}")


if __name__ == "__main__":
    main()
