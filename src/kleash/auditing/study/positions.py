"""Case (b): fifty positions of a thousand tokens, logits a little apart, one token drawn at each."""

import math

import numpy as np
import torch
from torch import Tensor

from kleash.auditing.study.candidates import candidates
from kleash.auditing.study.drawn import exact_row_from, rows_from
from kleash.auditing.study.worlds import World, known, rows_of
from kleash.divergences import kl
from kleash.records.study import StudyCase

POSITIONS, VOCAB, NOISE = 50, 1000, 0.1
SEED = 0


def perturbed(seed: int = SEED) -> World:
    """p from standard normal logits, q from the same logits plus 0.1 times noise; logits are the parameters."""
    draw = torch.Generator().manual_seed(seed)
    logits, noise = torch.randn(2, POSITIONS, VOCAB, generator=draw, dtype=torch.float64)
    logits.requires_grad_()
    return World(
        logp=logits.log_softmax(-1),
        logq=(logits.detach() + NOISE * noise).log_softmax(-1),
        measure=torch.ones(POSITIONS, VOCAB, dtype=torch.float64),
        visits=torch.full((POSITIONS,), 1 / POSITIONS, dtype=torch.float64),
        parameters=(logits,),
    )


def drawn_at(world: World, seed: int = SEED) -> Tensor:
    """One token for each place, from its distribution, by inverting the distribution function."""
    uniform = np.random.default_rng(seed).random(len(world.visits))
    reached = world.mass.cumsum(-1) / world.mass.sum(-1, keepdim=True)
    return torch.searchsorted(reached, torch.from_numpy(uniform).unsqueeze(-1), right=True).squeeze(-1)


def position_cases() -> tuple[StudyCase, StudyCase]:
    """Every estimator, exactly by enumeration, and as one draw at each position tells it."""
    world = perturbed()
    title = f"{POSITIONS} positions × {VOCAB} tokens, logits {NOISE:g} × noise apart"
    enumerated = StudyCase(
        name="positions",
        title=title,
        drawn="one token from p at one position; the gradient is in p's logits",
        kl=known(world.exact().item()),
        rows=rows_of(world),
        notes=(f"the controlled estimate has a = {world.control_weight():.3f}",),
    )
    return enumerated, _drawn_case(world, title)


def _drawn_case(world: World, title: str) -> StudyCase:
    at = drawn_at(world).unsqueeze(-1)
    u = world.log_ratio.detach().gather(-1, at).squeeze(-1).numpy()
    exact = kl(world.logp.detach(), world.logq).numpy()
    each = np.arange(POSITIONS)
    k1_and_k3 = [
        math.sqrt(world.variance(candidates(0.0)[name](world.log_ratio.detach())).item() / POSITIONS)
        for name in ("k1", "k3")
    ]
    note = (
        "by enumeration, the mean over one draw at each position has a standard deviation of "
        f"{k1_and_k3[0]:.5f} nats with k1 and {k1_and_k3[1]:.5f} with k3"
    )
    return StudyCase(
        name="positions-drawn",
        title=f"{title}: one draw at each",
        drawn="the same, drawn once at each of the positions; errors take positions to be independent",
        kl=known(world.exact().item()),
        rows=(*rows_from(u, exact, each, np.ones(POSITIONS)), exact_row_from(exact, each)),
        notes=(note,),
    )
