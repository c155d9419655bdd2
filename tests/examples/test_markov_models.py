import pytest
import torch
from distributions import log
from markov_models import MarkovModel, drift_moments, random_markov

from kleash.auditing.toy_distributions import every_sequence

COUNTEREXAMPLE = (
    MarkovModel(first=log(0.5, 0.5), then=torch.stack([log(0.5, 0.5), log(0.01, 0.99)])),
    MarkovModel(first=log(0.25, 0.75), then=torch.stack([log(0.5, 0.5), log(0.99, 0.01)])),
)


def by_enumeration(p, q, steps):
    """Probability, sum of k1 and sum of exact KLs of every sequence."""
    tokens = every_sequence(len(p.first), steps)
    probs = p.token_logp(tokens).sum(-1).exp()
    sampled = (p.token_logp(tokens) - q.token_logp(tokens)).sum(-1)
    summed = (p.next_logp(tokens).exp() * (p.next_logp(tokens) - q.next_logp(tokens))).sum((-2, -1))
    return probs, sampled, summed


@pytest.mark.parametrize(("vocab", "steps"), [(2, 1), (3, 4), (5, 3)])
def test_moments_agree_with_enumeration(vocab, steps):
    p = random_markov(vocab, seed=vocab, spread=1.5)
    q = p.moved(seed=steps, apart=0.8)
    probs, sampled, summed = by_enumeration(p, q, steps)
    moments = drift_moments(p, q, steps)
    mean = (probs * sampled).sum().item()
    assert probs.sum().item() == pytest.approx(1)
    assert moments.kl == pytest.approx(mean) == pytest.approx((probs * summed).sum().item())
    assert moments.variance_sampled == pytest.approx((probs * (sampled - mean).square()).sum().item())
    variance = (probs * (summed - mean).square()).sum().item()
    assert moments.variance_summed == pytest.approx(variance, abs=1e-12)
    covariance = (probs * (sampled - mean) * (summed - mean)).sum().item()
    assert moments.covariance == pytest.approx(covariance, abs=1e-12)


def test_the_exact_sum_can_have_the_larger_variance():
    moments = drift_moments(*COUNTEREXAMPLE, 2)
    assert moments.kl == pytest.approx(2.395450, abs=5e-7)
    assert moments.variance_sampled == pytest.approx(3.31591, abs=5e-6)
    assert moments.variance_summed == pytest.approx(5.06974, abs=5e-6)
    assert moments.control_weight == pytest.approx(-0.718, abs=5e-4)
    assert moments.variance(moments.control_weight) == pytest.approx(2.94458, abs=5e-6)


def test_moments_of_a_model_against_itself_are_zero():
    p = random_markov(4, seed=5)
    moments = drift_moments(p, p, 5)
    assert tuple(moments) == (0, 0, 0, 0)
    assert moments.control_weight != moments.control_weight


@pytest.mark.parametrize(("apart", "times"), [(0.05, 19_877), (1.0, 53)])
def test_the_exact_sum_usually_has_a_much_smaller_variance(apart, times):
    """50 tokens, 30 steps: the closer the two models, the larger the gain of summing over the vocabulary."""
    p = random_markov(50, seed=0)
    moments = drift_moments(p, p.moved(1, apart), 30)
    assert round(moments.variance_sampled / moments.variance_summed) == times
