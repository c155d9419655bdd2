"""The same decisions as verl's, TRL's and OpenRLHF's own functions, and where they are not the same."""

import math
from types import SimpleNamespace

import pytest
import torch

from kleash.auditing.targets.packages import quiet, stand_ins
from kleash.leash import (
    binary_divergence_mask,
    geometric_mask,
    intersection,
    kl_mask,
    off_policy_sequence_mask,
    truncated_weights,
    window_weights,
)

NAN = float("nan")
LOG2 = math.log(2)


@pytest.fixture(scope="module")
def trl():
    """TRL's GRPO trainer, of which one method is asked."""
    with quiet():
        return pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer


@pytest.fixture(scope="module")
def batch():
    """(policy, behaviour, mask, advantage of each sequence); every sequence has a token."""
    generator = torch.Generator().manual_seed(4)
    behaviour = -2.5 * torch.rand(64, 6, generator=generator)
    policy = (behaviour + 0.6 * torch.randn(64, 6, generator=generator)).clamp(max=-0.01)
    mask = torch.arange(6) < torch.randint(1, 7, (64, 1), generator=generator)
    return policy, behaviour, mask, torch.randn(64, generator=generator)


@pytest.mark.parametrize(
    ("option", "threshold", "asked"),
    [
        ("token_k1", "0.5_1.8", {"estimator": "k1", "bounds": (-LOG2, math.log(1.8))}),
        ("token_k2", "0.1", {"estimator": "k2", "bounds": (0.0, 0.1)}),
        ("token_k3", "0.1", {"estimator": "k3", "bounds": (0.0, 0.1)}),
        ("seq_sum_k1", "0.5_1.8", {"estimator": "k1", "over": "sequence_sum"}),
        ("seq_sum_k2", "0.6", {"estimator": "k2", "over": "sequence_sum", "bounds": (0.0, 0.6)}),
        ("seq_sum_k3", "0.6", {"estimator": "k3", "over": "sequence_sum", "bounds": (0.0, 0.6)}),
        ("seq_mean_k1", "0.8_1.2", {"estimator": "k1", "over": "sequence_mean"}),
        ("seq_mean_k2", "0.2", {"estimator": "k2", "over": "sequence_mean", "bounds": (0.0, 0.2)}),
        ("seq_mean_k3", "0.2", {"estimator": "k3", "over": "sequence_mean", "bounds": (0.0, 0.2)}),
        ("seq_max_k2", "0.3", {"estimator": "k2", "over": "sequence_max", "bounds": (0.0, 0.3)}),
        ("seq_max_k3", "0.3", {"estimator": "k3", "over": "sequence_max", "bounds": (0.0, 0.3)}),
    ],
)
def test_kl_masks_agree_with_verls_rejection(verl, batch, option, threshold, asked):
    policy, behaviour, mask, _ = batch
    given = policy - behaviour, mask.long(), option, threshold
    theirs, metrics = verl.corr.compute_rollout_rejection_mask(*given)
    if "bounds" not in asked:
        asked = asked | {"bounds": tuple(math.log(float(x)) for x in threshold.split("_"))}
    ours = kl_mask(policy, behaviour, mask, **asked)
    assert torch.equal(ours.kept, theirs.bool()) and 0.05 < ours.removed_share < 0.95
    share = "masked_fraction" if option.startswith("token") else "seq_masked_fraction"
    assert ours.removed_share.item() == pytest.approx(metrics[f"rollout_rs_{option}_{share}"], rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bounds", ["1.5", "0.6_1.8"])
def test_truncated_and_window_weights_agree_with_verl_and_its_icepop(verl, batch, level, bounds):
    policy, behaviour, mask, _ = batch
    theirs, metrics = verl.corr.compute_rollout_correction_weights(
        policy - behaviour, mask.long(), level, bounds
    )
    if bounds == "1.5":
        ours = truncated_weights(policy, behaviour, mask, cap=1.5, level=level)
        share, their_share = ours.capped_share.item(), metrics["rollout_is_ratio_fraction_high"]
    else:
        ours = window_weights(policy, behaviour, mask, bounds=(0.6, 1.8), level=level)
        share, their_share = ours.removed_share.item(), metrics.get("rollout_is_oob_ratio")
        their_share = their_share if level == "token" else share  # theirs counts tokens
    torch.testing.assert_close(ours.weights, theirs, rtol=1e-5, atol=0)
    assert (0.05 if bounds == "1.5" else 0.1) < share < 0.9 and share == pytest.approx(their_share, rel=1e-5)
    if level == "token":
        size = metrics["rollout_is_eff_sample_size"] * mask.sum().item()
        assert ours.effective_sample_size.item() == pytest.approx(size, rel=1e-4)


@pytest.mark.parametrize("divergence", ["kl", "total_variation"])
def test_binary_masks_agree_with_verls_dppo(verl, batch, divergence):
    """Which tokens its loss gives a gradient to."""
    policy, behaviour, mask, advantages = batch
    most = {"kl": 0.02, "total_variation": 0.1}[divergence]
    config = SimpleNamespace(clip_ratio=most, clip_ratio_low=None, clip_ratio_high=None, global_batch_info={})
    config.get = lambda name, default: default
    loss = {"kl": verl.core.compute_policy_loss_dppo_kl}
    loss["total_variation"] = verl.core.compute_policy_loss_dppo_tv
    leaf, each = policy.clone().requires_grad_(), advantages[:, None].expand(policy.shape)
    value, metrics = loss[divergence](behaviour, leaf, each, mask.float(), config=config)
    (slope,) = torch.autograd.grad(value, leaf)
    ours = binary_divergence_mask(policy, behaviour, advantages, mask, most=most, divergence=divergence)
    assert torch.equal(ours.kept, slope != 0) and 0.05 < ours.removed_share < 0.95
    assert ours.removed_share.item() == pytest.approx(metrics["actor/pg_clipfrac"], rel=1e-5)


def test_the_sequence_mask_agrees_with_trl(trl, batch):
    policy, behaviour, mask, advantages = batch
    theirs = trl.get_off_policy_mask(advantages[:, None], policy, behaviour, mask.float(), 0.1)
    ours = off_policy_sequence_mask(policy, behaviour, advantages, mask, most=0.1)
    assert torch.equal(ours.kept, mask & theirs.bool()) and 0.05 < ours.removed_share < 0.9


@pytest.fixture(scope="module")
def openrlhf():
    """OpenRLHF's policy loss, of a policy that has not moved: what is left is its correction for the engine."""
    with stand_ins(("deepspeed", "flash_attn", "pylatexenc")), quiet():
        policy_loss = pytest.importorskip("openrlhf.models.loss").PolicyLoss

    def correction(trainer, engine, mask, **asked):
        """The slope of each token's loss, with advantage 1 and no average: its weight."""
        options = {f"is_correction_{name}": value for name, value in asked.items()}
        leaf = trainer.clone().requires_grad_()
        loss, *_ = policy_loss(**options)(
            leaf, trainer, torch.ones_like(trainer), mask.float(), engine, batch_num_tokens=1.0
        )
        return -torch.autograd.grad(loss, leaf)[0]

    return correction


@pytest.mark.parametrize("level", ["token", "seq"])
def test_window_weights_agree_with_openrlhf(openrlhf, batch, level):
    """Sequences by the geometric mean of their ratios; survivors keep the ratio of each token."""
    policy, behaviour, mask, _ = batch
    bounds = (0.8, 1.2)
    theirs = openrlhf(policy, behaviour, mask, level=level, mode="mask", gating="ratio", threshold=bounds)
    if level == "token":
        ours = window_weights(policy, behaviour, mask, bounds=bounds)
    else:
        every_ratio = window_weights(policy, behaviour, mask, bounds=(0.0, math.inf))
        ours = intersection(geometric_mask(policy, behaviour, mask, bounds=bounds), every_ratio, mask=mask)
    torch.testing.assert_close(ours.weights, theirs, rtol=1e-5, atol=0)
    assert 0.05 < ours.removed_share < 0.95


def test_truncated_weights_agree_with_openrlhf(openrlhf, batch):
    policy, behaviour, mask, _ = batch
    asked = {"level": "token", "mode": "clip", "gating": "ratio", "threshold": (0.0, 1.3)}
    theirs = openrlhf(policy, behaviour, mask, **asked)
    ours = truncated_weights(policy, behaviour, mask, cap=1.3)
    torch.testing.assert_close(ours.weights, theirs, rtol=1e-5, atol=0)
    assert ours.capped_share > 0.05


@pytest.mark.parametrize(("gating", "divergence"), [("binary_kl", "kl"), ("tv", "total_variation")])
def test_binary_masks_without_advantages_agree_with_openrlhf(openrlhf, batch, gating, divergence):
    policy, behaviour, mask, _ = batch
    most = {"kl": 0.02, "total_variation": 0.1}[divergence]
    asked = {"level": "token", "mode": "mask", "gating": gating, "threshold": (0.0, most)}
    theirs = openrlhf(policy, behaviour, mask, **asked)
    ours = binary_divergence_mask(policy, behaviour, None, mask, most=most, divergence=divergence)
    assert torch.equal(ours.kept, theirs != 0) and 0.05 < ours.removed_share < 0.95
