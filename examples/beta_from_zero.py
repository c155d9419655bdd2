"""Each beta controller where training begins, at a KL of 0, on plants that answer as slowly as a real run does.

python examples/beta_from_zero.py                    # the table of docs/beta.md
python examples/beta_from_zero.py --recorded         # what was recorded
python examples/beta_from_zero.py --fit              # fit the heavy plant to the recorded runs

What moves at an optimiser's pace is the root of the KL, s. The paced plant goes a ``share`` of the way to c / beta
with every update, but no further than its pace, as Adam does. The heavy plant was fitted to a recorded run of
``kleash train ppo`` on the shipped reference: it has a speed of its own, which follows what pushes it some 10 updates
late, and the further it has come the harder it is pushed.
"""

import argparse
import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kleash.leash import DualBeta, Leash, PIDBeta, ZieglerBeta

RUNS = Path(__file__).with_name("beta_shipped_runs.json")
TARGET = 12.0  # nats per response, as in the recorded run
START: dict[str, Callable[[float], Leash]] = {
    "Ziegler": lambda beta: ZieglerBeta(beta=beta, target_nats=TARGET, horizon=10),
    "dual": lambda beta: DualBeta(beta=beta, target_nats=TARGET),
    "PID of small gains": lambda beta: PIDBeta(
        beta=beta, target_nats=TARGET, proportional=0.3, integral=0.03, smoothing=1.0, reach=3.0
    ),
    "PID": lambda beta: PIDBeta(beta=beta, target_nats=TARGET),
}
SHARES, CROSSINGS, OFF, HASTES = (1 / 150, 1 / 50, 1 / 15), (15, 40, 80), (1 / 3, 1.0, 3.0), (0.5, 1.0, 2.0)
ROOT = math.sqrt(TARGET)
PLANT_HEADS = (
    "controller",
    "paced: worst overshoot",
    "with 10 % noise",
    "within 15 % from",
    "heavy: half the haste",
    "as recorded",
    "twice",
)
RECORDED_HEADS = ("KL in nats (beta) at step", *map(str, range(20, 161, 20)), "largest", "mean from 121 on")


class State(NamedTuple):
    """Where a plant is."""

    root: float = 0.0
    """Of the KL."""
    speed: float = 0.0
    """What the root gains with one update."""


class Heavy(NamedTuple):
    """Numbers of the heavy plant; those that ``--fit`` finds."""

    force: float = 0.1252
    """What a root away from its balance gains in speed."""
    push: float = 0.4065
    """Towards a larger KL, at the reference."""
    more: float = 0.2699
    """What a unit of the root adds to the push; a beta below it holds nothing."""
    late: float = 9.5
    """Updates by which the speed follows."""

    def right_beta(self) -> float:
        """The beta that holds the target."""
        return self.more + self.push / ROOT


Plant = Callable[[State, float], State]


def paced(share: float, crossing: int) -> tuple[Plant, float]:
    """A plant whose pace takes it to the target in ``crossing`` updates, and the beta that holds it there."""
    pace = ROOT / crossing

    def step(state: State, beta: float) -> State:
        away = ROOT / beta - state.root
        return State(state.root + max(-pace, min(pace, share * away)))

    return step, 1.0


def heavy(haste: float = 1.0, numbers: Heavy | None = None) -> tuple[Plant, float]:
    """The fitted plant, pushed and pulled ``haste`` times as hard, and the beta that holds the target."""
    force, push, more, late = fitted = numbers or Heavy()

    def step(state: State, beta: float) -> State:
        wanted = haste * force * (push + (more - beta) * state.root)
        speed = state.speed + (wanted - state.speed) / late
        root = state.root + speed
        return State(root, speed) if root > 0 else State()

    return step, fitted.right_beta()


def follow(
    plant: Plant, leash: Leash, *, noise: float = 0.0, seed: int = 0, updates: int = 500
) -> list[float]:
    """The KL of every update over the target; the first is 0."""
    draw, state, ratios = random.Random(seed), State(), []
    for _ in range(updates):
        kl = state.root**2
        ratios.append(kl / TARGET)
        leash = leash.after(kl * (1 + noise * draw.gauss(0, 1)), sequences=1)
        state = plant(state, leash.beta)
    return ratios


def overshoot(ratios: Sequence[float]) -> float:
    """How far above the target, as a share of it."""
    return max(0.0, max(ratios) - 1)


def settled(ratios: Sequence[float], within: float = 0.15) -> float:
    """Updates until it stays as near the target as that; inf where it does not."""
    late = [i for i, ratio in enumerate(ratios) if abs(ratio - 1) > within]
    return math.inf if late[-1] == len(ratios) - 1 else late[-1] + 1


def table(seeds: int = 1, names: Sequence[str] = tuple(START)) -> list[tuple[str, ...]]:
    """For each controller the worst of each plant, from a beta 3 times too weak, right, and 3 times too strong."""
    rows = []
    for name in names:
        start = START[name]
        slow, noisy = [], []
        for share, crossing, off in itertools.product(SHARES, CROSSINGS, OFF):
            plant, right = paced(share, crossing)
            slow.append(follow(plant, start(off * right), updates=600))
            noisy += [
                follow(plant, start(off * right), noise=0.1, seed=seed, updates=300) for seed in range(seeds)
            ]
        hasty = []
        for haste in HASTES:
            plant, right = heavy(haste)
            hasty.append(max(overshoot(follow(plant, start(off * right), noise=0.03)) for off in OFF))
        late = max(map(settled, slow))
        rows.append(
            (
                name,
                f"{max(map(overshoot, slow)):.0%}",
                f"{max(map(overshoot, noisy)):.0%}",
                "over 600 updates" if late == math.inf else f"{late} updates",
                *(f"{past:.0%}" for past in hasty),
            )
        )
    return rows


def replayed(betas: Sequence[float], numbers: Heavy) -> list[float]:
    """The root of the KL of the heavy plant under these betas."""
    state, roots = State(), []
    for beta in betas:
        roots.append(state.root)
        state = heavy(numbers=numbers)[0](state, beta)
    return roots


def fit(run: dict[str, list[float]]) -> tuple[Heavy, float]:
    """The heavy plant that is nearest to a run, and how far off its root is (root mean square)."""
    from scipy.optimize import least_squares

    roots = [math.sqrt(kl) for kl in run["kl"]]

    def misses(numbers: Sequence[float]) -> list[float]:
        made = replayed(run["beta"], Heavy(*map(float, numbers)))
        return [a - b for a, b in zip(made, roots, strict=True)]

    found = least_squares(misses, Heavy())
    return Heavy(*map(float, found.x)), math.sqrt(2 * found.cost / len(roots))


def read_runs(path: Path = RUNS) -> dict[str, dict[str, list[float]]]:
    """KL and beta of the recorded runs, update by update."""
    return json.loads(path.read_text(encoding="utf-8"))["runs"]


def recorded() -> list[tuple[str, ...]]:
    """KL and beta of the recorded runs at every twentieth step, the largest KL, and the mean of the last 40 steps."""
    rows = []
    for name, run in read_runs().items():
        at = [f"{run['kl'][i]:.3g} ({run['beta'][i]:.2f})" for i in range(19, 160, 20)]
        rows.append((name, *at, f"{max(run['kl']):.3g}", f"{sum(run['kl'][120:160]) / 40:.3g}"))
    return rows


def main(words: list[str] | None = None) -> None:
    """Print the table, or the fit where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true", help="fit the heavy plant to the recorded runs")
    parser.add_argument("--seeds", type=int, default=1, help="noisy runs of each paced plant")
    parser.add_argument("--recorded", action="store_true", help="print the recorded runs")
    wanted = parser.parse_args(words)
    if wanted.fit:
        for name, run in read_runs().items():
            numbers, off = fit(run)
            said = ", ".join(f"{field} {value:.4g}" for field, value in numbers._asdict().items())
            print(
                f"{name}: {said}; beta that holds {numbers.right_beta():.3g}; root of the KL off by {off:.2g}"
            )
        return
    heads, rows = PLANT_HEADS, []
    if wanted.recorded:
        heads, rows = RECORDED_HEADS, recorded()
    for row in (heads, ["---", *["---:"] * (len(heads) - 1)], *(rows or table(wanted.seeds))):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
