"""verl's own metrics, by its own functions: where ours are the same, and where they are not."""

import math
from types import SimpleNamespace

import pytest
import torch

from kleash.leash import mismatch

NAN = float("nan")


def batch():
    generator = torch.Generator().manual_seed(6)
    engine = -3 * torch.rand(40, 7, generator=generator)
    trainer = (engine + 0.3 * torch.randn(40, 7, generator=generator)).clamp(max=0)
    mask = torch.arange(7) < torch.randint(1, 8, (40, 1), generator=generator)
    return trainer, engine, mask


def test_renamed_metrics_agree_with_verl(verl):
    trainer, engine, mask = batch()
    given = {"rollout_log_probs": engine, "old_log_probs": trainer, "response_mask": mask.long()}
    measured = verl.corr.compute_offpolicy_metrics(trainer, engine, mask.long())
    theirs = {f"rollout_corr/{name}": value for name, value in measured.items()}
    theirs |= verl.debug.calculate_debug_metrics(SimpleNamespace(batch=given | {"responses": mask}))
    assert theirs.pop("training/rollout_probs_diff_valid") == 1
    ours = mismatch(trainer, engine, mask).renamed("verl")
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert set(ours) == set(theirs)


def test_verl_counts_an_empty_sequence_with_perplexity_one(verl):
    trainer, engine, mask = batch()
    emptied = mask.clone()
    emptied[:20] = False
    theirs = verl.corr.compute_offpolicy_metrics(trainer, engine, emptied.long())
    of_the_rest = verl.corr.compute_offpolicy_metrics(trainer[20:], engine[20:], mask[20:].long())
    for name in ("training_ppl", "rollout_ppl", "ppl_ratio"):
        assert theirs[name] == pytest.approx((of_the_rest[name] + 1) / 2, rel=1e-4)
    assert theirs["chi2_seq"] == pytest.approx(of_the_rest["chi2_seq"] / 2, rel=1e-3)
    ours = mismatch(trainer, engine, emptied).renamed("verl")
    for name, value in of_the_rest.items():
        assert ours[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-4, abs=1e-6)


def test_verl_clips_log_ratios_at_20_nats(verl):
    engine, trainer = torch.tensor([[-25.0], [-1.0]]), torch.tensor([[-1.0], [-1.0]])
    mask = torch.ones(2, 1, dtype=torch.long)
    ours = mismatch(trainer, engine, mask).renamed("verl")["rollout_corr/chi2_seq"]
    assert ours == pytest.approx((math.exp(48) + 1) / 2 - 1)
    theirs = verl.corr.compute_offpolicy_metrics(trainer, engine, mask)["chi2_seq"]
    assert theirs == pytest.approx((math.exp(40) + 1) / 2 - 1)
