"""The loss of a pair is that of TRL's trainer, value and gradient."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from kleash.divergences import alpha_record
from kleash.losses import dpo_loss


@pytest.fixture(scope="module")
def trl_loss():
    """TRL's DPO loss for summed log-probabilities: the trainer's own method, on a trainer without a model."""
    trainer = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer

    def loss(chosen, rejected, *, beta, divergence, loss_type="sigmoid", smoothing=0.0):
        token_logp = torch.stack([torch.zeros(2 * len(chosen)), torch.cat([chosen, rejected])], dim=-1)
        outputs = SimpleNamespace(log_probs=token_logp)
        for name in ("entropy", "mean_logits", "is_top1"):
            setattr(outputs, name, torch.zeros(token_logp.shape, dtype=torch.bool))

        def model(**_):
            return outputs

        model.training = True
        alike = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, device="cpu")
        zeros = torch.zeros(len(chosen))
        ones = torch.ones(len(token_logp), 3, dtype=torch.long)
        stub = SimpleNamespace(model=model, accelerator=alike, beta=beta, label_smoothing=smoothing)
        stub.ld_alpha = stub.aux_loss_enabled = stub.use_weighting = None
        stub.f_divergence_type, stub.f_alpha_divergence_coef = divergence, 1.7
        stub.loss_types, stub.loss_weights, stub.precompute_ref_logps = [loss_type], [1.0], True
        stub._metrics, stub._total_train_tokens, stub._tp_size = {"train": defaultdict(list)}, 0, 1
        given = {"input_ids": ones, "attention_mask": ones, "completion_mask": ones}
        given |= {"ref_chosen_logps": zeros, "ref_rejected_logps": zeros}
        return trainer._compute_loss(stub, model, given, False)

    return loss


@pytest.mark.parametrize(
    ("theirs", "ours", "beta_of_ours"),
    [
        ("reverse_kl", "kl", 0.3),
        ("forward_kl", "reverse_kl", 0.3),
        ("js_divergence", "jensen_shannon", 0.6),  # theirs is twice the Jensen-Shannon divergence
        ("alpha_divergence", alpha_record(1.7), 0.3),
    ],
)
def test_dpo_agrees_with_trl(trl_loss, theirs, ours, beta_of_ours):
    torch.manual_seed(1)
    ratios = [(3 * torch.randn(6)).requires_grad_() for _ in range(2)]
    expected = trl_loss(*ratios, beta=0.3, divergence=theirs)
    got = dpo_loss(*ratios, beta=beta_of_ours, divergence=ours).loss.mean()
    torch.testing.assert_close(got, expected)
    for mine, other in zip(*(torch.autograd.grad(x, ratios) for x in (got, expected)), strict=True):
        torch.testing.assert_close(mine, other)


@torch.no_grad()
def test_label_smoothing_agrees_with_trl(trl_loss):
    """Its "aot" loss sorts margins within the batch; of one pair nothing is sorted and cDPO is left."""
    chosen, rejected = torch.tensor([0.4]), torch.tensor([1.9])
    expected = trl_loss(chosen, rejected, beta=0.3, divergence="reverse_kl", loss_type="aot", smoothing=0.2)
    got = dpo_loss(chosen, rejected, beta=0.3, label_smoothing=0.2).loss.mean()
    torch.testing.assert_close(got, expected)
