"""One inputs in which every audited package is called, and what should come of it."""

import pytest
import torch
from target_values import Numbers
from torch import Tensor

from kleash.auditing import AuditInputs
from kleash.auditing.toy_distributions import make_inputs

DRAWN = torch.Generator().manual_seed(3)


def logits(spread: float) -> Tensor:
    return spread * torch.randn(2, 3, 5, generator=DRAWN, dtype=torch.float64)


@pytest.fixture(scope="module")
def inputs() -> AuditInputs:
    """Two responses of three tokens, one of them masked; log ratios that no clamp of anybody's touches."""
    tokens = torch.randint(5, (2, 3), generator=DRAWN)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    return make_inputs(logits(0.6), logits(0.6), tokens, logits_behaviour=logits(0.6), mask=mask)


@pytest.fixture(scope="module")
def by_hand(inputs: AuditInputs) -> Numbers:
    return Numbers(inputs)
