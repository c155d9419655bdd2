"""The mixture of sampled and exact sums: unbiased in value and gradient, and never much noisier than either."""

from itertools import product

import pytest
import torch
from every_response import World, error, gradient

from kleash.divergences import kl
from kleash.errors import DetachedError
from kleash.estimators import importance_weights
from kleash.losses import controlled_kl_loss, future_kl_loss, kl_loss

SMALL = World(vocab=2, steps=2, seed=1)


@pytest.mark.parametrize("level", [None, "prefix"])
def test_neither_value_nor_gradient_is_biased_by_fitting(level):
    """Over all 256 batches of four of the four responses."""
    p, q, mu = SMALL.tables
    p.requires_grad_()
    drawn = SMALL.probability(p if level is None else mu).detach()
    logp, logq = SMALL.token_logp(p), SMALL.token_logp(q)
    token_kl, mask = kl(SMALL.next_logp(p), SMALL.next_logp(q)), SMALL.mask
    if level is not None:
        ratios = importance_weights(logp, SMALL.token_logp(mu), mask, level=level).values
    value, weights = 0.0, []
    for batch in map(list, product(range(4), repeat=4)):
        ratio = None if level is None else ratios[batch]
        loss = controlled_kl_loss(logp[batch], logq[batch], token_kl[batch], mask[batch], weights=ratio)
        value = value + drawn[batch].prod() * loss.per_sequence.mean()
        weights.append(loss.weight)
    torch.testing.assert_close(value, SMALL.sequence_kl(p))
    assert error(torch.autograd.grad(value, p)[0], gradient(SMALL.sequence_kl, p)) < 1e-12
    assert torch.stack(weights).std() > 0.1, "the weights must have been fitted for this to say anything"


def test_weights_are_fitted_to_the_other_sequences():
    """Each a is the regression on the other sequences, as written down."""
    torch.manual_seed(0)
    logp, logq = -torch.rand(2, 6, 4, dtype=torch.float64)
    exact, mask = torch.rand(6, 4, dtype=torch.float64), torch.rand(6, 4) < 0.8
    mask[2] = False
    loss = controlled_kl_loss(logp.requires_grad_(), logq, exact, mask)
    u = torch.where(mask, logp.detach() - logq, 0.0).sum(-1)
    c = torch.where(mask, exact, 0.0).sum(-1)
    torch.testing.assert_close((loss.sampled, loss.exact), (u, c))
    assert not any(x.requires_grad for x in loss[1:])
    for i in range(6):
        others = [j for j in range(6) if j not in (i, 2)]
        both = torch.stack([u[others], (u - c)[others]])
        covariance = both.cov()
        expected = 1.0 if i == 2 else (covariance[0, 1] / covariance[1, 1]).item()
        assert loss.weight[i].item() == pytest.approx(expected)
    torch.testing.assert_close(loss.per_sequence.detach(), u - loss.weight * (u - c))
    assert loss.per_sequence[2] == 0


def test_the_gradient_is_combined_with_the_same_weight():
    torch.manual_seed(1)
    logp, logq = -torch.rand(2, 5, 3, dtype=torch.float64)
    logits = torch.randn(5, 3, 4, dtype=torch.float64)
    mask = torch.ones(5, 3, dtype=torch.bool)
    other = torch.randn(5, 3, 4, dtype=torch.float64).log_softmax(-1)

    def gradients(make):
        leaves = logp.clone().requires_grad_(), logits.clone().requires_grad_()
        loss = make(leaves[0], kl(leaves[1].log_softmax(-1), other))
        return torch.autograd.grad(loss, leaves, allow_unused=True)

    exact = kl(logits.log_softmax(-1), other)
    a = controlled_kl_loss(logp.requires_grad_(), logq, exact, mask).weight.unsqueeze(-1)
    u = (logp - logq).detach()

    def by_hand(x, d):
        sampled = kl_loss(x, logq, mask) + future_kl_loss(x, u, mask)
        return ((1 - a) * sampled + a * (d + future_kl_loss(x, d, mask))).sum()

    got = gradients(lambda x, d: controlled_kl_loss(x, logq, d, mask).per_sequence.sum())
    torch.testing.assert_close(got, gradients(by_hand))


def test_a_pair_whose_exact_sum_has_the_larger_variance():
    """2000 responses in exact proportion: 500, 500, 10 and 990 of 00, 01, 10 and 11."""
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.01, 0.99]], dtype=torch.float64).log()
    q = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.99, 0.01]], dtype=torch.float64).log()
    tokens = torch.tensor([[0, 0]] * 500 + [[0, 1]] * 500 + [[1, 0]] * 10 + [[1, 1]] * 990)
    rows = torch.stack([torch.zeros(2000, dtype=torch.long), 1 + tokens[:, 0]], 1)
    token_logp = p[rows].gather(-1, tokens.unsqueeze(-1)).squeeze(-1).requires_grad_()
    token_logq = q[rows].gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    every = torch.ones(2000, 2, dtype=torch.bool)
    loss = controlled_kl_loss(token_logp, token_logq, kl(p[rows], q[rows]), every)
    assert loss.sampled.mean().item() == pytest.approx(2.395450, abs=1e-6)
    assert loss.exact.mean().item() == pytest.approx(2.395450, abs=1e-6)
    assert loss.sampled.var(correction=0).item() == pytest.approx(3.31591, abs=1e-5)
    assert loss.exact.var(correction=0).item() == pytest.approx(5.06974, abs=1e-5)
    assert loss.weight.median().item() == pytest.approx(-0.718, abs=0.01)
    best = loss.sampled + 0.718 * (loss.sampled - loss.exact)
    assert best.var(correction=0).item() == pytest.approx(2.94458, abs=1e-4)
    assert loss.per_sequence.var(correction=0).item() == pytest.approx(2.94458, rel=0.1)


def test_the_weight_is_one_if_it_cannot_be_fitted():
    logp = torch.tensor([[-1.0], [-2.0], [-0.5], [-3.0], [-1.1]])
    logq = torch.tensor([[-2.0], [-1.0], [-0.1], [-2.5], [-1.0]])
    exact, mask = torch.tensor([[0.1], [0.2], [0.3], [0.4], [0.7]]), torch.ones(5, 1, dtype=torch.bool)
    few = controlled_kl_loss(logp[:3].requires_grad_(), logq[:3], exact[:3], mask[:3])
    assert (few.weight == 1).all()
    torch.testing.assert_close(few.per_sequence.detach(), exact[:3, 0])
    same = controlled_kl_loss(logp.requires_grad_(), logp.detach(), torch.zeros(5, 1), mask)
    assert (same.weight == 1).all() and (same.per_sequence == 0).all()
    sums = torch.tensor([[7.0], *[[-2.24]] * 31], requires_grad=True)  # a rounded mean is no member's number
    equal = controlled_kl_loss(sums, torch.zeros(32, 1), torch.full((32, 1), 3.4333), sums < 9)
    assert equal.weight[0] == 1
    ruled_out = logq.clone()
    ruled_out[1], exact[1] = -torch.inf, torch.inf
    loss = controlled_kl_loss(logp.detach().requires_grad_(), ruled_out, exact, mask)
    assert loss.per_sequence[1] == torch.inf and loss.weight[1] == 1
    assert loss.per_sequence[[0, 2, 3, 4]].isfinite().all() and (loss.weight[[0, 2, 3, 4]] != 1).all()
    leaf = logp.detach().requires_grad_()
    exact[1] = 0.2
    loss = controlled_kl_loss(leaf, ruled_out, exact, mask)
    (slope,) = torch.autograd.grad(loss.per_sequence.sum(), leaf)
    assert slope.isfinite().all() and (loss.weight[[0, 2, 3, 4]] != 1).all()


def test_masked_values_are_not_read():
    junk = torch.tensor([[-1.0, torch.nan], [-2.0, torch.inf], [-0.5, -torch.inf], [-0.7, torch.nan]])
    mask = torch.tensor([[1, 0]] * 4)
    clean = torch.where(mask.bool(), junk, -1.0)
    weights = torch.where(mask.bool(), torch.tensor([[2.0]]), torch.nan)
    logq = torch.tensor([[-1.5, 0.0]] * 4)
    got, expected = (
        controlled_kl_loss(x.requires_grad_(), logq, x.detach().square(), mask, weights=w)
        for x, w in ((junk, weights), (clean, torch.full((4, 2), 2.0)))
    )
    torch.testing.assert_close(got.per_sequence, expected.per_sequence)
    (slope,) = torch.autograd.grad(got.per_sequence.sum(), junk)
    assert slope.isfinite().all() and (slope[:, 1] == 0).all()
    with pytest.raises(DetachedError):
        controlled_kl_loss(logq, logq, logq, mask)
