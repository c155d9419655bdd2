"""TRL, Liger and kleash by name: the package's own code, called rightly, against formulas written out here."""

import importlib

import pytest
import torch
from target_values import close, mean, of, spread

pytestmark = pytest.mark.peers("trl", "liger_kernel")


def test_trl_averages_k3_by_the_attached_ratio_of_each_loss(inputs, by_hand):
    value, gradient = of("trl:grpo_plain", inputs)
    close(value, mean(by_hand.k3, inputs.mask))
    close(gradient, spread(by_hand.k3_slope, inputs.mask))
    value, gradient = of("trl:grpo", inputs)
    close(value, mean(by_hand.w * by_hand.k3, inputs.mask))
    close(gradient, spread(by_hand.w * (by_hand.k3 + by_hand.k3_slope), inputs.mask))
    logs = torch.where(inputs.mask, by_hand.w.log(), 0.0).sum(-1) / inputs.mask.sum(-1)
    close(of("trl:grpo_sequence_ratio", inputs)[0], mean(logs.exp().unsqueeze(-1) * by_hand.k3, inputs.mask))
    sums = torch.where(inputs.mask, by_hand.k3, 0.0).sum(-1)
    close(of("trl:gmpo", inputs)[0], (sums / torch.tensor([3, 2])).mean())


@pytest.mark.parametrize(("name", "beta"), [("forward", 0.0), ("jsd", 0.5), ("reverse", 1.0)])
def test_the_exact_divergences_of_trl_and_liger(inputs, by_hand, name, beta):
    close(of(f"trl:chunked_{name}", inputs, "hidden_p")[0], by_hand.exact(beta), 1e-6)
    close(of(f"trl:gkd_{name}", inputs, "logits_p")[0].sum(-1), by_hand.exact(beta))
    liger = {"forward": "jsd_forward", "jsd": "jsd", "reverse": "jsd_reverse"}[name]
    close(of(f"liger:{liger}", inputs, "hidden_p")[0], by_hand.exact(beta).mean(), 1e-6)


def test_trl_gkd_as_the_trainer_reduces_it(inputs, by_hand):
    close(of("trl:gkd_masked", inputs, "logits_p")[0], mean(by_hand.exact(1.0), inputs.mask))


def test_trl_self_distillation_on_all_two_or_one_token(inputs, by_hand):
    close(of("trl:sdft_full", inputs, "logits_p")[0], by_hand.exact(1.0))
    p = inputs.logp.exp()
    top = p.topk(2).indices
    p, q = p.gather(-1, top), inputs.logq.exp().gather(-1, top)
    kept_p, kept_q = p.sum(-1), q.sum(-1)
    partial = (p * (p / q).log()).sum(-1)
    tail = (1 - kept_p) * ((1 - kept_p) / (1 - kept_q)).log()
    close(of("trl:sdft_topk_tail", inputs, "logits_p")[0], partial + tail)
    renormalised = partial / kept_p - (kept_p / kept_q).log()
    close(of("trl:sdft_topk", inputs, "logits_p")[0], renormalised)
    close(of("trl:sdft_sampled", inputs, "logits_p")[0], by_hand.u * inputs.token_logp)


def test_trl_rloo_takes_the_kl_of_each_response_from_its_score(inputs, by_hand):
    value, gradient = of("trl:rloo", inputs)
    close(value, -by_hand.u.sum(-1))
    assert not gradient.any()


@pytest.mark.parametrize("corrected", [False, True])
def test_liger_grpo_and_the_same_from_hidden_states(inputs, by_hand, corrected):
    value, gradient = of("liger:grpo_bias_correction" if corrected else "liger:grpo", inputs)
    w, slopes = by_hand.w if corrected else torch.tensor(1.0), by_hand.k3_slope
    slopes = spread(w * (by_hand.k3 + slopes) if corrected else slopes, inputs.mask)
    close(value, mean(w * by_hand.k3, inputs.mask))
    close(gradient, slopes)
    loss = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss
    hidden = inputs.hidden_p.clone().requires_grad_()
    whole, _ = loss(beta=1.0, compiled=False, use_bias_correction_kl=corrected)(
        hidden,
        inputs.head_p,
        inputs.tokens,
        inputs.mask.double(),
        torch.zeros(2, dtype=torch.float64),
        old_per_token_logps=inputs.behaviour_logp,
        ref_input=inputs.hidden_q,
        ref_weight=inputs.head_q,
    )
    whole.backward()
    close(whole.detach(), value, 1e-6)
    one = torch.nn.functional.one_hot(inputs.tokens, 5) - inputs.logp.exp()
    close(hidden.grad, (slopes.unsqueeze(-1) * one) @ inputs.head_p, 1e-6)


def test_the_target_of_kleash(inputs, by_hand):
    for name in ("kl_loss", "verl_k3+"):
        value, gradient = of(f"kleash:{name}", inputs)
        counted = inputs.mask if name == "kl_loss" else torch.ones_like(inputs.mask)
        close(value, torch.where(counted, by_hand.k3, 0.0))
        close(gradient, torch.where(counted, by_hand.u, 0.0))
    value, gradient = of("kleash:kl_loss_weighted", inputs)
    close(value, torch.where(inputs.mask, by_hand.w * by_hand.k3, 0.0))
    close(gradient, torch.where(inputs.mask, by_hand.w * by_hand.u, 0.0))
    close(of("kleash:kl", inputs, "logp")[0], by_hand.exact(1.0))
    close(of("kleash:linear_kl", inputs, "hidden_p")[0], by_hand.exact(1.0))
    close(of("kleash:sampled_k1", inputs)[0], by_hand.u)
    close(of("kleash:sampled_k3", inputs)[0], by_hand.k3)
