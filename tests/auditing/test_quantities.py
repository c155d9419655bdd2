"""Tables of known quantities, against random distributions."""

import torch

from kleash.auditing.quantities import SYMMETRIC, UNBOUNDED
from kleash.divergences import DIVERGENCES, divergence


def test_symmetric_divergences_are_those_that_do_not_change_when_p_and_q_are_exchanged():
    logp, logq = torch.randn(
        2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    ).log_softmax(-1)
    unchanged = {
        name
        for name in DIVERGENCES
        if torch.allclose(divergence(name, logp, logq), divergence(name, logq, logp))
    }
    assert set(SYMMETRIC) == unchanged and "jeffreys" in unchanged and "kl" not in unchanged


def test_the_divergences_whose_saturation_is_a_fault_are_infinite_for_disjoint_supports():
    logp = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    logq = torch.tensor([[0.0, 0.5, 0.5]], dtype=torch.float64).log()
    infinite = {name for name in DIVERGENCES if divergence(name, logp, logq).isinf().all()}
    assert set(UNBOUNDED) == infinite and {"kl", "chi_squared"} <= infinite
