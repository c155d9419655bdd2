import math

import pytest
import torch
from markov_models import drift_moments, random_markov

from kleash.auditing.toy_distributions import every_sequence
from kleash.divergences import kl
from kleash.errors import OptionError
from kleash.estimators import importance_weights, sampled_kl

STEPS = 3
P = random_markov(3, seed=0)
Q, BEHAVIOUR = P.moved(1, apart=0.9), P.moved(2, apart=0.7)
TOKENS = every_sequence(3, STEPS)
ALL = torch.ones(TOKENS.shape, dtype=torch.bool)
DRAWN = BEHAVIOUR.token_logp(TOKENS).sum(-1).exp()


def weighted_estimate(level, name):
    """E_behaviour sum_t w_t estimator_t, enumerated over all sequences."""
    token_logp = P.token_logp(TOKENS)
    weights = importance_weights(token_logp, BEHAVIOUR.token_logp(TOKENS), ALL, level=level).values
    return (DRAWN * (weights * sampled_kl(token_logp, Q.token_logp(TOKENS), name)).sum(-1)).sum().item()


def kl_along_behaviour_prefixes():
    exact = kl(P.next_logp(TOKENS), Q.next_logp(TOKENS)).sum(-1)
    return (DRAWN * exact).sum().item()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_weighted_sums_at_each_level_agree_with_enumeration(name):
    between_responses = drift_moments(P, Q, STEPS).kl
    assert weighted_estimate("token", name) == pytest.approx(kl_along_behaviour_prefixes())
    assert weighted_estimate("prefix", name) == pytest.approx(between_responses)
    assert weighted_estimate("sequence", name) == pytest.approx(between_responses)
    assert kl_along_behaviour_prefixes() != pytest.approx(between_responses, rel=0.01)


def test_weights_agree_with_hand_calculation():
    token_logp = torch.tensor([[0.5, 0.2, 0.9]]).log()
    behaviour_logp = torch.tensor([[0.25, 0.4, 0.3]]).log()
    pair_and_mask = (token_logp, behaviour_logp, torch.ones(1, 3, dtype=torch.bool))
    products = {"token": [2, 0.5, 3], "before": [1, 2, 1], "prefix": [2, 1, 3], "sequence": [3, 3, 3]}
    for level, expected in products.items():
        got = importance_weights(*pair_and_mask, level=level)
        assert got.values[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("level", ["token", "before", "prefix", "sequence"])
def test_masked_tokens_are_ignored(level):
    """Padding may hold anything; a token masked in the middle leaves the product alone."""
    token_logp = torch.tensor([[-1.0, torch.nan, -2.0], [-1.0, -torch.inf, torch.inf]])
    behaviour_logp = torch.tensor([[-1.5, torch.inf, -1.0], [-1.2, torch.nan, -torch.inf]])
    mask = torch.tensor([[True, False, True], [True, False, False]])
    got = importance_weights(token_logp, behaviour_logp, mask, level=level)
    first, last = math.exp(0.5), math.exp(-1.0)
    expected = {
        "token": [[first, 0, last], [math.exp(0.2), 0, 0]],
        "before": [[1, 0, first], [1, 0, 0]],
        "prefix": [[first, 0, first * last], [math.exp(0.2), 0, 0]],
        "sequence": [[first * last, 0, first * last], [math.exp(0.2), 0, 0]],
    }[level]
    torch.testing.assert_close(got.values, torch.tensor(expected))
    assert got.effective_sample_size.isfinite()


def effective_sample_size(weights):
    return sum(weights) ** 2 / sum(w * w for w in weights)


def test_the_effective_sample_size_is_over_tokens_or_sequences():
    token_logp = torch.tensor([[0.5, 0.2], [0.9, 0.1], [0.3, 0.3]]).log()
    behaviour_logp = torch.tensor([[0.25, 0.4], [0.3, 0.4], [0.1, 0.1]]).log()
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    tokens = importance_weights(token_logp, behaviour_logp, mask)
    assert tokens.effective_sample_size.item() == pytest.approx(effective_sample_size([2, 0.5, 3]))
    sequences = importance_weights(token_logp, behaviour_logp, mask, level="sequence")
    assert sequences.effective_sample_size.item() == pytest.approx(effective_sample_size([1, 3]))
    prefixes = importance_weights(token_logp, behaviour_logp, mask, level="prefix")
    assert prefixes.effective_sample_size.item() == pytest.approx(effective_sample_size([2, 1, 3]))


def test_on_policy_weights_are_one():
    token_logp = torch.randn(4, 5).bfloat16()
    got = importance_weights(token_logp, token_logp, torch.ones(4, 5, dtype=torch.bool), cap=1.0)
    assert (got.values == 1).all() and got.values.dtype == torch.float32
    assert (got.effective_sample_size.item(), got.truncated_share.item()) == (20, 0)


@pytest.mark.parametrize(
    ("level", "values", "size", "share"),
    [
        ("token", [[2, 0.5, 2.5]], effective_sample_size([2, 0.5, 2.5]), 1 / 3),
        ("prefix", [[2, 1, 2.5]], effective_sample_size([2, 1, 2.5]), 1 / 3),
        ("sequence", [[2.5, 2.5, 2.5]], 1, 1),
    ],
)
def test_a_cap_applies_to_the_product(level, values, size, share):
    token_logp = torch.tensor([[0.5, 0.2, 0.9]]).log()
    behaviour_logp = torch.tensor([[0.25, 0.4, 0.3]]).log()
    mask = torch.ones(1, 3, dtype=torch.bool)
    got = importance_weights(token_logp, behaviour_logp, mask, level=level, cap=2.5)
    torch.testing.assert_close(got.values, torch.tensor(values))
    assert got.effective_sample_size.item() == pytest.approx(size)
    assert got.truncated_share.item() == pytest.approx(share)


def test_masked_tokens_do_not_count_as_truncated():
    """The product at the masked position is above the cap."""
    token_logp, behaviour_logp = torch.tensor([[0.9, 0.5, 0.1]]).log(), torch.tensor([[0.3, 0.5, 0.9]]).log()
    mask = torch.tensor([[True, False, True]])
    got = importance_weights(token_logp, behaviour_logp, mask, level="prefix", cap=2.0)
    assert got.truncated_share.item() == 0.5
    torch.testing.assert_close(got.values, torch.tensor([[2.0, 0.0, 1 / 3]]))


def test_products_that_overflow():
    token_logp, behaviour_logp = torch.zeros(3, 200), torch.tensor([[-1.0], [-1.0], [-1.1]]).expand(3, 200)
    mask = torch.ones(3, 200, dtype=torch.bool)
    free = importance_weights(token_logp, behaviour_logp, mask, level="sequence")
    assert (free.values == torch.inf).all()
    assert free.effective_sample_size.item() == pytest.approx(1, abs=1e-6)
    capped = importance_weights(token_logp, behaviour_logp, mask, level="prefix", cap=10.0)
    assert capped.values.max().item() == pytest.approx(10)
    assert capped.values.isfinite().all()


def test_zero_weights_and_empty_masks():
    one = torch.ones(1, 2, dtype=torch.bool)
    got = importance_weights(torch.tensor([[-torch.inf, -1.0]]), torch.tensor([[-1.0, -1.0]]), one)
    assert got.values.tolist() == [[0, 1]] and got.effective_sample_size == 1
    for shape in ((2, 3), (0, 3)):
        zeros = torch.zeros(shape)
        empty = importance_weights(zeros, zeros, zeros.bool())
        assert empty.effective_sample_size.isnan() and empty.truncated_share.isnan()
        assert (empty.values == 0).all()


def test_invalid_shapes_levels_and_caps_raise(unhooked):
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(OptionError, match="level is 'word'; there are token, before, prefix, sequence"):
        importance_weights(x, x, mask, level="word")
    for cap in (0.0, -1.0, math.nan):
        with pytest.raises(OptionError, match=f"cap is {cap}; give a weight above 0, or leave it out"):
            importance_weights(x, x, mask, cap=cap)
