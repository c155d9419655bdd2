"""The KL inside TRL's trainers: the trainers' own methods, called on objects that were never initialised.

Such an object is of the trainer's class and holds only the attributes that the method reads. GRPO and GMPO: advantages
are 0 and beta is 1, so that the whole loss is its KL term. RLOO subtracts from each response's reward the mean of
the others in its group; each response is therefore put into a group of two with one whose log-probabilities are the
same under both models, so that with scores of 0 and beta 1 its advantage is minus its KL.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kleash.auditing.targets.packages import import_target


class SingleProcessAccelerator:
    """An accelerator of one process: gathering and reducing return the values."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    sync_gradients = True

    def gather(self, values: Tensor) -> Tensor:
        """The values."""
        return values

    def reduce(self, values: Tensor, reduction: str = "sum") -> Tensor:
        """The values."""
        return values


class WithLogProbabilities:
    """Mixed into a trainer: log-probabilities are given instead of computed by a model."""

    token_logp: Tensor

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self.token_logp, torch.zeros_like(self.token_logp.detach()), None


TRL_DEFAULTS = {
    "use_bias_correction_kl": True,
    "delta": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "steps_per_generation": 1,
}
"""The fields of the configuration that the loss reads, at TRL's defaults."""


def uninitialised_trainer(trainer_class: type, token_logp: Tensor, **settings: Any) -> Any:
    """A trainer of this class that was never initialised, with the attributes that its loss reads."""
    trainer = object.__new__(type("AuditedTrainer", (WithLogProbabilities, trainer_class), {}))
    vars(trainer).update(
        token_logp=token_logp,
        beta=1.0,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            **{**TRL_DEFAULTS, **{k: settings.pop(k) for k in list(settings) if k in TRL_DEFAULTS}}
        ),
        accelerator=SingleProcessAccelerator(),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.pop("importance_sampling_level", "token"),
        loss_type=settings.pop("loss_type", "dapo"),
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=token_logp.shape[1],
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        **settings,
    )
    return trainer


def trainer_inputs(
    token_logp: Tensor, token_logq: Tensor, mask: Tensor, behaviour_logp: Tensor | None
) -> dict[str, Any]:
    """The inputs of the trainer's loss: a prompt of one token before each response, advantages 0."""
    sequences = token_logp.shape[0]
    ones = torch.ones(sequences, 1, dtype=torch.long)
    token_mask = mask.to(torch.long)
    return {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": torch.zeros_like(token_mask),
        "completion_mask": token_mask,
        "advantages": torch.zeros(sequences, dtype=token_logp.dtype),
        "old_per_token_logps": behaviour_logp,
        "ref_per_token_logps": token_logq,
        "num_items_in_batch": token_mask.sum(),
    }


def grpo_loss(
    token_logp: Tensor,
    token_logq: Tensor,
    behaviour_logp: Tensor | None,
    mask: Tensor,
    *,
    use_bias_correction_kl: bool = True,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
) -> Tensor:
    """The loss of TRL's ``GRPOTrainer`` with advantages 0 and beta 1: its KL term, a scalar."""
    trainer_class = import_target("trl.trainer.grpo_trainer").GRPOTrainer
    trainer = uninitialised_trainer(
        trainer_class,
        token_logp,
        use_bias_correction_kl=use_bias_correction_kl,
        loss_type=loss_type,
        importance_sampling_level=importance_sampling_level,
    )
    return trainer._compute_loss(None, trainer_inputs(token_logp, token_logq, mask, behaviour_logp))


def uncorrected_grpo_loss(
    token_logp: Tensor, token_logq: Tensor, mask: Tensor, *, loss_type: str = "dapo"
) -> Tensor:
    """``grpo_loss`` with ``use_bias_correction_kl=False``, which needs no behaviour log-probabilities."""
    return grpo_loss(token_logp, token_logq, None, mask, use_bias_correction_kl=False, loss_type=loss_type)


def gmpo_loss(token_logp: Tensor, token_logq: Tensor, mask: Tensor) -> Tensor:
    """The loss of TRL's experimental ``GMPOTrainer`` with advantages 0 and beta 1: its KL term, a scalar."""
    trainer_class = import_target("trl.experimental.gmpo.gmpo_trainer").GMPOTrainer
    trainer = uninitialised_trainer(trainer_class, token_logp)
    return trainer._compute_loss(None, trainer_inputs(token_logp, token_logq, mask, None))


class WithResponses:
    """Mixed into a trainer: responses, their log-probabilities and their scores are given."""

    policy_logp: Tensor
    reference_logp: Tensor
    model: Any

    def _generate(self, prompts: list[str]) -> tuple[list[list[int]], list[list[int]], list[str]]:
        return [[0]] * len(prompts), [[0] * self.policy_logp.shape[1]] * len(prompts), [""] * len(prompts)

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> tuple[Tensor, None, None]:
        return self.policy_logp if model is self.model else self.reference_logp, None, None

    def _calculate_rewards(self, inputs: Any, prompts: list[str], *_: Any) -> Tensor:
        return torch.zeros(len(prompts), 1, dtype=self.policy_logp.dtype)


def with_zero_kl_responses(token_logp: Tensor) -> Tensor:
    """Each response followed by one whose log-probabilities are -1 under both models."""
    return torch.stack([token_logp, torch.full_like(token_logp, -1.0)], dim=1).flatten(0, 1)


def rloo_reward(token_logp: Tensor, token_logq: Tensor) -> Tensor:
    """Minus the KL of each response: its advantage in TRL's ``RLOOTrainer`` in a group with one whose KL is 0."""
    trainer_class = import_target("trl.trainer.rloo_trainer").RLOOTrainer
    trainer: Any = object.__new__(type("AuditedTrainer", (WithResponses, trainer_class), {}))
    vars(trainer).update(
        policy_logp=with_zero_kl_responses(token_logp.detach()),
        reference_logp=with_zero_kl_responses(token_logq.detach()),
        beta=1.0,
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        ref_model=SimpleNamespace(),
        accelerator=SingleProcessAccelerator(),
        args=SimpleNamespace(per_device_train_batch_size=1, gradient_checkpointing_kwargs=None),
        processing_class=SimpleNamespace(),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        reward_weights=torch.ones(1, dtype=token_logp.dtype),
        reward_clip_range=None,
        reward_func_names=["none"],
        num_generations=2,
        normalize_advantages=False,
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
    )
    outputs = trainer._generate_and_score_completions([{"prompt": ""}] * (2 * len(token_logp)))
    return outputs["advantages"][::2]
