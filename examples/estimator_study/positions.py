"""Case (b): fifty positions over a thousand tokens, q's logits perturbed by noise, one token sampled at each."""

import math

import numpy as np
import torch
from torch import Tensor

from estimator_study.enumeration import EnumeratedPair, enumerated_rows, estimator_functions, exact_number
from estimator_study.results import StudyCase
from estimator_study.samples import sampled_exact_row, sampled_rows
from kleash.divergences import kl

POSITIONS, VOCAB_SIZE, NOISE = 50, 1000, 0.1
SEED = 0


def perturbed_pair(seed: int = SEED) -> EnumeratedPair:
    """p from standard normal logits, q from the same logits plus 0.1 times noise; p's logits are the parameters."""
    generator = torch.Generator().manual_seed(seed)
    logits, noise = torch.randn(2, POSITIONS, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    return EnumeratedPair(
        logp=logits.log_softmax(-1),
        logq=(logits.detach() + NOISE * noise).log_softmax(-1),
        measure=torch.ones(POSITIONS, VOCAB_SIZE, dtype=torch.float64),
        visits=torch.full((POSITIONS,), 1 / POSITIONS, dtype=torch.float64),
        parameters=(logits,),
    )


def sample_tokens(pair: EnumeratedPair, seed: int = SEED) -> Tensor:
    """One token for each position, sampled from p by inverting the cumulative distribution."""
    uniform = np.random.default_rng(seed).random(len(pair.visits))
    cumulative = pair.mass.cumsum(-1) / pair.mass.sum(-1, keepdim=True)
    return torch.searchsorted(cumulative, torch.from_numpy(uniform).unsqueeze(-1), right=True).squeeze(-1)


def position_cases() -> tuple[StudyCase, StudyCase]:
    """Every estimator by enumeration, and with one sample at each position."""
    pair = perturbed_pair()
    title = f"{POSITIONS} positions × {VOCAB_SIZE} tokens, logits {NOISE:g} × noise apart"
    enumerated = StudyCase(
        name="positions",
        title=title,
        sample="one token from p at one position; the gradient is in p's logits",
        kl=exact_number(pair.kl().item()),
        rows=enumerated_rows(pair),
        notes=(f"the control variate has a = {pair.control_weight():.3f}",),
    )
    return enumerated, _sampled_case(pair, title)


def _sampled_case(pair: EnumeratedPair, title: str) -> StudyCase:
    tokens = sample_tokens(pair).unsqueeze(-1)
    log_ratio = pair.log_ratio.detach().gather(-1, tokens).squeeze(-1).numpy()
    position_kl = kl(pair.logp.detach(), pair.logq).numpy()
    clusters = np.arange(POSITIONS)
    deviations = [
        math.sqrt(pair.variance(estimator_functions(0.0)[name](pair.log_ratio.detach())).item() / POSITIONS)
        for name in ("k1", "k3")
    ]
    note = (
        "by enumeration, the mean over one sample at each position has a standard deviation of "
        f"{deviations[0]:.5f} nats with k1 and {deviations[1]:.5f} with k3"
    )
    return StudyCase(
        name="positions-drawn",
        title=f"{title}: one draw at each",
        sample="the same, drawn once at each of the positions; errors take positions to be independent",
        kl=exact_number(pair.kl().item()),
        rows=(
            *sampled_rows(log_ratio, position_kl, clusters, np.ones(POSITIONS)),
            sampled_exact_row(position_kl, clusters),
        ),
        notes=(note,),
    )
