"""Advantages over time: against the recursion token by token, and against verl's."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kleash.errors import OptionError, ShapeError
from kleash.leash import generalised_advantages, rewards_to_go, shape_rewards

NAN = math.nan


def recursion(rewards, values, mask, gamma, gae_lambda):
    """GAE of one response by the book, over a list of the tokens that count."""
    steps = [i for i, counts in enumerate(mask) if counts]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    next_value = next_advantage = 0.0
    for i in reversed(steps):
        delta = rewards[i] + gamma * next_value - values[i]
        next_advantage = delta + gamma * gae_lambda * next_advantage
        next_value = values[i]
        advantages[i], returns[i] = next_advantage, next_advantage + values[i]
    return advantages, returns


@st.composite
def batches(draw):
    rows, steps = draw(st.integers(0, 3)), draw(st.integers(0, 9))

    def table(of):
        return [draw(st.lists(of, min_size=steps, max_size=steps)) for _ in range(rows)]

    share = st.sampled_from([0.0, 0.3, 0.95, 1.0])
    numbers = st.floats(-20, 20)
    return table(numbers), table(numbers), table(st.booleans()), draw(share), draw(share), (rows, steps)


@given(batches())
@settings(max_examples=100)
def test_gae_agrees_with_the_recursion(batch):
    rewards, values, mask, gamma, gae_lambda, shape = batch
    where = torch.tensor(mask, dtype=torch.bool).reshape(shape)
    given_, critic = (torch.tensor(x, dtype=torch.float64).reshape(shape) for x in (rewards, values))
    given_[~where], critic[~where] = NAN, math.inf
    got = generalised_advantages(given_, critic, where, gamma=gamma, gae_lambda=gae_lambda)
    for i in range(shape[0]):
        advantages, returns = recursion(rewards[i], values[i], mask[i], gamma, gae_lambda)
        assert got.advantages[i].tolist() == pytest.approx(advantages, rel=1e-10, abs=1e-10)
        assert got.returns[i].tolist() == pytest.approx(returns, rel=1e-10, abs=1e-10)
    zeros = [[0.0] * shape[1]] * shape[0]
    to_go = rewards_to_go(given_, where, gamma=gamma)
    for i in range(shape[0]):
        expected = recursion(rewards[i], zeros[i], mask[i], gamma, 1.0)[0]
        assert to_go[i].tolist() == pytest.approx(expected, rel=1e-10, abs=1e-10)


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: generalised_advantages(ONES, ONES[:1], ONES.bool()), ShapeError, r"values \(1, 3\)"),
        (lambda: generalised_advantages(ONES, ONES, ONES.bool(), gae_lambda=1.1), OptionError, "gae_lambda"),
        (lambda: generalised_advantages(ONES, ONES, ONES.bool(), gamma=NAN), OptionError, "gamma is nan"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_invalid_advantage_arguments_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7)])
def test_gae_agrees_with_verl(verl, gamma, gae_lambda):
    """verl whitens its advantages, and leaves the returns as they are."""
    torch.manual_seed(3)
    mask = torch.rand(4, 9, dtype=torch.float64) < 0.7
    mask[:, 0] = True
    values = torch.where(mask, torch.randn(4, 9, dtype=torch.float64), 0.0)
    scores, token_kl = torch.randn(4, dtype=torch.float64), torch.rand(4, 9, dtype=torch.float64)
    rewards = shape_rewards(scores, token_kl, mask, beta=0.2)
    theirs = verl.core.compute_gae_advantage_return(rewards, values, mask.double(), gamma, gae_lambda)
    ours = generalised_advantages(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    torch.testing.assert_close(ours.returns[mask], theirs[1][mask])
    theirs_again = (ours.advantages[mask] - ours.advantages[mask].mean()) / ours.advantages[mask].std()
    torch.testing.assert_close(theirs_again, theirs[0][mask], rtol=1e-6, atol=1e-6)
