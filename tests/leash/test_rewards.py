"""Rewards with the leash in them: where they stand, what they read, and what they are made of."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kleash.errors import OptionError
from kleash.leash import controlled_kl, measured_kl, sequence_rewards, shape_rewards
from kleash.masking import Mean

NAN, INF = math.nan, math.inf
SCORES = torch.tensor([10.0, -4.0, NAN])
KL = torch.tensor([[0.5, NAN, 1.0, INF], [2.0, 0.25, NAN, NAN], [NAN, INF, NAN, NAN]])
MASK = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])


def by_loops(scores, token_kl, mask, beta):
    """Token by token, in python's float64."""
    rows = []
    for score, kls, counts in zip(scores, token_kl, mask, strict=True):
        row = [-beta * kl if c else 0.0 for kl, c in zip(kls, counts, strict=True)]
        last = max((i for i, c in enumerate(counts) if c), default=None)
        if last is not None:
            row[last] += score
        rows.append(row)
    return rows


@pytest.mark.parametrize("mask", [MASK, MASK.bool()], ids=["integers", "bools"])
def test_shaped_rewards_of_a_small_example(mask):
    scores, token_kl = (x.clone().requires_grad_() for x in (SCORES, KL))
    got = shape_rewards(scores, token_kl, mask, beta=0.1)
    expected = torch.tensor([[-0.05, 0.0, 9.9, 0.0], [-0.2, -4.025, 0.0, 0.0], [0.0] * 4])
    torch.testing.assert_close(got, expected)
    assert (got[mask == 0] == 0).all()
    whole = sequence_rewards(scores.nan_to_num(7.0), token_kl, mask, beta=0.1)
    torch.testing.assert_close(whole, torch.tensor([9.85, -4.225, 7.0]))
    assert not (got.requires_grad or whole.requires_grad)


@st.composite
def batches(draw):
    rows, steps = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    numbers = st.floats(-50, 50)
    scores = draw(st.lists(numbers, min_size=rows, max_size=rows))
    kls = [draw(st.lists(numbers, min_size=steps, max_size=steps)) for _ in range(rows)]
    mask = [draw(st.lists(st.booleans(), min_size=steps, max_size=steps)) for _ in range(rows)]
    return scores, kls, mask, draw(st.floats(0, 2))


@given(batches())
@settings(max_examples=60)
def test_shaped_rewards_agree_with_loops(batch):
    scores, kls, mask, beta = batch
    shape = (len(scores), len(kls[0]) if kls else 3)
    tensors = (
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor(kls, dtype=torch.float64).reshape(shape),
        torch.tensor(mask, dtype=torch.bool).reshape(shape),
    )
    expected = torch.tensor(by_loops(scores, kls, mask, beta), dtype=torch.float64).reshape(shape)
    torch.testing.assert_close(shape_rewards(*tensors, beta=beta), expected, rtol=1e-12, atol=1e-12)
    sums = [sum(k for k, c in zip(ks, cs, strict=True) if c) for ks, cs in zip(kls, mask, strict=True)]
    alone = torch.tensor([s - beta * x for s, x in zip(scores, sums, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(sequence_rewards(*tensors, beta=beta), alone, rtol=1e-12, atol=1e-12)


def test_with_beta_zero_no_kl_is_read_and_infinite_kls_show_otherwise():
    scores, token_kl, mask = torch.tensor([1.0]), torch.tensor([[INF, 2.0]]), torch.tensor([[True, True]])
    assert shape_rewards(scores, token_kl, mask, beta=0.0).tolist() == [[0.0, 1.0]]
    assert sequence_rewards(scores, token_kl, mask, beta=0.0).tolist() == [1.0]
    assert shape_rewards(scores, token_kl, mask, beta=0.5).tolist() == [[-INF, 0.0]]
    assert sequence_rewards(scores, token_kl, mask, beta=0.5).tolist() == [-INF]


# --- the control variate ---


def fitted_by_hand(u, c, i):
    """The weight of response i: covariance over variance of the others, in python."""
    others = [j for j in range(len(u)) if j != i]
    d = {j: u[j] - c[j] for j in others}
    mean_u, mean_d = sum(u[j] for j in others) / len(others), sum(d.values()) / len(others)
    covariance = sum((u[j] - mean_u) * (d[j] - mean_d) for j in others)
    return covariance / sum((d[j] - mean_d) ** 2 for j in others)


def test_the_control_variate_of_a_small_example():
    torch.manual_seed(1)
    u, d = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64)
    mask = torch.rand(5, 4) < 0.7
    mask[:, 0] = True
    u[~mask], d[~mask] = NAN, INF
    got = controlled_kl(u, d, mask.long())
    sampled, exact = (x.where(mask, 0.0).sum(-1).tolist() for x in (u, d))
    a = [fitted_by_hand(sampled, exact, i) for i in range(5)]
    with torch.autocast("cpu", torch.float16):  # a sum of large numbers that it rounded would be infinite
        large = controlled_kl(1e5 * u.float(), 1e5 * d.float(), mask)
    assert got.weight.tolist() == pytest.approx(a) and large.weight.tolist() == pytest.approx(a, rel=1e-5)
    assert got.sampled.tolist() == pytest.approx(sampled) and got.exact.tolist() == pytest.approx(exact)
    mixed = [x - w * (x - y) for x, y, w in zip(sampled, exact, a, strict=True)]
    assert got.per_token.sum(-1).tolist() == pytest.approx(mixed)
    assert (got.per_token[~mask] == 0).all()


def test_a_given_weight_interpolates_between_both_kls():
    u, d, mask = torch.tensor([[1.0, INF]]), torch.tensor([[0.5, 0.25]]), torch.tensor([[True, True]])
    assert controlled_kl(u, d, mask, weight=1.0).per_token.tolist() == [[0.5, 0.25]]
    assert controlled_kl(d, u, mask, weight=0.0).per_token.tolist() == [[0.5, 0.25]]
    assert controlled_kl(u, d, mask).weight.tolist() == [1.0], "nothing to fit on"
    half = controlled_kl(torch.tensor([[1.0, 3.0]]), d, mask, weight=-0.5)
    assert half.per_token.tolist() == [[1.25, 4.375]] and half.weight.tolist() == [-0.5]


# --- what a controller is told ---


def test_measured_kl_is_the_mean_over_responses_or_tokens():
    token_kl = torch.tensor([[1.0, NAN, 2.0], [4.0, NAN, NAN], [NAN, NAN, NAN]], requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]])
    per_sequence, per_token = measured_kl(token_kl, mask), measured_kl(token_kl, mask, per="token")
    assert (per_sequence.total.item(), per_sequence.count.item()) == (7.0, 2)
    assert (per_token.total.item(), per_token.count.item()) == (7.0, 3)
    assert isinstance(per_token, Mean) and not per_sequence.value.requires_grad
    parts = [measured_kl(token_kl[i : i + 1], mask[i : i + 1]) for i in range(3)]
    assert (parts[0] + parts[1] + parts[2]).value == 3.5
    assert measured_kl(token_kl[2:], mask[2:]).value.isnan()


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: shape_rewards(torch.ones(2), ONES, ONES.bool(), beta=-0.1), OptionError, "beta is -0.1"),
        (lambda: sequence_rewards(torch.ones(2), ONES, ONES.bool(), beta=NAN), OptionError, "beta is nan"),
        (lambda: controlled_kl(ONES, ONES, ONES.bool(), weight=NAN), OptionError, "weight is nan"),
        (lambda: measured_kl(ONES, ONES.bool(), per="word"), OptionError, "per is 'word'; there are"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_invalid_reward_arguments_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
