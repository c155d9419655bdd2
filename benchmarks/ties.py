"""False rankings of a sweep: how often candidates that are equally far from the reference are called different.

    python benchmarks/ties.py [--simulations 2000]

Six candidates, of which the first four are equally far from the reference. A cluster has an effect that
all candidates share and noise of each candidate, so that differences are paired as in real sweeps. The noise is normal
or lognormal and added, or multiplies the effect, and then it is long-tailed for two of the four alone, so that a sample
without the tail ranks them before the others.
Writes benchmarks/results/ties.json.
"""

from collections.abc import Callable
from itertools import combinations

import numpy as np
from harness import parser_of, write_result

from kleash.uncertainty.simultaneous import simultaneous_differences

TIED, SHIFTS = 4, (0.0, 0.0, 0.0, 0.0, 0.1, 0.4)
CLUSTERS = (30, 64, 300)

Means = Callable[[np.random.Generator, np.ndarray, tuple[int, int]], np.ndarray]
NOISE: dict[str, Means] = {
    "normal": lambda generator, shared, shape: shared + generator.normal(0.0, 0.2, shape),
    "lognormal": lambda generator, shared, shape: shared + 0.1 * generator.lognormal(0.0, 1.0, shape),
    "long-tailed for some": lambda generator, shared, shape: shared * _unequal_tails(generator, shape),
    "rare failures of some": lambda generator, shared, shape: shared * _rare_failures(generator, shape),
}


def _unequal_tails(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Factors with the mean 1: lognormal for every second candidate, gamma for the others."""
    lognormal = generator.lognormal(-0.5, 1.0, shape)
    return np.where(np.arange(shape[1]) % 2 == 0, lognormal, generator.gamma(4.0, 0.25, shape))


def _rare_failures(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Factors with the mean 1: half of it in one cluster of twenty for every second candidate, gamma for the others."""
    rare = np.where(generator.random(shape) < 0.05, 10, 10 / 19)
    return np.where(np.arange(shape[1]) % 2 == 0, rare, generator.gamma(4.0, 0.25, shape))


def simulate(noise: str, clusters: int, seed: int) -> tuple[bool, bool, bool]:
    """Whether any tied pair is called different: by max-t, by single intervals; and whether all others are."""
    generator = np.random.default_rng([seed, clusters, list(NOISE).index(noise)])
    tokens = generator.integers(50, 200, (clusters, 1)).astype(np.float64)
    shared = generator.lognormal(0.0, 0.5, (clusters, 1))
    means = NOISE[noise](generator, shared, (clusters, len(SHIFTS))) + np.array(SHIFTS)
    result = simultaneous_differences(means * tokens, np.broadcast_to(tokens, means.shape), seed=seed)
    tied = set(combinations(range(TIED), 2))
    called = {(pair.first, pair.second) for pair in result.pairs if not pair.is_tie}
    singly = {
        (pair.first, pair.second)
        for pair in result.pairs
        if pair.estimate.ci95[0] > 0 or pair.estimate.ci95[1] < 0
    }
    farthest = {(index, len(SHIFTS) - 1) for index in range(TIED)}
    return bool(called & tied), bool(singly & tied), called >= farthest


def main() -> None:
    """Simulate, print a table, and write the result."""
    simulations = parser_of(__doc__, simulations=2000).parse_args().simulations
    rows = []
    names = ("false_rankings", "false_rankings_by_single_intervals", "farthest_detected")
    for noise in NOISE:
        for clusters in CLUSTERS:
            outcomes = np.mean(
                [simulate(noise, clusters, seed) for seed in range(simulations)], axis=0
            ).tolist()
            rows.append({"noise": noise, "clusters": clusters, **dict(zip(names, outcomes, strict=True))})
            print(rows[-1])
    write_result("ties", {"simulations": simulations, "rows": rows})


if __name__ == "__main__":
    main()
