"""Case (b): fifty positions over a thousand tokens, q's logits perturbed by noise."""

import torch

from estimator_study.enumeration import EnumeratedPair, enumerated_rows
from estimator_study.results import StudyCase

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


def position_case() -> StudyCase:
    """Every estimator on one token from p at one position, by enumeration; the gradient is in p's logits."""
    pair = perturbed_pair()
    return StudyCase(
        name="positions",
        title=f"{POSITIONS} positions × {VOCAB_SIZE} tokens, logits {NOISE:g} × noise apart",
        kl=pair.kl().item(),
        rows=enumerated_rows(pair),
        notes=(f"the control variate has a = {pair.control_weight():.3f}",),
    )
