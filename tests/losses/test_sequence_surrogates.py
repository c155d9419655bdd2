"""Which surrogates have the gradient of the KL between responses, and which popular ones do not."""

import pytest
import torch
from every_response import World, error, expected, gradient
from markov_models import MarkovModel, drift_moments

from kleash.divergences import kl
from kleash.estimators import importance_weights, k2, k3
from kleash.losses import KLTerm

ON = [World(seed=s, on_policy=True) for s in (0, 1, 2)]
OFF = [World(seed=s) for s in (3, 1, 2)]
ids = ["one pair", "another", "a third"]
EXACT = 1e-12


def to_go(x):
    return x.flip(-1).cumsum(-1).flip(-1)


def after(x):
    return to_go(x) - x


def one(logp):
    """r: 1, with the gradient of log p."""
    return torch.exp(logp - logp.detach())


ON_POLICY = {
    "k1 reward-to-go": (True, lambda logp, u, d: logp * to_go(u).detach()),
    "square of the summed k1": (True, lambda logp, u, d: k2(u.sum(-1, keepdim=True))),
    "exact, backpropagated": (False, lambda logp, u, d: d),
    "token k2": (False, lambda logp, u, d: k2(u)),
    "r k3 per token": (False, lambda logp, u, d: one(logp) * k3(u)),
    "token k3": (False, lambda logp, u, d: k3(u)),
    "exact with the future": (True, lambda logp, u, d: d + logp * after(d).detach()),
    "k1, backpropagated": (False, lambda logp, u, d: u),
    "exact as a reward": (False, lambda logp, u, d: logp * to_go(d).detach()),
}
OFF_POLICY = {
    "rho k3 per token": (False, lambda rho, logp, u: rho * k3(u)),
    "prefix ratio, attached": (True, lambda rho, logp, u: rho.cumprod(-1) * k3(u)),
    "sequence ratio, attached": (True, lambda rho, logp, u: rho.prod(-1, keepdim=True) * k3(u)),
    "per decision": (True, lambda rho, logp, u: logp * to_go(rho.cumprod(-1) * u).detach()),
}


def of_p(world, table):
    logp = world.token_logp(table)
    logq = world.next_logp(world.tables[1])
    return logp, logp - world.token_logp(world.tables[1]), kl(world.next_logp(table), logq)


def errors_on_policy(world):
    p = world.tables[0]
    truth = gradient(world.sequence_kl, p)
    return {
        name: error(gradient(lambda x, f=f: expected(world, lambda t: f(*of_p(world, t)), x), p), truth)
        for name, (_, f) in ON_POLICY.items()
    }


@pytest.mark.parametrize("world", ON, ids=ids)
def test_surrogate_gradients_on_policy(world):
    errors = errors_on_policy(world)
    assert {name: value < EXACT for name, value in errors.items()} == {
        n: right for n, (right, _) in ON_POLICY.items()
    }
    assert all(errors[name] > 0.02 for name, (right, _) in ON_POLICY.items() if not right)


@pytest.mark.parametrize("world", ON, ids=ids)
def test_token_losses_agree_and_backpropagated_k3_differs(world):
    p = world.tables[0]
    got = {
        name: gradient(lambda x, f=f: expected(world, lambda t: f(*of_p(world, t)), x), p)
        for name, (_, f) in ON_POLICY.items()
    }
    per_token = gradient(lambda x: world.token_kl(x, p), p)
    for name in ("exact, backpropagated", "token k2", "r k3 per token"):
        assert error(got[name], per_token) < EXACT
    other_way = gradient(
        lambda x: (
            world.probability(p) * kl(world.next_logp(world.tables[1]), world.next_logp(x)).sum(-1)
        ).sum(),
        p,
    )
    assert error(got["token k3"], other_way) < EXACT
    assert error(other_way, per_token) > 0.1
    assert got["k1, backpropagated"].abs().max() < 1e-15
    missing = got["exact as a reward"] + per_token
    assert error(missing, gradient(world.sequence_kl, p)) < EXACT, "what the reward lacks is each token's own"


@pytest.mark.parametrize("world", OFF, ids=ids)
def test_surrogate_gradients_off_policy(world):
    p, _, mu = world.tables
    truth = gradient(world.sequence_kl, p)

    def surrogate(f):
        def per_token(table):
            logp, u, _ = of_p(world, table)
            return f(torch.exp(logp - world.token_logp(mu)), logp, u)

        return per_token

    errors = {
        name: error(gradient(lambda x, f=f: expected(world, surrogate(f), x), p), truth)
        for name, (_, f) in OFF_POLICY.items()
    }
    assert {name: value < EXACT for name, value in errors.items()} == {
        n: right for n, (right, _) in OFF_POLICY.items()
    }
    assert errors["rho k3 per token"] > 0.02


@pytest.mark.parametrize("world", OFF, ids=ids)
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


def two_steps():
    """The pair of models for which the exact sums vary more than the sampled ones."""

    def model(first, then):
        rows = [torch.tensor(row, dtype=torch.float64).log() for row in (first, *then)]
        return MarkovModel(first=rows[0], then=torch.stack(rows[1:]))

    p = model([0.5, 0.5], [[0.5, 0.5], [0.01, 0.99]])
    return p, model([0.25, 0.75], [[0.5, 0.5], [0.99, 0.01]])


def test_exact_sums_can_have_a_larger_variance():
    moments = drift_moments(*two_steps(), steps=2)
    got = (moments.kl, moments.variance_sampled, moments.variance_summed, moments.control_weight)
    assert got == pytest.approx((2.395450, 3.31591, 5.06974, -0.718), abs=5e-4)
    assert moments.variance(moments.control_weight) == pytest.approx(2.94458, abs=1e-5)


# Whole algorithms: responses in groups of two, the KL in the reward, the update of plain policy gradients.

SCORES = torch.tensor([0.0, 1.0, -0.5], dtype=torch.float64)
BETA = 0.3


def rewarded(world):
    """Score minus beta times the summed k1, as a reward-place term gives it."""
    p, q, _ = world.tables
    penalty = KLTerm(estimator="k1", place="reward").per_token(
        world.token_logp(p), world.token_logp(q), world.mask
    )
    return scored(world) - BETA * penalty.sum(-1)


def scored(world):
    return torch.where(world.mask, SCORES[world.tokens], 0.0).sum(-1)


def update(world, advantages, scale=1.0):
    """Expected over all groups of two: ``advantages(mine, other)`` times the score of each response."""
    p = world.tables[0]
    drawn, rewards = world.probability(p), rewarded(world)
    each = advantages(rewards.unsqueeze(1), rewards.unsqueeze(0))
    credit = (drawn.unsqueeze(0) * each).sum(1)
    logp = lambda x: torch.where(world.mask, world.token_logp(x), 0.0).sum(-1)  # noqa: E731
    return gradient(lambda x: (drawn * credit * scale * logp(x)).sum(), p)


def objective(world):
    p = world.tables[0]

    def score(x):
        return (world.probability(x) * scored(world)).sum()

    return gradient(lambda x: score(x) - BETA * world.sequence_kl(x), p)


@pytest.mark.parametrize("world", ON, ids=ids)
def test_leave_one_out_is_unbiased_and_the_group_mean_lacks_a_factor(world):
    truth = objective(world)
    assert error(update(world, lambda mine, other: mine - other), truth) < EXACT
    centred = update(world, lambda mine, other: mine - (mine + other) / 2)
    assert error(2 * centred, truth) < EXACT
    assert error(centred, truth) == pytest.approx(0.5)


@pytest.mark.parametrize("world", ON, ids=ids)
def test_dividing_by_the_groups_std_changes_the_direction(world):
    truth = objective(world)

    def standardised(mine, other):
        apart = mine - other
        return torch.where(apart == 0, 0.0, apart / torch.where(apart == 0, 1.0, apart.abs()))

    got = update(world, standardised)
    cosine = (got * truth).sum() / got.norm() / truth.norm()
    assert error(got, truth) > 0.02 and 0.5 < cosine < 0.9999


@pytest.mark.parametrize("seed", [0, 1])
def test_dividing_by_the_length_changes_the_direction(seed):
    world = World(seed=seed, end=2, on_policy=True)
    truth = objective(world)
    rewards = lambda mine, other: mine - other  # noqa: E731
    assert error(update(world, rewards), truth) < EXACT
    got = update(world, rewards, scale=1 / world.mask.sum(-1))
    assert error(got, truth) > 0.05
    assert (got * truth).sum() / got.norm() / truth.norm() < 0.999
