"""Every composition, value and gradient, against sums over all responses: on- and off-policy."""

import pytest
import torch
from every_response import World, error, expected, gradient

from kleash.divergences import kl
from kleash.estimators import ESTIMATORS, importance_weights, sampled_kl
from kleash.losses import future_kl_loss, kl_loss

OFF = [World(seed=0), World(seed=1, end=2), World(seed=2, tool=1), World(seed=3, end=0, tool=1, spread=2.0)]
ON = [World(seed=w.seed, end=w.end, tool=w.tool, spread=w.spread, on_policy=True) for w in OFF]
on_policy = pytest.mark.parametrize("world", ON, ids=["plain", "ends", "tool", "both"])
off_policy = pytest.mark.parametrize("world", OFF, ids=["plain", "ends", "tool", "both"])
unbiased = pytest.mark.parametrize("name", ["k1", "k3"])
EXACT = 1e-12


def pieces(world, table):
    """log p, log q, mask and the exact KL of each token, with the gradient in ``table``."""
    logq = world.next_logp(world.tables[1])
    token_kl = kl(world.next_logp(table), logq)
    return world.token_logp(table), world.token_logp(world.tables[1]), world.mask, token_kl


def weigh(world, level, cap=None):
    logp, mu = world.token_logp(world.tables[0]), world.token_logp(world.tables[2])
    return importance_weights(logp, mu, world.mask, level=level, cap=cap).values


def sampled(world, name="k3", level=None, future=False):
    """``kl_loss``, and the future added to it, as a function of p's logits."""

    def per_token(table):
        logp, logq, mask, _ = pieces(world, table)
        weights = None if level is None else weigh(world, level)
        loss = kl_loss(logp, logq, mask, estimator=name, weights=weights)
        if not future:
            return loss
        return loss + future_kl_loss(logp, sampled_kl(logp, logq, name), mask, weights=weights)

    return per_token


def exact(world, level=None, future=False):
    """weights * the exact KL with its gradient, and the future added to it."""

    def per_token(table):
        logp, _, mask, token_kl = pieces(world, table)
        weights = None if level is None else weigh(world, level)
        loss = torch.where(mask, token_kl, 0.0) * (1.0 if weights is None else weights)
        return loss + future_kl_loss(logp, token_kl, mask, weights=weights) if future else loss

    return per_token


def check(world, per_token, truth, *, value=True):
    p = world.tables[0]
    if value:
        found = expected(world, per_token, p.requires_grad_())
        torch.testing.assert_close(found, truth(p), rtol=1e-12, atol=0)
    assert error(gradient(lambda x: expected(world, per_token, x), p), gradient(truth, p)) < EXACT


@on_policy
@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_the_gradient_of_a_token_on_policy(world, name):
    """The gradient whatever the estimator; the value where the estimator's is unbiased."""
    p = world.tables[0]
    check(world, sampled(world, name), lambda x: world.token_kl(x, p), value=ESTIMATORS[name].unbiased)


@off_policy
@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_the_gradient_of_a_token_with_token_weights(world, name):
    behaviour, is_right = world.tables[2], ESTIMATORS[name].unbiased
    check(world, sampled(world, name, "token"), lambda x: world.token_kl(x, behaviour), value=is_right)


@off_policy
@unbiased
@pytest.mark.parametrize("level", ["prefix", "sequence"])
def test_the_gradient_of_a_token_with_prefix_weights(world, name, level):
    p = world.tables[0]
    check(world, sampled(world, name, level), lambda x: world.token_kl(x, p))


@on_policy
@unbiased
def test_the_gradient_of_a_response_on_policy(world, name):
    check(world, sampled(world, name, future=True), world.sequence_kl)


@off_policy
@unbiased
@pytest.mark.parametrize("level", ["prefix", "sequence"])
def test_the_gradient_of_a_response_off_policy(world, name, level):
    check(world, sampled(world, name, level, future=True), world.sequence_kl)


@on_policy
def test_the_gradient_of_a_response_from_exact_kls_on_policy(world):
    check(world, exact(world, future=True), world.sequence_kl)


@off_policy
@pytest.mark.parametrize("level", ["before", "prefix", "sequence"])
def test_the_gradient_of_a_response_from_exact_kls_off_policy(world, level):
    check(world, exact(world, level, future=True), world.sequence_kl)


@off_policy
@pytest.mark.parametrize("level", [None, "token"])
def test_the_gradient_of_a_token_from_exact_kls_off_policy(world, level):
    """The behaviour's prefixes: with the exact KL no weight is needed, and the token's does no harm."""
    behaviour = world.tables[2]
    check(world, exact(world, level), lambda x: world.token_kl(x, behaviour))


@off_policy
def test_the_gradient_of_a_token_from_exact_kls_with_prefix_weights(world):
    p = world.tables[0]
    check(world, exact(world, "before"), lambda x: world.token_kl(x, p))


@off_policy
@unbiased
def test_token_weights_with_future_kl_give_neither_gradient(world, name):
    p, behaviour = world.tables[0], world.tables[2]
    got = gradient(lambda x: expected(world, sampled(world, name, "token", future=True), x), p)
    assert error(got, gradient(world.sequence_kl, p)) > 0.01
    assert error(got, gradient(lambda x: world.token_kl(x, behaviour), p)) > 0.01


@off_policy
def test_a_cap_has_the_documented_bias(world):
    """E_p[(1 - cap / rho)+ k1] in the value, the same with u * score in the gradient."""
    p, mu = world.tables[0], world.tables[2]
    cap = 1.2
    logp, logq, mask, _ = pieces(world, p)
    rho = (logp - world.token_logp(mu)).exp()
    missing = torch.where(mask, (1 - cap / rho).clamp(min=0) * (logp - logq), 0.0)
    drawn = world.probability(mu).unsqueeze(-1)  # the behaviour's prefixes, and rho makes the token p's

    def capped(table):
        a, b, m, _ = pieces(world, table)
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
