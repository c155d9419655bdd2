"""kl_loss and future_kl_loss against sums over all responses, beyond what ``test_kl_term`` has of all terms."""

import pytest
import torch
from every_response import World, error, gradient

from kleash.divergences import kl
from kleash.estimators import ESTIMATORS, importance_weights
from kleash.losses import kl_loss

OFF = [World(seed=0), World(seed=1, end=2), World(seed=2, tool=1), World(seed=3, end=0, tool=1, spread=2.0)]
ON = [World(seed=w.seed, end=w.end, tool=w.tool, spread=w.spread, on_policy=True) for w in OFF]
off_policy = pytest.mark.parametrize("world", OFF, ids=["plain", "ends", "tool", "both"])
EXACT = 1e-12


def pieces(world, table):
    """log p, log q and mask of each token, with the gradient in ``table``."""
    return world.token_logp(table), world.token_logp(world.tables[1]), world.mask


def weigh(world, level, cap=None):
    logp, mu = world.token_logp(world.tables[0]), world.token_logp(world.tables[2])
    return importance_weights(logp, mu, world.mask, level=level, cap=cap).values


@off_policy
def test_a_cap_has_the_documented_bias(world):
    """E_p[(1 - cap / rho)+ k1] in the value, the same with u * score in the gradient."""
    p, mu = world.tables[0], world.tables[2]
    cap = 1.2
    logp, logq, mask = pieces(world, p)
    rho = (logp - world.token_logp(mu)).exp()
    missing = torch.where(mask, (1 - cap / rho).clamp(min=0) * (logp - logq), 0.0)
    drawn = world.probability(mu).unsqueeze(-1)  # the behaviour's prefixes, and rho makes the token p's

    def capped(table):
        a, b, m = pieces(world, table)
        return (drawn * kl_loss(a, b, m, estimator="k1", weights=weigh(world, "token", cap))).sum()

    bias = capped(p.requires_grad_()) - world.token_kl(p, mu)
    torch.testing.assert_close(bias, -(drawn * rho * missing).sum(), rtol=1e-10, atol=1e-13)
    short = gradient(lambda x: world.token_kl(x, mu), p) - gradient(capped, p)
    lost = gradient(lambda x: (drawn * rho * missing * world.token_logp(x)).sum(), p)
    torch.testing.assert_close(short, lost, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("world", [*ON, *OFF])
def test_the_gradient_in_q_is_that_of_maximum_likelihood(world):
    """The gradient in log q is that of KL(p || q), whatever the estimator, in expectation; also off-policy."""
    p, q, mu = world.tables
    is_off = any(world is one for one in OFF)
    logp, drawn = world.token_logp(p), world.probability(mu if is_off else p)
    weights = weigh(world, "token") if is_off else None

    def truth(table):
        exact_kl = kl(world.next_logp(p), world.next_logp(table))
        return (drawn * torch.where(world.mask, exact_kl, 0.0).sum(-1)).sum()

    for name in ESTIMATORS:

        def loss(table, name=name):
            logq = world.token_logp(table)
            return (
                drawn.unsqueeze(-1) * kl_loss(logp, logq, world.mask, estimator=name, weights=weights)
            ).sum()

        assert error(gradient(loss, q), gradient(truth, q)) < EXACT
