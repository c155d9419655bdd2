"""False passes and failures of the gate --at-most by simulation: python benchmarks/gates.py

Measurements of clusters whose true mean is 1 nat per token, against limits around it. At a limit of 1 every "passed" is
a false one. docs/reference/measuring.md has some of the figures.
"""

from typing import Any

import numpy as np
import pandas as pd
from harness import parser_of, write_result
from numpy.typing import NDArray

from kleash.uncertainty import ratio_of_many
from kleash.uncertainty.gate_decision import decide_gate

PROCESSES = {"normal": 0.0, "lognormal": 0.0, "normal, unequal": 1.0, "lognormal, unequal": 1.0}
"""Distribution of the clusters' means -> log standard deviation of their lengths."""
CLUSTERS = (10, 20, 30, 64, 300)
LIMITS = (0.8, 1.0, 1.25, 1.5)
TOKENS_PER_CLUSTER = 64
COLUMNS = 500
VERDICTS = ("passed", "undecided", "failed")


def cluster_means(random: np.random.Generator, process: str, shape: tuple[int, int]) -> NDArray[np.float64]:
    """KL per token of each cluster, [cluster, measurement], with mean 1: normal(1, 0.3), or lognormal(1)."""
    z = random.standard_normal(shape)
    return 1 + 0.3 * z if process.startswith("normal") else np.exp(z - 0.5)


def cell(process: str, clusters: int, limit: float, measurements: int, seed: int) -> dict[str, Any]:
    """Share of each verdict among simulated measurements of one process."""
    random, of_lengths = (np.random.default_rng([seed, place, clusters]) for place in range(2))
    counts = dict.fromkeys(VERDICTS, 0)
    for start in range(0, measurements, COLUMNS):
        means = cluster_means(random, process, (clusters, min(COLUMNS, measurements - start)))
        deviations = PROCESSES[process] * of_lengths.standard_normal(means.shape)
        tokens = np.ceil(TOKENS_PER_CLUSTER * np.exp(deviations))
        for estimate in ratio_of_many(tokens * means, tokens, lower=0.0):
            decision = decide_gate(
                estimate.value,
                estimate.ci95,
                at_most=limit,
                noise_floor=0.0,
                clusters=clusters,
                tokens=TOKENS_PER_CLUSTER * clusters,
            )
            counts[decision.verdict] += 1
    shares = {verdict: count / measurements for verdict, count in counts.items()}
    return {"process": process, "clusters": clusters, "limit": limit, **shares}


def main() -> None:
    options = parser_of(__doc__, measurements=10_000, seed=22).parse_args()
    cells = [
        cell(process, clusters, limit, options.measurements, options.seed)
        for process in PROCESSES
        for clusters in CLUSTERS
        for limit in LIMITS
    ]
    print((100 * pd.DataFrame(cells).set_index(["process", "clusters", "limit"])).round(1).to_string())
    print(f"\n{write_result('gates', vars(options) | {'cells': cells}, packages=['numpy'])}")


if __name__ == "__main__":
    main()
