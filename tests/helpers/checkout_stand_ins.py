"""Stand-ins for files of training frameworks: functions of their published signatures, written for the tests."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

NOTHING_ELSE = """
raise SystemExit("the whole module was executed")
"""
ESTIMATORS = """
import torch
import absent_framework
from absent_framework.config import Settings
def k3(difference):
    return difference.exp() - 1 - difference
FORMULAS = {
    "k1": lambda u: u,
    "abs": lambda u: u.abs(),
    "k2": lambda u: u.square() / 2,
    "k3": lambda u: k3(-u),
    "low_var_kl": lambda u: k3(-u),
}
"""
NEMO = """
def calculate_kl(
    logprobs: Settings,
    logprobs_reference: torch.Tensor,
    kl_type: str = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
    importance_sampling_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    u = logprobs - logprobs_reference
    if input_clamp_value is not None:
        u = u.clamp(-input_clamp_value, input_clamp_value)
    kl = FORMULAS[kl_type](u)
    if importance_sampling_weights is not None:
        kl = kl * importance_sampling_weights
    return kl if output_clamp_value is None else kl.clamp(-output_clamp_value, output_clamp_value)
def masked_mean(values, mask, dim=None, global_normalization_factor=None):
    return (values * mask).sum() / global_normalization_factor
"""
NEMO_DISTILLATION = """
from nemo_rl.algorithms.utils import masked_mean
class DistillationLossFn:
    def __init__(self, cfg): self.kl_type = cfg.kl_type
    def __call__(self, p, q, H_all, data, global_valid_seqs, global_valid_toks):
        p, q = (q, p) if self.kl_type == "forward" else (p, q)
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        kl = masked_mean((p.exp() * (p - q)).sum(-1), mask, global_normalization_factor=global_valid_toks)
        return kl, {"num_valid_samples": data["input_ids"].shape[0]}
"""
SKYRL = """
def compute_approx_kl(log_probs, log_probs_base, loss_mask: Settings | None = None, kl_estimator_type="k3"):
    kl = FORMULAS[kl_estimator_type](log_probs - log_probs_base)
    return kl if loss_mask is None else torch.where(loss_mask, kl, 0.0)
"""
SLIME = """
@torch.compile(dynamic=True)
def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    kl_loss_type: str,
    importance_ratio: torch.Tensor | None = None,
) -> Settings:
    kl = FORMULAS[kl_loss_type](log_probs - log_probs_base)
    return kl if importance_ratio is None else importance_ratio * kl
"""
PRIME_RL = """
from dataclasses import dataclass

@dataclass
class LossOutputs:
    loss: "Settings"
    metrics: dict[str, torch.Tensor]

def compute_importance_ratio_and_mismatch_kl(trainer_logprobs, inference_logprobs):
    difference = trainer_logprobs - inference_logprobs
    return difference, difference.exp(), k3(difference)

def ref_kl_loss_fn(inputs: "LossInputs") -> LossOutputs:
    _, ratio, _ = compute_importance_ratio_and_mismatch_kl(inputs.trainer_logprobs, inputs.inference_logprobs)
    weighted = ratio * (inputs.trainer_logprobs - inputs.ref_logprobs).detach()
    return LossOutputs(loss=weighted[inputs.loss_mask].sum(), metrics={})
"""
OPEN_INSTRUCT = """
def estimate_kl(ref_logprobs_diff: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    u = ref_logprobs_diff
    return torch.stack([u, FORMULAS["k2"](u), k3(-u), ratio * u])
"""
TORCHTUNE = """
class ForwardKLLoss(torch.nn.Module):
    weights = (0.0, 1.0)

    def __init__(self, ignore_index: int = -100):
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, student_logits, teacher_logits, labels, normalize: bool = True):
        p, q = (logits.log_softmax(-1) for logits in (student_logits, teacher_logits))
        kls = ((p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1))
        return sum(w * kl for w, kl in zip(self.weights, kls))[labels != self.ignore_index].mean()

class ReverseKLLoss(ForwardKLLoss):
    weights = (1.0, 0.0)

class SymmetricKLLoss(ForwardKLLoss):
    weights = (0.5, 0.5)
"""
FILES: Mapping[str, str] = {
    path: ESTIMATORS + text + NOTHING_ELSE
    for path, text in {
        "nemo_rl/algorithms/utils.py": NEMO,
        "nemo_rl/algorithms/loss/loss_functions.py": NEMO_DISTILLATION,
        "skyrl/backends/skyrl_train/utils/ppo_utils.py": SKYRL,
        "slime/utils/ppo_utils.py": SLIME,
        "miles/backends/training_utils/loss_hub/math_utils.py": SLIME,
        "src/prime_rl/trainer/rl/loss.py": PRIME_RL,
        "open_instruct/model_utils.py": OPEN_INSTRUCT,
        "torchtune/modules/loss/kd_losses.py": TORCHTUNE,
    }.items()
}


def write_checkout(folder: Path, files: Mapping[str, str], *, commit: bool = True) -> Path:
    """``folder`` with these files, as a git repository of one commit or without git."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    steps = (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "files")) if commit else ()
    for words in steps:
        subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)
    return folder
