"""TRL, Liger and kleash by name: the package's own code, called rightly, against formulas written out here."""

import importlib

import pytest
import torch
from target_numbers import Numbers, close, mean, of, spread

from kleash.auditing import Situation
from kleash.auditing.targets.trl import uncorrected_grpo_loss

pytestmark = pytest.mark.peers("trl", "liger_kernel")


def test_trl_grpo_without_correction_is_the_mean_of_k3(situation: Situation, by_hand: Numbers) -> None:
    value, gradient = of("trl:grpo_plain", situation)
    close(value, mean(by_hand.k3, situation.mask))
    close(gradient, spread(by_hand.k3_slope, situation.mask))


def test_trl_grpo_as_it_comes_multiplies_k3_by_the_attached_ratio(
    situation: Situation, by_hand: Numbers
) -> None:
    value, gradient = of("trl:grpo", situation)
    close(value, mean(by_hand.w * by_hand.k3, situation.mask))
    close(gradient, spread(by_hand.w * (by_hand.k3 + by_hand.k3_slope), situation.mask))


def test_trl_grpo_at_sequence_level_multiplies_by_the_geometric_mean_of_the_ratios(
    situation: Situation, by_hand: Numbers
) -> None:
    logs = torch.where(situation.mask, by_hand.w.log(), 0.0).sum(-1) / situation.mask.sum(-1)
    close(
        of("trl:grpo_sequence_ratio", situation)[0],
        mean(logs.exp().unsqueeze(-1) * by_hand.k3, situation.mask),
    )


@pytest.mark.parametrize(
    ("loss_type", "weights"),
    [
        ("dapo", [1 / 5, 1 / 5]),
        ("bnpo", [1 / 5, 1 / 5]),
        ("grpo", [1 / 6, 1 / 4]),
        ("dr_grpo", [1 / 6, 1 / 6]),
        ("luspo", [1 / 2, 1 / 2]),
        ("sapo", [1 / 6, 1 / 4]),
        ("cispo", [1 / 5, 1 / 5]),
        ("vespo", [1 / 5, 1 / 5]),
    ],
)
def test_trl_grpo_weighs_sequences_by_its_loss_type(
    situation: Situation, by_hand: Numbers, loss_type: str, weights: list[float]
) -> None:
    given = (situation.token_logp, situation.token_logq, situation.mask)
    sums = torch.where(situation.mask, by_hand.k3, 0.0).sum(-1)
    close(uncorrected_grpo_loss(*given, loss_type=loss_type), (sums * torch.tensor(weights)).sum(), 1e-7)


def test_trl_gmpo_is_the_mean_of_means_of_k3(situation: Situation, by_hand: Numbers) -> None:
    sums = torch.where(situation.mask, by_hand.k3, 0.0).sum(-1)
    close(of("trl:gmpo", situation)[0], (sums / torch.tensor([3, 2])).mean())


@pytest.mark.parametrize(("name", "beta"), [("forward", 0.0), ("jsd", 0.5), ("reverse", 1.0)])
def test_the_exact_divergences_of_trl_and_liger(
    situation: Situation, by_hand: Numbers, name: str, beta: float
) -> None:
    close(of(f"trl:chunked_{name}", situation, "hidden_p")[0], by_hand.exact(beta), 1e-6)
    close(of(f"trl:gkd_{name}", situation, "logits_p")[0], by_hand.exact(beta))
    liger = {"forward": "jsd_forward", "jsd": "jsd", "reverse": "jsd_reverse"}[name]
    close(of(f"liger:{liger}", situation, "hidden_p")[0], by_hand.exact(beta).mean(), 1e-6)


def test_trl_gkd_as_the_trainer_reduces_it(situation: Situation, by_hand: Numbers) -> None:
    close(of("trl:gkd_masked", situation, "logits_p")[0], mean(by_hand.exact(1.0), situation.mask))


def test_trl_self_distillation_on_all_two_or_one_token(situation: Situation, by_hand: Numbers) -> None:
    close(of("trl:sdft_full", situation, "logits_p")[0], by_hand.exact(1.0))
    p = situation.logp.exp()
    top = p.topk(2).indices
    p, q = p.gather(-1, top), situation.logq.exp().gather(-1, top)
    kept_p, kept_q = p.sum(-1), q.sum(-1)
    partial = (p * (p / q).log()).sum(-1)
    tail = (1 - kept_p) * ((1 - kept_p) / (1 - kept_q)).log()
    close(of("trl:sdft_topk_tail", situation, "logits_p")[0], partial + tail)
    renormalised = partial / kept_p - (kept_p / kept_q).log()
    close(of("trl:sdft_topk", situation, "logits_p")[0], renormalised)
    close(of("trl:sdft_sampled", situation, "logits_p")[0], by_hand.u * situation.token_logp)


def test_trl_rloo_takes_the_kl_of_each_response_from_its_score(
    situation: Situation, by_hand: Numbers
) -> None:
    value, gradient = of("trl:rloo", situation)
    close(value, -by_hand.u.sum(-1))
    assert not gradient.any()


@pytest.mark.parametrize("corrected", [False, True])
def test_liger_grpo_and_the_same_from_hidden_states(
    situation: Situation, by_hand: Numbers, corrected: bool
) -> None:
    value, gradient = of("liger:grpo_bias_correction" if corrected else "liger:grpo", situation)
    w, slopes = by_hand.w if corrected else torch.tensor(1.0), by_hand.k3_slope
    slopes = spread(w * (by_hand.k3 + slopes) if corrected else slopes, situation.mask)
    close(value, mean(w * by_hand.k3, situation.mask))
    close(gradient, slopes)
    loss = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss
    hidden = situation.hidden_p.clone().requires_grad_()
    whole, _ = loss(beta=1.0, compiled=False, use_bias_correction_kl=corrected)(
        hidden,
        situation.head_p,
        situation.tokens,
        situation.mask.double(),
        torch.zeros(2, dtype=torch.float64),
        old_per_token_logps=situation.behaviour_logp,
        ref_input=situation.hidden_q,
        ref_weight=situation.head_q,
    )
    whole.backward()
    close(whole.detach(), value, 1e-6)
    one = torch.nn.functional.one_hot(situation.tokens, 5) - situation.logp.exp()
    close(hidden.grad, (slopes.unsqueeze(-1) * one) @ situation.head_p, 1e-6)


def test_kleash_itself(situation: Situation, by_hand: Numbers) -> None:
    for name in ("kl_loss", "verl_k3+"):
        value, gradient = of(f"kleash:{name}", situation)
        counted = situation.mask if name == "kl_loss" else torch.ones_like(situation.mask)
        close(value, torch.where(counted, by_hand.k3, 0.0))
        close(gradient, torch.where(counted, by_hand.u, 0.0))
    value, gradient = of("kleash:kl_loss_weighted", situation)
    close(value, torch.where(situation.mask, by_hand.w * by_hand.k3, 0.0))
    close(gradient, torch.where(situation.mask, by_hand.w * by_hand.u, 0.0))
    close(of("kleash:kl", situation, "logp")[0], by_hand.exact(1.0))
    close(of("kleash:linear_kl", situation, "hidden_p")[0], by_hand.exact(1.0))
    close(of("kleash:sampled_k1", situation)[0], by_hand.u)
    close(of("kleash:sampled_k3", situation)[0], by_hand.k3)
