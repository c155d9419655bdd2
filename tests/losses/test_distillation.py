"""Distillation: against scipy, sixty digits, TRL and Liger."""

import warnings

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr
from textbook import textbook

from kleash.divergences import DIVERGENCES, jensen_shannon_record, kl, skew_kl_record
from kleash.errors import DetachedError, OptionError, UnknownNameError, VocabularyMismatchError
from kleash.losses import distillation_loss, gkd_record
from kleash.masking import mean_of

SHAPE = (2, 3, 7)
ALL = torch.ones(SHAPE[:2], dtype=torch.bool)


def both(seed=0, spread=2.0, dtype=torch.float64):
    torch.manual_seed(seed)
    return [(spread * torch.randn(SHAPE, dtype=dtype)).requires_grad_() for _ in range(2)]


def mixture_kls(p, q, mix):
    m = mix * p + (1 - mix) * q
    return rel_entr(p, m).sum(-1), rel_entr(q, m).sum(-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_values_agree_with_scipy(temperature):
    teacher, student = both()
    logits = [x.detach().double().numpy() / temperature for x in (teacher, student)]
    p, q = np.exp(log_softmax(logits, axis=-1))
    expected = {
        "kl": rel_entr(p, q).sum(-1),
        "reverse_kl": rel_entr(q, p).sum(-1),
        gkd_record(0.3): 0.3 * mixture_kls(p, q, 0.3)[0] + 0.7 * mixture_kls(p, q, 0.3)[1],
        jensen_shannon_record(0.3, normalised=True): (
            mixture_kls(p, q, 0.3)[0] / 0.7 + mixture_kls(p, q, 0.3)[1] / 0.3
        ),
        skew_kl_record(0.1): mixture_kls(p, q, 0.1)[0],  # DistiLLM's skew KL
        skew_kl_record(0.1).swapped: mixture_kls(p, q, 0.9)[1],  # and its skew reverse KL
    }
    for which, value in expected.items():
        got = distillation_loss(teacher, student, ALL, divergence=which, temperature=temperature)
        assert got.detach().numpy() == pytest.approx(value, rel=1e-10)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_divergence_of_the_table_averages_over_the_teacher_first(name):
    teacher, student = both(1)
    got = distillation_loss(teacher, student, ALL, divergence=name)
    assert got[1, 2].item() == pytest.approx(textbook(name, teacher[1, 2], student[1, 2]), rel=1e-9)


def test_the_square_of_the_temperature_keeps_the_size_of_the_gradient():
    """At high temperature it tends to that of half the squared distance of the centred logits, over the vocabulary."""
    teacher, student = both(4)
    centred = [x - x.mean(-1, keepdim=True) for x in (student, teacher)]
    limit = (centred[0] - centred[1]) / SHAPE[-1]
    scaled = distillation_loss(teacher, student, ALL, temperature=1e4, times_temperature_squared=True)
    (slope,) = torch.autograd.grad(scaled.sum(), student)
    torch.testing.assert_close(slope, limit, rtol=1e-3, atol=1e-4)
    plain = distillation_loss(teacher, student, ALL, temperature=3.0)
    squared = distillation_loss(teacher, student, ALL, temperature=3.0, times_temperature_squared=True)
    torch.testing.assert_close(squared, 9 * plain)
    assert plain[0, 0].item() == pytest.approx(textbook("kl", teacher[0, 0] / 3, student[0, 0] / 3), rel=1e-9)


@pytest.mark.parametrize("which", ["kl", "reverse_kl", "hellinger", gkd_record(0.5)])
def test_masked_values_are_not_read_and_have_no_gradient(which):
    teacher, student = both(5)
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]])
    counts = mask.bool()
    clean = distillation_loss(teacher, student, ALL, divergence=which)
    for junk in (torch.nan, torch.inf, -torch.inf):
        dirty = [torch.where(counts.unsqueeze(-1), x, junk).detach() for x in (teacher, student)]
        dirty = [x.requires_grad_() for x in dirty]
        got = distillation_loss(*dirty, mask, divergence=which)
        assert torch.equal(got, torch.where(counts, clean, 0.0))
        for slope in torch.autograd.grad(got.sum(), dirty):
            assert (slope[~counts] == 0).all() and slope.isfinite().all()
            assert slope[counts].abs().sum() > 0


@torch.no_grad()
def test_the_ends_of_gkd_are_not_its_limits():
    logp, logq = both(7)[0].detach().log_softmax(-1)[0, :2]
    teacher, student, mask = logp.unsqueeze(0), logq.unsqueeze(0), torch.tensor([True])

    def at(record):
        return distillation_loss(teacher, student, mask, divergence=record).item()

    assert at(gkd_record(0.0)) == pytest.approx(kl(logp, logq).item())
    assert at(gkd_record(1.0)) == pytest.approx(kl(logq, logp).item())
    assert 50 < at(gkd_record(0.0)) / at(gkd_record(0.01)) < 200
    assert 50 < at(gkd_record(1.0)) / at(gkd_record(0.99)) < 200
    for weight, end in ((0.001, 0.0), (0.999, 1.0)):
        near, there = (at(jensen_shannon_record(w, normalised=True)) for w in (weight, end))
        assert there == pytest.approx(at(gkd_record(end))) and near == pytest.approx(there, rel=0.05)


@pytest.fixture(scope="module")
def gkd_of_trl():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are importing from 'trl.experimental'")
        return pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss


@pytest.mark.parametrize("weight", [0.0, 0.01, 0.3, 1.0])
def test_gkd_agrees_with_trl(gkd_of_trl, weight):
    teacher, student = both(8)
    labels = torch.tensor([[5, -100, 2], [-100, -100, 1]])
    mask = labels != -100
    expected = gkd_of_trl(student, teacher, labels, beta=weight, temperature=2.0)
    loss = distillation_loss(teacher, student, mask, divergence=gkd_record(weight), temperature=2.0)
    got = mean_of(loss, mask).value
    torch.testing.assert_close(got, expected)
    mine, theirs = (torch.autograd.grad(x, student)[0] for x in (got, expected))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_gkd_agrees_with_liger(weight):
    liger = pytest.importorskip("liger_kernel.chunked_loss.jsd_loss").LigerFusedLinearJSDFunction
    teacher, student = both(9)
    target = torch.tensor([4, -100, 2, 1, -100, 3])
    flat = [x.flatten(0, 1) for x in (teacher, student)]
    got = distillation_loss(*flat, target != -100, divergence=gkd_record(weight)).sum()
    torch.testing.assert_close(got, liger.distillation_loss_fn(*flat[::-1], beta=weight, target=target))


A = torch.zeros(SHAPE, requires_grad=True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: distillation_loss(A, A.detach(), ALL), DetachedError, "student_logits, the second argument"),
        (lambda: gkd_record(1.5), OptionError, "weight is 1.5; it is a share, from 0 to 1"),
        (lambda: distillation_loss(A, A, ALL, temperature=0.0), OptionError, "temperature is 0.0"),
        (lambda: distillation_loss(A, A, ALL, divergence="k l"), UnknownNameError, "did you mean 'kl'"),
        (lambda: distillation_loss(A, torch.zeros(2, 3, 8), ALL), VocabularyMismatchError, "teacher_logits"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_invalid_distillation_arguments_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
