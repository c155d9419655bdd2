"""How well each beta controller holds a simulated KL at its target under the noise of real steps.

python benchmarks/controllers.py                     # the tables of docs/explanation/beta.md: five minutes
python benchmarks/controllers.py --seeds 20          # a quick look
python benchmarks/controllers.py --errors none       # a caller that does not know the error of its KL
python benchmarks/controllers.py --errors estimated  # an error estimated from 8 prompts, so itself noisy
python benchmarks/controllers.py --drift 0.02        # the beta that holds the target grows by 2 % an update

The plant: the KL starts at 0, goes a share ``gain`` of the way to target / beta with every update, and is seen ``lag``
updates late. A beta of 1 holds the target. Measured is the KL times lognormal noise of mean 1; the standard error that
the controller is given is the noise times the *measured* KL, as a trainer estimates it. Settled is the mean of the true
KL over its target in updates 101 to 200.
"""

import itertools
import math
import random
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from harness import RESULTS, parser_of, write_result

from kleash.leash import DualBeta, Leash, PIDBeta, ZieglerBeta

NAME = "controllers"
START: Mapping[str, Callable[[float], Leash]] = {
    "pid": lambda beta: PIDBeta(beta=beta, target_nats=TARGET),
    "dual": lambda beta: DualBeta(beta=beta, target_nats=TARGET),
    "ziegler": lambda beta: ZieglerBeta(beta=beta, target_nats=TARGET),
}
TARGET, SEQUENCES, UPDATES, FROM = 6.0, 64, 200, 100
NOISES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
PLANTS = ((0.05, 0), (0.3, 0), (0.1, 3))
"""Gain and lag."""
BETAS = (0.1, 0.3, 1.0, 3.0)
"""Initial betas; that of 0.1 counts for the peaks alone."""
WITHIN = 0.1
CLUSTERS = 8
"""Prompts from which ``--errors estimated`` estimates the error."""


class Case(NamedTuple):
    """A plant, an initial beta and a relative noise of the measurement."""

    gain: float
    lag: int
    beta: float
    noise: float


class Run(NamedTuple):
    """The true KL over its target in one run."""

    settled: float
    """Mean of the second hundred updates."""
    peak: float
    """Highest update."""


def measured(kl: float, noise: float, draw: random.Random) -> float:
    """The KL times lognormal noise of mean 1 and standard deviation ``noise``."""
    variance = math.log1p(noise**2)
    return kl * math.exp(draw.gauss(0.0, math.sqrt(variance)) - variance / 2) if noise else kl


def reported(value: float, noise: float, errors: str, draw: random.Random) -> dict[str, float]:
    """The argument ``standard_error`` of a measurement, or none."""
    if errors == "none":
        return {}
    degrees = CLUSTERS - 1
    spread = math.sqrt(draw.gammavariate(degrees / 2, 2 / degrees)) if errors == "estimated" else 1.0
    return {"standard_error": noise * value * spread}


def follow(leash: Any, case: Case, seed: int, errors: str, drift: float = 0.0) -> Run:
    """One run on the plant."""
    draw, kl, kls = random.Random(seed), 0.0, []
    betas = [leash.beta] * (case.lag + 1)
    for update in range(UPDATES):
        kl += case.gain * (TARGET * math.exp(drift * update) / betas[-1 - case.lag] - kl)
        kls.append(kl / TARGET)
        value = measured(kl, case.noise, draw)
        leash = leash.after(value, sequences=SEQUENCES, **reported(value, case.noise, errors, draw))
        betas.append(leash.beta)
    return Run(settled=fmean(kls[FROM:]), peak=max(kls))


def simulate(kind: str, seeds: int, errors: str, drift: float) -> list[dict[str, Any]]:
    """The figures of one controller in every case."""
    records = []
    for (gain, lag), beta, noise in itertools.product(PLANTS, BETAS, NOISES):
        case = Case(gain, lag, beta, noise)
        runs = [follow(START[kind](beta), case, seed, errors, drift) for seed in range(seeds if noise else 1)]
        records.append(
            {
                "controller": kind,
                **case._asdict(),
                "settled": fmean(run.settled for run in runs),
                "within": fmean(abs(run.settled - 1) <= WITHIN for run in runs),
                "peak": fmean(run.peak for run in runs),
            }
        )
    return records


def settled_table(records: list[dict[str, Any]]) -> list[str]:
    """For each noise the lowest and highest mean, and the smallest share of single runs within 10 %, as Markdown."""
    lines = ["| | " + " | ".join(f"{noise:.0%}" for noise in NOISES) + " |", "|---|" + "---|" * len(NOISES)]
    for kind in dict.fromkeys(record["controller"] for record in records):
        cells, shares = [], []
        for noise in NOISES:
            matching = [
                r for r in records if (r["controller"], r["noise"]) == (kind, noise) and r["beta"] != BETAS[0]
            ]
            means = [r["settled"] for r in matching]
            cells.append(f"{min(means):.2f}–{max(means):.2f}")
            shares.append(f"{min(r['within'] for r in matching):.0%}")
        lines.append(f"| `{kind}` | " + " | ".join(cells) + " |")
        lines.append("| … single runs within 10 % | " + " | ".join(shares) + " |")
    return lines


def peak_table(records: list[dict[str, Any]]) -> list[str]:
    """The highest mean peak over all noises, by initial beta and plant, as Markdown."""
    heads = [f"{1 / beta:.3g} × too weak" if beta < 1 else "right" for beta in BETAS[:3]]
    columns = list(itertools.product(BETAS[:3], (False, True)))
    lines = [
        "| | "
        + " | ".join(f"{heads[BETAS.index(b)]}{', late' if late else ''}" for b, late in columns)
        + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for kind in dict.fromkeys(record["controller"] for record in records):
        cells = [
            max(
                r["peak"]
                for r in records
                if (r["controller"], r["beta"]) == (kind, beta) and (r["lag"] > 0) is late
            )
            for beta, late in columns
        ]
        lines.append(f"| `{kind}` | " + " | ".join(f"{x:.2f}" for x in cells) + " |")
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Simulate, write the figures and print the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--controllers", nargs="+", default=list(START), choices=START)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument(
        "--drift", type=float, default=0.0, help="growth of the right beta an update; 0 if not given"
    )
    parser.add_argument("--errors", choices=("reported", "estimated", "none"), default="reported")
    parser.add_argument("--results", type=type(RESULTS), default=RESULTS, help="folder of the figures")
    options = parser.parse_args(arguments)
    settings = options.seeds, options.errors, options.drift
    records = [record for kind in options.controllers for record in simulate(kind, *settings)]
    if not options.drift:
        write_result(
            NAME, {"seeds": options.seeds, "errors": options.errors, "cases": records}, options.results
        )
    print("\n".join([*settled_table(records), "", *peak_table(records)]))


if __name__ == "__main__":
    main()
