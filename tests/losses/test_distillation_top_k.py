"""Distillation from a teacher's top k: against the coarser distributions written out."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr

from kleash.errors import DetachedError
from kleash.losses import distillation_loss, top_k_distillation_loss

K, VOCAB, TEMPERATURE = 3, 8, 1.6
MASK = torch.tensor([[True, True], [True, False]])
ALL = torch.ones(2, 2, dtype=torch.bool)


@pytest.fixture
def pair():
    torch.manual_seed(0)
    teacher, student = 2 * torch.randn(2, 2, 2, VOCAB, dtype=torch.float64)
    return teacher, student.requires_grad_()


def head(teacher, k=K):
    top = (teacher / TEMPERATURE).log_softmax(-1).topk(k)
    return top.indices, top.values


def coarse(logits, ids):
    """The probabilities of the listed tokens, and one number for the rest."""
    probs = np.exp(log_softmax(logits.detach().numpy() / TEMPERATURE, axis=-1))
    listed = np.take_along_axis(probs, ids.numpy(), -1)
    return np.concatenate([listed, 1 - listed.sum(-1, keepdims=True)], -1)


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jensen_shannon"])
def test_all_other_tokens_are_one_bucket(pair, name):
    teacher, student = pair
    ids, logp = head(teacher)
    p, q = coarse(teacher, ids), coarse(student, ids)
    middle = (p + q) / 2
    expected = {
        "kl": rel_entr(p, q),
        "reverse_kl": rel_entr(q, p),
        "jensen_shannon": (rel_entr(p, middle) + rel_entr(q, middle)) / 2,
    }[name].sum(-1)
    got = top_k_distillation_loss(ids, logp, student, ALL, divergence=name, temperature=TEMPERATURE)
    assert got.detach().numpy() == pytest.approx(expected, rel=1e-9)
    whole = distillation_loss(teacher, student, ALL, divergence=name, temperature=TEMPERATURE)
    assert (got < whole).all()


@pytest.mark.parametrize(
    "drawn", [None, (torch.where(MASK, 0, -1), torch.where(MASK, -1.0, torch.nan).double())]
)
def test_masked_values_are_not_read(pair, drawn):
    teacher, student = pair
    ids, logp = head(teacher)
    every = drawn and (drawn[0].clamp(min=0), torch.full_like(drawn[1], -1.0))
    clean = top_k_distillation_loss(ids, logp, student, ALL, temperature=TEMPERATURE, drawn=every)
    read = MASK.unsqueeze(-1)
    dirty = torch.where(read, student, torch.nan).detach().requires_grad_()
    given = torch.where(read, ids, -1), torch.where(read, logp, torch.nan).requires_grad_()
    got = top_k_distillation_loss(*given, dirty, MASK.int(), temperature=TEMPERATURE, drawn=drawn)
    assert torch.equal(got, torch.where(MASK, clean, 0.0))
    for slope in torch.autograd.grad(got.sum(), (dirty, given[1])):
        assert slope.isfinite().all() and (slope[~MASK] == 0).all() and slope[MASK].abs().sum() > 0
    with pytest.raises(DetachedError, match="carries no gradient"):
        top_k_distillation_loss(ids, logp, student.detach(), ALL)


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jensen_shannon"])
def test_rest_of_drawn_tokens_is_unbiased(pair, name):
    """The mean over all tokens that the teacher may draw is the whole divergence, with its gradient."""
    teacher, student = pair
    ids, logp = head(teacher)
    log_teacher = (teacher / TEMPERATURE).log_softmax(-1)
    mean = torch.zeros(2, 2, dtype=torch.float64)
    for token in range(VOCAB):
        drawn = torch.full((2, 2), token), log_teacher[..., token]
        loss = top_k_distillation_loss(
            ids, logp, student, ALL, divergence=name, temperature=TEMPERATURE, drawn=drawn
        )
        mean = mean + log_teacher[..., token].exp() * loss
    whole = distillation_loss(teacher, student, ALL, divergence=name, temperature=TEMPERATURE)
    torch.testing.assert_close(mean, whole, rtol=1e-9, atol=1e-12)
    found, exact = (torch.autograd.grad(x.sum(), student, retain_graph=True)[0] for x in (mean, whole))
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)
