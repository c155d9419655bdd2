"""verl and OpenRLHF by name: the package's own code, called rightly, against formulas written out here."""

import pytest
import torch
from target_values import close, mean, of

pytestmark = pytest.mark.peers("verl", "openrlhf")

VERL = {
    "kl": (lambda u: u, lambda u: torch.ones_like(u)),
    "abs": (lambda u: u.abs(), lambda u: u.sign()),
    "mse": (lambda u: u * u / 2, lambda u: u),
    "low_var_kl": (lambda u: (-u).exp() - 1 + u, lambda u: 1 - (-u).exp()),
    "kl+": (lambda u: u, lambda u: u),
    "abs+": (lambda u: u.abs(), lambda u: u),
    "low_var_kl+": (lambda u: (-u).exp() - 1 + u, lambda u: u),
}


@pytest.mark.parametrize("name", VERL)
def test_verl_penalties_and_their_gradients(inputs, by_hand, name):
    value, slope = VERL[name]
    found, gradient = of(f"verl:{name}", inputs)
    close(found, value(by_hand.u))
    close(gradient, slope(by_hand.u))
    if not name.endswith("+"):
        rewarded, nothing = of(f"verl:reward_{name}", inputs)
        close(rewarded, torch.where(inputs.mask, -value(by_hand.u), 0.0))
        close(nothing, torch.where(inputs.mask, -slope(by_hand.u), 0.0))


MODES = [("token-mean", [1 / 5, 1 / 5]), ("seq-mean-token-mean", [1 / 6, 1 / 4])]


@pytest.mark.parametrize(("mode", "weights"), MODES)
def test_verl_aggregations(inputs, by_hand, mode, weights):
    sums = torch.where(inputs.mask, by_hand.k3, 0.0).sum(-1)
    close(of(f"verl:loss_{mode}", inputs)[0], (sums * torch.tensor(weights)).sum(), 1e-7)
    close(of("verl:loss_seq-mean-token-sum", inputs)[0], sums)


def test_verl_distillation_drops_the_teachers_tail(inputs):
    q, top = inputs.logq.exp().topk(2)
    p = inputs.logp.exp().gather(-1, top)
    close(of("verl:distillation_topk", inputs, "logits_p")[0], (q * (q / p).log()).sum(-1), 1e-6)


def test_verl_rollout_metrics(inputs, by_hand):
    close(of("verl:rollout_kl", inputs)[0], mean(by_hand.u, inputs.mask), 1e-6)
    close(of("verl:rollout_k3_kl", inputs)[0], mean(by_hand.k3, inputs.mask), 1e-6)


@pytest.mark.parametrize(("name", "verls"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_openrlhf_estimators_with_and_without_the_right_gradient(inputs, by_hand, name, verls):
    value, slope = VERL[verls]
    found, gradient = of(f"openrlhf:{name}", inputs)
    close(found, value(by_hand.u), 1e-6)
    close(gradient, slope(by_hand.u), 1e-6)
    found, gradient = of(f"openrlhf:{name}_unbiased", inputs)
    close(found, value(by_hand.u), 1e-6)
    close(gradient, by_hand.w * by_hand.u, 1e-6)


def test_openrlhf_loss_and_reward(inputs, by_hand):
    close(of("openrlhf:loss_by_token", inputs)[0], mean(by_hand.u**2 / 2, inputs.mask), 1e-6)
    sums = torch.where(inputs.mask, by_hand.u**2 / 2, 0.0).sum(-1)
    close(of("openrlhf:loss_by_sample", inputs)[0], (sums / torch.tensor([3, 2])).mean(), 1e-6)
    close(of("openrlhf:reward_k1", inputs)[0], -by_hand.u, 1e-6)
