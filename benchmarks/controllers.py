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

import pandas as pd
from harness import markdown_table, parser_of, write_result

from kleash.leash import DualBeta, Leash, PIDBeta, ZieglerBeta

CONTROLLERS: Mapping[str, Callable[..., Leash]] = {"pid": PIDBeta, "dual": DualBeta, "ziegler": ZieglerBeta}
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
        start = CONTROLLERS[kind](beta=beta, target_nats=TARGET)
        runs = [follow(start, case, seed, errors, drift) for seed in range(seeds if noise else 1)]
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


def settled_table(frame: pd.DataFrame) -> str:
    """For each noise the lowest and highest mean, and the smallest share of single runs within 10 %, in Markdown."""
    rows = []
    for kind, records in frame[frame["beta"] != BETAS[0]].groupby("controller", sort=False):
        by_noise = records.groupby("noise")
        ends = by_noise["settled"].agg(["min", "max"]).to_numpy()
        rows.append([f"`{kind}`", *(f"{low:.2f}–{high:.2f}" for low, high in ends)])
        rows.append(["… single runs within 10 %", *(f"{100 * x:.0f} %" for x in by_noise["within"].min())])
    return markdown_table(["", *(f"{100 * noise:.0f} %" for noise in NOISES)], rows)


def peak_table(frame: pd.DataFrame) -> str:
    """The highest mean peak over all noises, by initial beta and plant, in Markdown."""
    frame = frame[frame["beta"] <= 1].assign(late=frame["lag"] > 0)
    peaks = frame.pivot_table("peak", "controller", ["beta", "late"], "max")
    heading = [f"beta {beta:g}{', late' if late else ''}" for beta, late in peaks.columns]
    rows = [[f"`{kind}`", *(f"{x:.2f}" for x in row)] for kind, row in peaks.iterrows()]
    return markdown_table(["initial", *heading], rows)


def main() -> None:
    """Simulate, write the figures and print the tables."""
    parser = parser_of(__doc__, seeds=200, drift=0.0)
    parser.add_argument("--controllers", nargs="+", default=list(CONTROLLERS), choices=CONTROLLERS)
    parser.add_argument("--errors", choices=("reported", "estimated", "none"), default="reported")
    options = parser.parse_args()
    settings = options.seeds, options.errors, options.drift
    records = [record for kind in options.controllers for record in simulate(kind, *settings)]
    if not options.drift:
        write_result("controllers", {"seeds": options.seeds, "errors": options.errors, "cases": records})
    frame = pd.DataFrame(records)
    print(f"{settled_table(frame)}\n\n{peak_table(frame)}")


if __name__ == "__main__":
    main()
