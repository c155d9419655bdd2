"""Pitfalls of PyTorch's own functions that the documentation warns of."""

import pytest
import torch
from distributions import gradients, log
from torch.nn import functional

from kleash.divergences import kl

P, Q = (0.7, 0.3), (0.5, 0.5)


def test_torch_kl_div_takes_its_arguments_in_reverse_order():
    summed = functional.kl_div(log(*Q), log(*P), log_target=True, reduction="sum")
    torch.testing.assert_close(summed, kl(log(*P), log(*Q)))
    swapped = functional.kl_div(log(*P), log(*Q), log_target=True, reduction="sum")
    torch.testing.assert_close(swapped, kl(log(*Q), log(*P)))


def test_torch_kl_div_is_nan_for_a_log_target_of_minus_infinity():
    logp, logq = log(1, 0), log(0.5, 0.5)
    assert functional.kl_div(logq, logp, log_target=True, reduction="sum").isnan()
    torch.testing.assert_close(kl(logp, logq).exp().item(), 2.0)


def test_the_textbook_sum_is_nan_for_a_zero():
    logp, logq = log(1, 0), log(0.5, 0.5)
    assert (logp.exp() * (logp - logq)).sum().isnan()
    assert kl(logp, logq).isfinite()


def test_selecting_outputs_leaves_a_nan_gradient():
    logits, logq = torch.tensor([0.0, -torch.inf]), torch.tensor([0.5, 0.5]).log()

    def select_outputs(logp):
        return torch.where(logp > -torch.inf, logp.exp() * (logp - logq), 0.0).sum()

    (textbook,) = gradients(select_outputs, logits)
    (ours,) = gradients(lambda logp: kl(logp, logq), logits)
    assert textbook.isnan().any() and ours.isfinite().all()


@pytest.mark.parametrize(("scale", "off_by"), [(1.5e-4, 2.0), (1.5e-2, 5e-4)])
def test_the_textbook_sum_is_inaccurate_for_close_pairs_in_float32(scale, off_by):
    torch.manual_seed(0)
    logits = 2 * torch.randn(64, 4000)
    moved = logits + scale * torch.randn(64, 4000)
    expected = kl(logits.double().log_softmax(-1), moved.double().log_softmax(-1))
    logp, logq = logits.log_softmax(-1), moved.log_softmax(-1)
    plain = (logp.exp() * (logp - logq)).sum(-1)
    assert ((plain - expected).abs() / expected).median() > off_by
    assert ((kl(logp, logq) - expected).abs() / expected).median() < off_by / 100
