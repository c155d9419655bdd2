"""Tables of known quantities, against random distributions."""

import torch

from kleash.auditing.quantities import SYMMETRIC
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
    assert set(SYMMETRIC) == unchanged == {"jeffreys", "jensen_shannon", "total_variation", "hellinger"}
