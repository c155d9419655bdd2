"""Which KL in the reward has the right gradient: against sums over all responses of a small world.

The policy is a table of logits, the objective is score - beta KL between responses, and every expected
gradient is a finite sum in float64. ``beta`` is written out, so that no row passes by a KL of no weight.
"""

import itertools

import pytest
import torch
from every_response import World, error, gradient

from kleash.divergences import kl
from kleash.estimators import sampled_kl
from kleash.leash import (
    controlled_kl,
    group_advantages,
    leave_one_out_advantages,
    rewards_to_go,
    sequence_rewards,
    shape_rewards,
)

BETA = 0.7
WORLDS = {
    "3 tokens, 3 steps": World(on_policy=True),
    "responses that end": World(on_policy=True, end=0, seed=3),
    "a tool in the middle": World(on_policy=True, steps=4, tool=1, end=2, seed=5),
}
worlds = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)


def scores_of(world):
    draw = torch.Generator().manual_seed(11)
    table = torch.randn(world.vocab, world.steps, generator=draw, dtype=torch.float64)
    each = torch.stack([table[token, step] for step, token in enumerate(world.tokens.unbind(-1))], -1)
    return torch.where(world.mask, each, 0.0).sum(-1)


def truth(world):
    """The gradient of score - beta KL, from the responses' probabilities alone."""
    scores, (p, _, _) = scores_of(world), world.tables

    def objective(table):
        return (world.probability(world._moving(table)) * scores).sum() - BETA * world.sequence_kl(table)

    return gradient(objective, p)


def kinds(world):
    """Per token: the estimators, the exact KL, and the control variate with a weight of .4."""
    p, q, _ = world.tables
    logp, logq = world.token_logp(p), world.token_logp(q)
    exact = kl(world.next_logp(p), world.next_logp(q))
    return {
        "k1": logp - logq,
        "exact": exact,
        **{name: sampled_kl(logp, logq, name) for name in ("k2", "k3", "abs")},
        "controlled": controlled_kl(logp - logq, exact, world.mask, weight=0.4).per_token,
    }


def by_token(world, advantages, share_of_exact=0.0):
    """The expected gradient of advantages on log p, less beta * share times the exact KL's own."""
    p, q, _ = world.tables
    drawn = world.probability(p)

    def surrogate(table):
        table = world._moving(table)
        logp = torch.where(world.mask, world.token_logp(table), 0.0)
        own = torch.where(world.mask, kl(world.next_logp(table), world.next_logp(q)), 0.0)
        return (drawn.unsqueeze(-1) * (advantages * logp - BETA * share_of_exact * own)).sum()

    return gradient(surrogate, p)


def to_go(world, token_kl, **options):
    rewards = shape_rewards(scores_of(world), token_kl, world.mask, beta=BETA)
    return by_token(world, rewards_to_go(rewards, world.mask), **options)


def whole(world, token_kl, **options):
    rewards = sequence_rewards(scores_of(world), token_kl, world.mask, beta=BETA)
    return by_token(world, rewards.unsqueeze(-1).expand(world.mask.shape), **options)


@worlds
@pytest.mark.parametrize("form", [to_go, whole])
def test_the_expected_gradient_of_each_kl_in_the_reward(world, form):
    given, exact = kinds(world), truth(world)
    assert error(form(world, given["k1"]), exact) < 1e-12
    assert error(form(world, given["exact"]), exact) > 0.03
    assert all(error(form(world, given[name]), exact) > 0.03 for name in ("k2", "k3", "abs"))
    assert error(form(world, given["controlled"]), exact) > 0.01
    assert error(form(world, given["exact"], share_of_exact=1.0), exact) < 1e-12
    assert error(form(world, given["controlled"], share_of_exact=0.4), exact) < 1e-12


def distinct(world):
    """The first of the responses that agree until they end, and the probability of all of them."""
    alike, drawn = {}, world.probability(world.tables[0])
    for i, key in enumerate(map(tuple, torch.where(world.mask, world.tokens, -1).tolist())):
        alike.setdefault(key, []).append(i)
    chance = torch.stack([drawn[members].sum() for members in alike.values()])
    assert chance.sum().item() == pytest.approx(1.0)
    return [members[0] for members in alike.values()], chance


def over_all_batches(world, advantages_of, responses):
    """The expected gradient, per response, of every batch of so many responses to one prompt."""
    leaf = world.tables[0].clone().requires_grad_()
    logp = torch.where(world.mask, world.token_logp(world._moving(leaf)), 0.0).sum(-1)
    each = torch.autograd.grad(logp, leaf, torch.eye(len(logp), dtype=logp.dtype), is_grads_batched=True)[0]
    firsts, chance = distinct(world)
    weight = torch.zeros(len(logp), dtype=logp.dtype)
    for batch in itertools.product(range(len(firsts)), repeat=responses):
        at = torch.tensor([firsts[i] for i in batch])
        found = advantages_of(at) / responses
        weight.index_add_(0, at, chance[list(batch)].prod() * found)
    return (weight[:, None, None] * each).sum(0)


SMALL = World(vocab=2, steps=2, end=0, on_policy=True, seed=2, spread=1.5)


def rewards_of(world):
    return sequence_rewards(scores_of(world), kinds(world)["k1"], world.mask, beta=BETA)


@pytest.mark.parametrize("size", [2, 3])
def test_leave_one_out_is_unbiased_and_centring_lacks_a_factor(size):
    rewards, exact = rewards_of(SMALL), truth(SMALL)

    def with_(function, **options):
        return over_all_batches(SMALL, lambda at: function(rewards[at], size, **options), size)

    assert error(with_(leave_one_out_advantages), exact) < 1e-12
    assert error(with_(group_advantages), exact) < 1e-12
    short = with_(group_advantages, corrected=False)
    assert error(short, exact * (size - 1) / size) < 1e-12
    scaled = with_(group_advantages, scale="std", corrected=False)
    direction = (scaled * exact).sum() / scaled.norm() / exact.norm()
    assert error(scaled, exact) > 0.1 and 0.5 < direction < 1 - 1e-4


def controlled_rewards(world, weight=None):
    """Of a batch of responses, their rewards with the control variate, and their weights."""
    p, q, _ = world.tables
    u = world.token_logp(p) - world.token_logp(q)
    exact, scores = kl(world.next_logp(p), world.next_logp(q)), scores_of(world)

    def rewards(at):
        mixed = controlled_kl(u[at], exact[at], world.mask[at], weight=weight)
        return sequence_rewards(scores[at], mixed.per_token, world.mask[at], beta=BETA), mixed.weight

    return rewards


def own_gradients(world, share_of):
    """What the loss adds: beta times the weight times the exact KL's own gradient, over all batches."""
    p, q, _ = world.tables
    leaf = p.clone().requires_grad_()
    own = torch.where(world.mask, kl(world.next_logp(leaf), world.next_logp(q)), 0.0).sum(-1)
    each = torch.autograd.grad(own, leaf, torch.eye(len(own), dtype=own.dtype), is_grads_batched=True)[0]
    return torch.einsum("n,nij->ij", share_of, each)


def controlled_gradient(world, responses, weight, baseline):
    """Policy gradient of the batch's rewards, less the beta * weight * D of the loss."""
    rewards_at = controlled_rewards(world, weight)
    shares = torch.zeros(len(world.tokens), dtype=torch.float64)
    firsts, chance = distinct(world)

    def advantages(at):
        rewards, a = rewards_at(at)
        batch = [firsts.index(i) for i in at.tolist()]
        shares.index_add_(0, at, chance[batch].prod() * a / responses)
        return leave_one_out_advantages(rewards, responses) if baseline else rewards

    score_part = over_all_batches(world, advantages, responses)
    return score_part - BETA * own_gradients(world, shares)


@pytest.mark.parametrize(
    ("world", "responses", "weight", "baseline"),
    [
        (SMALL, 4, None, False),
        (SMALL, 4, None, True),
        (World(vocab=2, steps=2, on_policy=True, seed=4), 4, None, True),
        (SMALL, 3, 0.4, False),
        (SMALL, 3, 0.4, True),
    ],
    ids=["alone", "leave-one-out", "leave-one-out, no end", "given weight", "given weight, leave-one-out"],
)
def test_a_control_variate_is_unbiased_with_a_batch_baseline(world, responses, weight, baseline):
    """The others' weights are fitted on this response too; U - C has mean 0 whatever they are."""
    found = controlled_gradient(world, responses, weight, baseline=baseline)
    assert error(found, truth(world)) < 1e-12


def test_the_weights_of_the_test_batches_are_fitted():
    weights = controlled_rewards(SMALL)(torch.tensor([0, 2, 3, 2, 0]))[1]
    assert weights.unique().numel() > 1 and (weights != 1).all()
