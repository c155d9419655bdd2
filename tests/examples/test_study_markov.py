"""Case (c) against the enumeration of every sequence."""

import pytest
import torch
from estimator_study import markov
from markov_models import drift_moments, random_markov

from kleash.auditing.toy_distributions import every_sequence

VOCAB, STEPS, APART = 3, 4, 0.8
FUNCTIONS = {
    "k1": lambda u: u,
    "abs": torch.abs,
    "k2": lambda u: u * u / 2,
    "k3": lambda u: torch.exp(-u) - 1 + u,
}


@pytest.fixture(scope="module")
def case():
    return markov.markov_case(APART, vocab_size=VOCAB, steps=STEPS)


class Enumerated:
    """All sequences, from logits that collect gradients, a token at a time."""

    def __init__(self):
        p = random_markov(VOCAB, seed=0)
        q = p.moved(1, APART)
        self.tokens = every_sequence(VOCAB, STEPS)
        self.logits = torch.cat([p.first.unsqueeze(0), p.then]).clone().requires_grad_()
        whole = self.logits.log_softmax(-1)
        other = torch.cat([q.first.unsqueeze(0), q.then])
        first = torch.zeros(len(self.tokens), 1, dtype=torch.int64)
        place = torch.cat([first, self.tokens[:, :-1] + 1], dim=1)
        self.token_logp = whole[place, self.tokens]
        self.u = self.token_logp - other[place, self.tokens]
        self.exact = (whole.exp() * (whole - other)).sum(-1)[place]
        self.probs = self.token_logp.sum(-1).exp()

    def gradient(self, value):
        return torch.autograd.grad(value, self.logits, retain_graph=True)[0]

    def error(self, sums):
        """Of the expectation of what each drawn sequence would backpropagate."""
        wanted = self.gradient((self.probs * self.u.sum(-1)).sum())
        found = self.gradient((self.probs.detach() * sums).sum())
        return ((found - wanted).norm() / wanted.norm()).item()


@pytest.fixture(scope="module")
def all_of_them():
    return Enumerated()


def check(row, sums, world, error):
    probs, values = world.probs.detach(), sums.detach()
    mean = (probs * values).sum().item()
    kl = (probs * world.u.detach().sum(-1)).sum().item()
    assert row.value == pytest.approx(mean, rel=1e-10)
    assert row.bias == pytest.approx(mean - kl, abs=1e-10)
    spread = (probs * (values - mean).square()).sum().sqrt().item()
    assert row.standard_deviation == pytest.approx(spread, rel=1e-7)
    share = (probs * (values < 0)).sum().item()
    assert abs(row.negative_share - share) <= 4 * (share * (1 - share) / markov.SEQUENCES) ** 0.5
    assert row.gradient_error == pytest.approx(error, rel=1e-7, abs=1e-10)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sums_of_one_token_estimates(case, all_of_them, name):
    sums = FUNCTIONS[name](all_of_them.u).sum(-1)
    check(case.row(name), sums, all_of_them, all_of_them.error(sums))
    assert case.kl == pytest.approx(case.row("exact").value)


def test_exact_terms_and_what_the_future_adds(case, all_of_them):
    world, sums = all_of_them, all_of_them.exact.sum(-1)
    check(case.row("exact"), sums, world, world.error(sums))
    assert case.row("exact").gradient_error > 0.05
    later = (sums.unsqueeze(-1) - world.exact.cumsum(-1)).detach()
    credited = sums + (world.token_logp * later).sum(-1)
    error = world.error(credited)
    assert error < 1e-12
    check(case.row("exact, future credited"), sums, world, error)


def test_the_mixture_is_the_best_one(case, all_of_them):
    world = all_of_them
    p = random_markov(VOCAB, seed=0)
    moments = drift_moments(p, p.moved(1, APART), STEPS)
    a = moments.control_weight
    sums = (1 - a) * world.u.sum(-1) + a * world.exact.sum(-1)
    check(case.row("k1 − a(k1 − exact)"), sums, world, world.error(sums))
    assert f"mixture a = {a:.3f}" in case.notes[0]
    spreads = [case.row(name).standard_deviation for name in ("k1", "exact", "k1 − a(k1 − exact)")]
    assert spreads[2] < min(spreads[:2])


def test_value_of_k3_with_the_gradient_of_k2(case):
    both = case.row("kl_loss")
    k3 = case.row("k3")
    assert both.value == pytest.approx(k3.value) and both.negative_share == k3.negative_share
    assert both.standard_deviation == pytest.approx(k3.standard_deviation)
    assert both.gradient_error == pytest.approx(case.row("k2").gradient_error)


@pytest.mark.parametrize("apart", markov.LOGIT_NOISE)
def test_the_documented_size_agrees_with_the_other_recursion(apart):
    p = random_markov(markov.VOCAB_SIZE, seed=0)
    q = p.moved(1, apart)
    world = markov.markov_pair(p, q, markov.STEPS)
    moments = drift_moments(p, q, markov.STEPS)
    terms = markov.estimator_terms(world)
    found = markov.moments_of_sums(p, terms.values[:, 0], terms.values[:, 1:], markov.STEPS)
    k1, exact = terms.names.index("k1"), terms.names.index("exact")
    assert markov.sequence_kl(world, markov.STEPS).item() == pytest.approx(moments.kl, rel=1e-11)
    assert found.mean[k1].item() == pytest.approx(moments.kl, rel=1e-9)
    assert found.covariance[k1, k1].item() == pytest.approx(moments.variance_sampled, rel=1e-9)
    assert found.covariance[exact, exact].item() == pytest.approx(moments.variance_summed, rel=1e-7)
    assert found.covariance[k1, exact].item() == pytest.approx(moments.covariance, rel=1e-5)
