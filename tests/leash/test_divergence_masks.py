"""Masks that look at the direction of the update, against plain sums over two outcomes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr

from kleash.divergences import kl, total_variation
from kleash.errors import OptionError, ShapeError
from kleash.leash import binary_divergence, binary_divergence_mask, off_policy_sequence_mask

NAN, INF = float("nan"), float("inf")
probability = st.floats(1e-6, 1 - 1e-6)


@given(probability, probability)
def test_the_binary_divergence_is_that_of_two_outcomes(p, b):
    logs = [torch.tensor(math.log(x), dtype=torch.float64) for x in (p, b)]
    expected = rel_entr(b, p) + rel_entr(1 - b, 1 - p)
    assert binary_divergence(*logs).item() == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert binary_divergence(*logs, "total_variation").item() == pytest.approx(abs(p - b), abs=1e-12)


@given(st.integers(0, 10_000))
def test_the_binary_divergence_is_at_most_that_of_the_vocabulary(seed):
    logp, logq = torch.randn(2, 7, generator=torch.Generator().manual_seed(seed)).double().log_softmax(-1)
    for divergence, whole in (("kl", kl), ("total_variation", total_variation)):
        of_each_token = binary_divergence(logp, logq, divergence)
        assert (of_each_token <= whole(logq, logp) + 1e-12).all()
        assert of_each_token.max() > 0


def test_the_binary_divergence_of_certain_and_impossible_tokens():
    one, half, none = 0.0, math.log(0.5), -INF
    cases = [  # policy, behaviour, KL(behaviour || policy)
        (half, one, math.log(2)),
        (half, 0.0005, math.log(2)),
        (one, one, 0.0),
        (half, none, math.log(2)),
        (none, half, INF),
        (none, none, 0.0),
        (NAN, half, NAN),
        (half, NAN, NAN),
        (0.01, half, NAN),
    ]
    p, b, expected = torch.tensor(cases, dtype=torch.float64).T
    got = binary_divergence(p, b)
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-9, atol=1e-15)
    assert 17 < binary_divergence(torch.tensor(one).double(), torch.tensor(half).double()) < 19


def test_a_probability_rounded_to_one_has_a_finite_divergence():
    """float32 holds no probability between 1 - 6e-8 and 1: log p = 0 does not say that nothing else is possible."""
    p, b = torch.tensor([0.0, 0.0, 2e-7]), torch.tensor([-1e-4, -1e-6, -1e-4])
    far = binary_divergence(p, b)
    bound = torch.tensor([1e-4, 1e-6, 1e-4]) * math.log(1e-4 / 2**-24)
    assert (far <= bound).all() and far[0] > 0 and far[1] >= 0
    coarse = p.bfloat16(), b.bfloat16()
    assert torch.equal(binary_divergence(*coarse), binary_divergence(*(x.float() for x in coarse)))
    ones = torch.ones(1, 3)
    assert binary_divergence_mask(p[None], b[None], ones, ones.bool(), most=0.05).kept.all()


def removed(p, b, advantages, mask, most, divergence):
    """A loop over tokens: far from the behaviour, and pushed farther."""
    out = torch.zeros_like(mask)
    for i, t in mask.nonzero().tolist():
        x, y, a = math.exp(p[i, t]), math.exp(b[i, t]), float(advantages[i, t])
        apart = abs(x - y) if divergence == "total_variation" else rel_entr(y, x) + rel_entr(1 - y, 1 - x)
        out[i, t] = bool(apart > most and a * (x - y) > 0)
    return out


@pytest.mark.parametrize("divergence", ["kl", "total_variation"])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_only_tokens_outside_the_region_that_move_further_out_are_removed(divergence, per_sequence):
    generator = torch.Generator().manual_seed(3)
    p, b = -torch.rand(2, 30, 5, generator=generator, dtype=torch.float64) * 3 - 0.01
    mask = torch.rand(30, 5, generator=generator) < 0.7
    advantages = torch.randn(30, generator=generator)
    advantages[0] = 0.0
    each = advantages[:, None].expand(30, 5)
    if not per_sequence:
        advantages = each = torch.randn(30, 5, generator=generator)
    hidden = [x.where(mask, NAN) for x in (p, b)]
    region = binary_divergence_mask(*hidden, advantages, mask, most=0.08, divergence=divergence)
    gone = removed(p, b, each, mask, 0.08, divergence)
    assert torch.equal(region.kept, mask & ~gone) and torch.equal(region.weights, region.kept.float())
    assert region.removed_share.item() == pytest.approx(gone.sum().item() / mask.sum().item())
    assert 0.05 < region.removed_share < 0.6 and region.effective_sample_size == region.kept.sum()
    either_way = binary_divergence_mask(*hidden, None, mask, most=0.08, divergence=divergence)
    far = removed(p, b, (p - b).sign(), mask, 0.08, divergence)
    assert torch.equal(either_way.kept, mask & ~far) and (far & ~gone).any()


def test_nan_divergences_are_removed_and_nan_advantages_are_not():
    p, b = torch.tensor([[NAN, -1.0, -0.1, -1.0]]), torch.tensor([[-1.0, NAN, -3.0, -1.0]])
    advantages = torch.tensor([[1.0, -1.0, NAN, 1.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    region = binary_divergence_mask(p, b, advantages, mask, most=0.1)
    assert region.kept.tolist() == [[False, False, True, True]] and region.removed_share == 0.5
    assert (region.weights * advantages).isnan().tolist() == [[False, False, True, False]]


def test_drifted_sequences_with_negative_advantages_are_removed():
    """Mean of log behaviour - log policy: .3, .3, .3 and .1 nats; only the second is bad and far."""
    p = torch.tensor([[-0.4, -0.9, NAN], [-0.4, -0.9, NAN], [-0.4, -0.9, NAN], [-0.4, -0.5, -0.6]])
    b = torch.tensor([[-0.1, -0.6, 0.0], [-0.1, -0.6, 0.0], [-0.1, -0.6, 0.0], [-0.3, -0.4, -0.5]])
    mask = torch.tensor([[1, 1, 0]] * 3 + [[1, 1, 1]])
    advantages = torch.tensor([1.0, -1.0, 0.0, -1.0])
    region = off_policy_sequence_mask(p, b, advantages, mask, most=0.2)
    assert region.removed_share == 0.25 and region.effective_sample_size == 3
    assert torch.equal(region.kept, mask.bool() & torch.tensor([[True], [False], [True], [True]]))
    gained = off_policy_sequence_mask(b, p.where(mask.bool(), 0.0), advantages, mask, most=0.2)
    assert gained.kept.any(-1).all(), "only what became less likely counts as drift"
    per_token = torch.tensor([[0.0, -1, NAN]] * 4)
    tokens = off_policy_sequence_mask(p, b, per_token, mask, most=0.2)
    assert tokens.kept.tolist() == [[True, False, False]] * 3 + [[True, True, True]]
    assert tokens.removed_share.item() == pytest.approx(3 / 9)


def test_a_sequence_with_nan_is_removed_if_its_advantage_is_negative():
    p = torch.tensor([[-1.0, NAN], [-1.0, NAN], [-1.0, -INF]])
    b = torch.full((3, 2), -1.0)
    mask = torch.ones(3, 2, dtype=torch.bool)
    region = off_policy_sequence_mask(p, b, torch.tensor([-1.0, 1.0, -1.0]), mask, most=0.5)
    assert region.kept.any(-1).tolist() == [False, True, False]
    scored = off_policy_sequence_mask(p, b, torch.full((3,), -1.0), mask & ~p.isnan(), most=0.5)
    assert scored.kept.any(-1).tolist() == [True, True, False]


def test_invalid_divergence_mask_arguments_are_errors(unhooked):
    p, mask, advantages = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2)
    for most in (-0.1, NAN):
        with pytest.raises(OptionError, match="at least 0"):
            binary_divergence_mask(p, p, advantages, mask, most=most)
        with pytest.raises(OptionError, match="at least 0"):
            off_policy_sequence_mask(p, p, advantages, mask, most=most)
    with pytest.raises(OptionError, match="kl, total_variation"):
        binary_divergence_mask(p, p, advantages, mask, most=0.1, divergence="tv")
    with pytest.raises(ShapeError, match="advantages"):
        off_policy_sequence_mask(p, p, torch.zeros(3), mask, most=0.1)
    with pytest.raises(ShapeError, match=r"\[batch, time\]"):
        off_policy_sequence_mask(p[0], p[0], advantages, mask[0], most=0.1)
