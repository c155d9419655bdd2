"""What importance weights of each level make of k3: over every response of a small world."""

import pytest
from every_response import World

from kleash.estimators import importance_weights, k3


@pytest.mark.parametrize("world", [World(seed=s) for s in (3, 1)], ids=["one pair", "another"])
def test_surrogate_values_off_policy(world):
    """Unweighted they estimate nothing; token weights the behaviour's prefixes; prefix weights the KL."""
    p, q, mu = world.tables
    logp, logq, behaviour = (world.token_logp(x) for x in (p, q, mu))
    drawn = world.probability(mu)

    def value(level):
        weights = importance_weights(logp, behaviour, world.mask, level=level).values if level else 1.0
        return (drawn * (weights * k3(logp - logq)).sum(-1)).sum().item()

    on_the_behaviours, truth = world.token_kl(p, mu).item(), world.sequence_kl(p).item()
    assert value("token") == pytest.approx(on_the_behaviours, rel=1e-12)
    assert value("prefix") == pytest.approx(truth, rel=1e-12)
    assert value("sequence") == pytest.approx(truth, rel=1e-12)
    assert value(None) != pytest.approx(truth, rel=1e-3)
    assert value(None) != pytest.approx(on_the_behaviours, rel=1e-3)
    assert on_the_behaviours != pytest.approx(truth, rel=1e-3)
