"""Each beta controller on a plant and on a recorded run of a small policy.

python examples/beta_controllers.py --out beta.svg              # the picture of docs/beta.md
python examples/beta_controllers.py --record beta_runs.json     # train the small policy again, a few seconds

The plant says how a KL may answer beta: it goes a share of the way to ``drive / beta`` with every update, is seen
``lag`` updates late, and with 10 % noise. The recorded run is a policy over 4 words and 4 steps, trained on samples
by policy gradient with the exact KL in the reward and its own gradient in the loss.
"""

import argparse
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from markov_models import MarkovModel, random_markov

from kleash.auditing.toy_distributions import every_sequence
from kleash.divergences import kl
from kleash.leash import (
    DualBeta,
    FixedBeta,
    Leash,
    PIDBeta,
    ZieglerBeta,
    leave_one_out_advantages,
    measured_kl,
    sequence_rewards,
)

RUNS = Path(__file__).with_name("beta_runs.json")
TARGET = 0.5  # nats per response
SEQUENCES = 64
START: dict[str, Callable[[float], Leash]] = {
    "fixed": lambda beta: FixedBeta(beta=beta),
    "Ziegler": lambda beta: ZieglerBeta(beta=beta, target_nats=TARGET),
    "dual": lambda beta: DualBeta(beta=beta, target_nats=TARGET),
    "PID": lambda beta: PIDBeta(beta=beta, target_nats=TARGET),
}
GAINS, LAGS, OFF = (0.05, 0.3), (0, 1, 3), {"weak": 0.1, "strong": 10.0}


class Run(NamedTuple):
    """KL and beta of each update."""

    kl: list[float]
    """In nats per response."""
    beta: list[float]


def on_plant(
    leash: Leash, gain: float, lag: int, *, noise: float = 0.1, seed: int = 0, updates: int = 300
) -> Run:
    """The plant under a leash; it starts where the first beta would hold the KL. A beta of 1 holds the target."""
    draw, kls, betas = random.Random(seed), [], [leash.beta]
    now = TARGET / leash.beta
    for _ in range(updates):
        now += gain * (TARGET / betas[max(0, len(betas) - 1 - lag)] - now)
        kls.append(now)
        measured = now * (1 + noise * draw.gauss(0, 1))
        leash = leash.after(measured, sequences=SEQUENCES, standard_error=noise * measured)
        betas.append(leash.beta)
    return Run(kls, betas[:-1])


def train(leash: Leash, *, updates: int = 300, seed: int = 0) -> Run:
    """A small policy trained from its reference on, with the leash that each update's KL makes of the last."""
    draw = torch.Generator().manual_seed(seed)
    reference, every = random_markov(4, seed=1), every_sequence(4, 4)
    taste = torch.randn(4, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    logits = [x.clone().requires_grad_() for x in (reference.first, reference.then)]
    optimiser, run = torch.optim.Adam(logits, lr=0.03), Run([], [])
    for _ in range(updates):
        first, then = (x.log_softmax(-1) for x in logits)
        policy = MarkovModel(first=first, then=then)
        chance = policy.token_logp(every).sum(-1).exp().detach()
        tokens = every[torch.multinomial(chance, SEQUENCES, replacement=True, generator=draw)]
        counts = torch.ones_like(tokens, dtype=torch.bool)

        scores = taste[tokens[:, :-1], tokens[:, 1:]].sum(-1)
        token_kl = kl(policy.next_logp(tokens), reference.next_logp(tokens))
        rewards = sequence_rewards(scores, token_kl, counts, beta=leash.beta)
        advantages = leave_one_out_advantages(rewards, SEQUENCES)
        surrogate = (advantages * policy.token_logp(tokens).sum(-1)).mean()
        loss = leash.beta * token_kl.sum(-1).mean() - surrogate
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

        measured = measured_kl(token_kl, counts).across_ranks()
        run.kl.append(measured.value.item())
        run.beta.append(leash.beta)
        error = (token_kl.detach().sum(-1).std() / math.sqrt(SEQUENCES)).item()
        leash = leash.after(run.kl[-1], sequences=int(measured.count), standard_error=error)
    return run


def record(path: Path) -> None:
    """Train with each controller, from a beta ten times too weak, and write KL and beta of each update."""
    runs = {name: train(start(0.1))._asdict() for name, start in START.items()}
    rounded = {
        name: {column: [float(f"{x:.4g}") for x in numbers] for column, numbers in run.items()}
        for name, run in runs.items()
    }
    path.write_text(json.dumps({"target_nats": TARGET, "runs": rounded}) + "\n", encoding="utf-8")


# --- the picture ---

COLOURS = {"fixed": "#8c8c8c", "Ziegler": "#d9782d", "dual": "#2a9d6f", "PID": "#2457c5"}
WIDE, HIGH, LEFT, TOP = 400, 170, 56, 64


class Panel(NamedTuple):
    """One picture of several lines, its y axis logarithmic."""

    title: str
    lines: Mapping[str, Sequence[float]]
    low: float
    high: float
    target: float | None


def draw_panel(panel: Panel, left: int, top: int) -> list[str]:
    """The panel as SVG, with its upper left corner at ``left``, ``top``."""
    decades = math.log10(panel.high / panel.low)

    def height(value: float) -> float:
        share = math.log10(min(max(value, panel.low), panel.high) / panel.low) / decades
        return top + HIGH * (1 - share)

    parts = [f'<text x="{left}" y="{top - 8}" class="title">{panel.title}</text>']
    if panel.target is not None:
        upper, lower = height(1.1 * panel.target), height(0.9 * panel.target)
        parts.append(
            f'<rect x="{left}" y="{upper:.1f}" width="{WIDE}" height="{lower - upper:.1f}" class="band"/>'
        )
    for power in range(math.ceil(math.log10(panel.low)), math.floor(math.log10(panel.high)) + 1):
        y = height(10.0**power)
        parts.append(f'<path d="M{left} {y:.1f}h{WIDE}" class="grid"/>')
        parts.append(
            f'<text x="{left - 6}" y="{y + 4:.1f}" class="tick" text-anchor="end">{10.0**power:g}</text>'
        )
    for update in (0, 100, 200, 300):
        at = left + WIDE * update / 300
        parts.append(
            f'<text x="{at}" y="{top + HIGH + 16}" class="tick" text-anchor="middle">{update}</text>'
        )
    for name, values in panel.lines.items():
        path = "L".join(f"{left + WIDE * i / 299:.1f} {height(x):.1f}" for i, x in enumerate(values))
        parts.append(f'<path d="M{path}" stroke="{COLOURS[name]}" class="line"/>')
    return parts


STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:13px;font-weight:600}.tick{fill:#777}"
    ".line{fill:none;stroke-width:1.7;stroke-linejoin:round}.grid{stroke:#e4e4e4}.band{fill:#2457c5;opacity:.13}"
)


def picture(recorded: dict[str, Run]) -> str:
    """Every controller on two plants from both sides, and on the recorded run."""
    panels = [
        Panel(
            f"Plant: KL, nats (gain {gain}, lag {lag}; beta 10 × too {side})",
            {name: on_plant(start(OFF[side]), gain, lag).kl for name, start in START.items()},
            low=0.03,
            high=10.0,
            target=TARGET,
        )
        for gain, lag in ((0.05, 3), (0.3, 1))
        for side in OFF
    ]
    columns = (
        {name: run.kl for name, run in recorded.items()},
        {name: run.beta for name, run in recorded.items()},
    )
    panels.append(
        Panel("Recorded run of a small policy: KL, nats per response", columns[0], 0.03, 10.0, TARGET)
    )
    panels.append(Panel("Recorded run: beta", columns[1], 0.03, 10.0, None))
    body = []
    for i, panel in enumerate(panels):
        body += draw_panel(panel, LEFT + (i % 2) * (WIDE + 64), TOP + (i // 2) * (HIGH + 60))
    for i, name in enumerate(START):
        at = LEFT + 110 * i
        body.append(
            f'<path d="M{at} 22h26" stroke="{COLOURS[name]}" class="line"/><text x="{at + 32}" y="26">{name}</text>'
        )
    body.append(
        f'<text x="{LEFT + 450}" y="26" class="tick">shaded: within 10 % of the target; x: updates</text>'
    )
    size = f'width="{2 * WIDE + 150}" height="{TOP + 3 * (HIGH + 60) - 24}"'
    style = f"<style>{STYLE}</style><rect width='100%' height='100%' fill='#fff'/>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}\n' + "\n".join(body) + "\n</svg>\n"


def read_runs(path: Path = RUNS) -> dict[str, Run]:
    """The runs that ``record`` wrote."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return {name: Run(**columns) for name, columns in runs.items()}


def main(arguments: list[str] | None = None) -> None:
    """Print the table; draw and record if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="draw the picture there, as SVG")
    parser.add_argument("--record", type=Path, help="train the small policy again and write its runs there")
    options = parser.parse_args(arguments)
    if options.record:
        record(options.record)
    if options.out:
        options.out.write_text(picture(read_runs(options.record or RUNS)), encoding="utf-8")


if __name__ == "__main__":
    main()
