"""Draws each beta controller on a plant and in the training of a small policy: python examples/beta_controllers.py

The plant says how a KL may answer beta: it goes a share of the way to ``drive / beta`` with every update, is seen
``lag`` updates late, and with 10 % noise. The small policy has 4 words and 4 steps, and is trained on samples by policy
gradient with the exact KL in the reward and its own gradient in the loss. Writes docs/images/beta.svg in some seconds.
"""

import math
import random
from collections.abc import Callable
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

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "beta.svg"
TARGET = 0.5  # nats per response
SEQUENCES = 64
START: dict[str, Callable[[float], Leash]] = {
    "fixed": lambda beta: FixedBeta(beta=beta),
    "Ziegler": lambda beta: ZieglerBeta(beta=beta, target_nats=TARGET),
    "dual": lambda beta: DualBeta(beta=beta, target_nats=TARGET),
    "PID": lambda beta: PIDBeta(beta=beta, target_nats=TARGET),
}
OFF = {"weak": 0.1, "strong": 10.0}


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


def draw(path: Path) -> None:
    """Draw the KL on two plants from both sides, and KL and beta of the trained policy."""
    import matplotlib.pyplot as plt

    # each time the same file, and a small one
    plt.rcParams |= {"svg.hashsalt": "beta", "svg.fonttype": "none"}
    panels = {
        f"plant: gain {gain}, seen {lag} late; beta 10 × too {side}": {
            name: on_plant(start(OFF[side]), gain, lag).kl for name, start in START.items()
        }
        for gain, lag in ((0.05, 3), (0.3, 1))
        for side in OFF
    }
    trained = {name: train(start(0.1)) for name, start in START.items()}
    panels["a small policy"] = {name: run.kl for name, run in trained.items()}
    panels["a small policy: beta"] = {name: run.beta for name, run in trained.items()}
    figure, axes = plt.subplots(3, 2, figsize=(10, 9), sharex=True, layout="constrained")
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=True):
        is_beta = title.endswith("beta")
        axis.set(title=title, yscale="log", ylim=(0.03, 10), ylabel="" if is_beta else "KL, nats")
        if not is_beta:
            axis.axhspan(0.9 * TARGET, 1.1 * TARGET, alpha=0.2)
        for name, values in lines.items():
            axis.plot(values, "--" if name == "PID" else "-", label=name)
    axes[0, 0].legend(title="shaded: target ± 10 %")
    figure.supxlabel("updates")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(PICTURE)
