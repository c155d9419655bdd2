import itertools
import math

import pytest
import torch
from distributions import gradients, log, pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from textbook import textbook

from kleash.divergences import DIVERGENCES, divergence, kl
from kleash.errors import DetachedError, OptionError, ShapeError, UnknownNameError
from kleash.losses import (
    Drawn,
    TopK,
    sampled_tail_loss,
    tail_bucket_loss,
    top_k_distillation_loss,
    top_k_from,
    top_k_of,
)

NAMES = list(DIVERGENCES)
MEANS = [name for name in NAMES if name != "hellinger"]
INF, NAN = float("inf"), float("nan")

torch.manual_seed(3)
LOGITS_P, LOGITS_Q, LOGITS_MU = torch.randn(3, 8, dtype=torch.float64)
EVERY = torch.arange(8)
ONE = torch.ones(1, dtype=torch.bool)
CHOICES = {"p": LOGITS_P.topk(3).indices, "q": LOGITS_Q.topk(3).indices, "any": torch.tensor([6, 0, 3])}


def exactly(name, logits_p=LOGITS_P, logits_q=LOGITS_Q):
    """Gradients of the divergence itself, in both sides' logits."""
    return gradients(lambda logp, logq: divergence(name, logp, logq), logits_p, logits_q)


def expected(loss, drawn_from):
    """Of a function of every token of the vocabulary: its mean, as a finite sum."""
    return lambda logp, logq: (drawn_from.softmax(-1) * loss(logp, logq)).sum()


def every_draw(name, ids, weights=None):
    """``sampled_tail_loss`` once for each token that could have been drawn."""

    def loss(logp, logq):
        p, q = (top_k_of(x.expand(8, 8), ids.expand(8, 3)) for x in (logp, logq))
        drawn = Drawn(EVERY, logp, logq)
        mask = torch.ones(8, dtype=torch.bool)
        return sampled_tail_loss(p, q, drawn, mask, weights=weights, divergence=name)

    return loss


@pytest.mark.parametrize(("choice", "mu"), [*((name, None) for name in CHOICES), ("p", LOGITS_MU)])
@pytest.mark.parametrize("name", MEANS)
def test_a_sampled_tail_is_unbiased_in_value_and_gradients(name, choice, mu):
    weights = None if mu is None else (LOGITS_P.log_softmax(-1) - mu.log_softmax(-1)).exp()
    loss = expected(every_draw(name, CHOICES[choice], weights), LOGITS_P if mu is None else mu)
    value = loss(LOGITS_P.log_softmax(-1).requires_grad_(), LOGITS_Q.log_softmax(-1))
    assert value.item() == pytest.approx(textbook(name, LOGITS_P, LOGITS_Q), rel=1e-12)
    for got, exact in zip(gradients(loss, LOGITS_P, LOGITS_Q), exactly(name), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-13)
    if mu is not None:
        assert error(expected(every_draw(name, CHOICES["p"]), mu), name) > 0.05


def error(loss, name="kl"):
    """How far the gradient in p's logits is off, relative to its size."""
    got, exact = gradients(loss, LOGITS_P, LOGITS_Q)[0], exactly(name)[0]
    return ((got - exact).norm() / exact.norm()).item()


@settings(max_examples=60)
@given(pair=pairs(spread=20.0), name=st.sampled_from(NAMES), k=st.integers(1, 12))
def test_the_tail_bucket_is_the_divergence_of_merged_tokens(pair, name, k):
    logp, logq = pair
    order = logp.argsort(descending=True)
    head, rest = order[:k], order[k:]
    with torch.no_grad():
        lists = [top_k_of(x.unsqueeze(0), head.unsqueeze(0)) for x in pair]
        got = tail_bucket_loss(*lists, ONE, divergence=name).item()
    coarse = [torch.cat([x[head], x[rest].logsumexp(-1, keepdim=True)]) for x in pair] if len(rest) else pair
    near = pytest.approx(textbook(name, *coarse), rel=1e-9, abs=1e-8 if name == "hellinger" else 1e-13)
    assert got == near
    assert got <= textbook(name, logp, logq) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_the_tail_buckets_gradient_is_that_of_merged_tokens(name):
    ids = CHOICES["any"]
    others = [x for x in range(8) if x not in ids.tolist()]

    def bucket(logp, logq):
        return tail_bucket_loss(*(top_k_of(x[None], ids[None]) for x in (logp, logq)), ONE, divergence=name)

    def coarse(logp, logq):
        p, q = (torch.cat([x.exp()[ids], x.exp()[others].sum(-1, keepdim=True)]).log() for x in (logp, logq))
        return divergence(name, p, q)

    found, exact = (gradients(f, LOGITS_P, LOGITS_Q) for f in (bucket, coarse))
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-13)


def test_a_list_from_an_engine_has_one_minus_its_mass_as_rest():
    logq = log(0.6, 0.3, 0.07, 0.03)
    got = top_k_from(torch.tensor([[0, 1]]), logq[None, :2])
    assert got.log_rest.exp().item() == pytest.approx(0.1, rel=1e-6)
    confident = log(1 - 1e-9, 1e-9)[None].float()
    rest = top_k_from(torch.tensor([[0]]), confident[:, :1]).log_rest.exp()
    assert 1e-9 < rest.item() < 1e-5, "hidden by rounding, and no zero"
    p = top_k_of(log(0.9, 0.1)[None].requires_grad_(), torch.tensor([[0]]))
    bound = tail_bucket_loss(p, TopK(p.ids, confident[:, :1].double(), rest.log().double()), ONE)
    assert 0.5 < bound.item() < kl(log(0.9, 0.1), log(1 - 1e-9, 1e-9)).item()
    student = top_k_of(log(1 - 1e-15, 1e-15)[None].requires_grad_(), torch.tensor([[0]]))
    listed = top_k_from(torch.tensor([[0]]), confident[:, :1])
    bounds = [tail_bucket_loss(listed, student, ONE, divergence=name) for name in NAMES]
    assert max(bounds) < 1e-6, "no more than the divergence"
    assert top_k_from(torch.tensor([[0, 1]]), log(0.7, 0.31)[None]).log_rest.isnan().all()
    ids = torch.tensor([[1, 0, 1], [-1, 0, -1]])  # a sampled token that the engine appended; padding
    listed = top_k_from(ids, log(0, 0.5, 0).expand(2, 3)).logp
    assert listed.isnan().tolist() == [[True] * 3, [False] * 3]
    assert top_k_of(logq, ids[0]).logp.isnan().all() and top_k_of(logq, ids[0, :0]).log_rest.abs() < 1e-6
    # as long as the vocabulary and not complete; nothing but padding; in 16 bits
    few = top_k_of(logq.expand(2, 4), torch.tensor([[2, 0, -1, -1], [-1] * 4], dtype=torch.int16))
    found = torch.cat([few.logp, few.log_rest[:, None]], -1).exp()
    torch.testing.assert_close(found, torch.tensor([[0.07, 0.6, 0, 0, 0.33], [0, 0, 0, 0, 1]]).double())
    assert not few.is_complete


def test_invalid_top_k_loss_arguments_are_errors(unhooked):
    p = top_k_of(LOGITS_P.log_softmax(-1)[None].requires_grad_(), CHOICES["p"][None])
    q = top_k_of(LOGITS_Q.log_softmax(-1)[None], CHOICES["p"][None])
    drawn = Drawn(torch.tensor([1]), torch.tensor([-1.0]), torch.tensor([-2.0]))
    other_order = q._replace(ids=q.ids.flip(-1))
    assert tail_bucket_loss(p, other_order, ONE).isnan()
    assert sampled_tail_loss(p, other_order, drawn, ONE).isnan()
    with pytest.raises(OptionError, match="'hellinger' is the root of a mean"):
        sampled_tail_loss(p, q, drawn, ONE, divergence="hellinger")
    with pytest.raises(UnknownNameError, match="no divergence is called 'k1'"):
        tail_bucket_loss(p, q, ONE, divergence="k1")
    with pytest.raises(ShapeError, match=r"q.ids \(1, 2\)"):
        tail_bucket_loss(p, q._replace(ids=q.ids[:, :2]), ONE)
    with pytest.raises(DetachedError, match="would not train it"):
        tail_bucket_loss(q, q, ONE)
    with pytest.raises(DetachedError, match="weights carry a gradient"):
        sampled_tail_loss(p, q, drawn, ONE, weights=torch.ones(1, requires_grad=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_row_has_no_gradient(name, poison):
    """Of either side, and the other rows keep the gradient that they have alone."""
    torch.manual_seed(1)
    clean, other = torch.randn(2, 3, 7, dtype=torch.float64).log_softmax(-1)
    ids, mask = other.topk(3).indices, torch.tensor([1, 0, 1])
    poisoned = clean.clone()
    poisoned[1] = poison
    drawn = torch.tensor([5, 6, 0])
    losses = [tail_bucket_loss] if name == "hellinger" else [tail_bucket_loss, sampled_tail_loss]
    for loss, is_first in itertools.product(losses, (True, False)):
        found = []
        for rows in (clean, poisoned):
            leaf = rows.clone().requires_grad_()
            pair = (leaf, other) if is_first else (other, leaf)
            lists = [top_k_of(x, ids) for x in pair]
            if loss is sampled_tail_loss:
                lists.append(Drawn(drawn, *(x.gather(-1, drawn[:, None])[:, 0] for x in pair)))
            weights = torch.tensor([0.5, poison, 2.0], dtype=torch.float64)
            more = {"weights": weights} if loss is sampled_tail_loss else {}
            value = loss(*lists, mask, divergence=name, **more)
            found.append((value, *torch.autograd.grad(value.sum(), leaf)))
        for one, same in zip(*found, strict=True):
            torch.testing.assert_close(one, same, rtol=0, atol=0)
        assert (found[1][0][1] == 0) and (found[1][1][1] == 0).all() and found[1][1][0].any()


@pytest.mark.parametrize("name", NAMES)
def test_rest_of_probability_0_has_the_gradient_of_the_list(name):
    """A side with -inf at all unlisted tokens: what it lists is its whole distribution."""
    torch.manual_seed(2)
    other = torch.randn(1, 7, dtype=torch.float64).log_softmax(-1)
    ids = torch.tensor([[4, 0, 2]])
    listed = torch.randn(1, 3, dtype=torch.float64).log_softmax(-1)
    merged = torch.cat([other.gather(-1, ids), top_k_of(other, ids).log_rest[:, None]], -1)
    for is_first in (True, False):
        leaf = torch.full((1, 7), -math.inf, dtype=torch.float64).scatter(-1, ids, listed).requires_grad_()
        pair = [top_k_of(x, ids) for x in ((leaf, other) if is_first else (other, leaf))]
        value = tail_bucket_loss(*pair, ONE, divergence=name)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        alone = torch.cat([listed, torch.full((1, 1), -math.inf)], -1).requires_grad_()
        expected = divergence(name, *((alone, merged) if is_first else (merged, alone)))
        torch.testing.assert_close(value, expected)
        (expected_gradient,) = torch.autograd.grad(expected.sum(), alone)
        assert not gradient.scatter(-1, ids, 0.0).any()
        torch.testing.assert_close(gradient.gather(-1, ids), expected_gradient[:, :3])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_complete_list_has_the_whole_divergence(name, dtype):
    torch.manual_seed(3)
    teacher = torch.randn(4, 7).log_softmax(-1).to(dtype)
    logits = (teacher.double() + 0.1 * torch.randn(4, 7)).requires_grad_()
    ids, mask = teacher.topk(7).indices, torch.ones(4, dtype=torch.bool)
    expected = divergence(name, teacher.double(), logits.log_softmax(-1))
    (expected_gradient,) = torch.autograd.grad(expected.sum(), logits, retain_graph=True)
    listed = teacher.gather(-1, ids)
    lists = top_k_from(ids, listed), top_k_of(logits.log_softmax(-1), ids)
    bucket = tail_bucket_loss(*lists, mask, divergence=name)
    for found in (bucket, top_k_distillation_loss(ids, listed, logits, mask, divergence=name)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        (gradient,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-9)
