"""TRL's KL code, called as it stands: inside its trainers' loss, and in its distillation losses.

Each function here hands tensors to TRL's own code and its answer back; none of TRL's code is
written again. A trainer's method is called on an object of the trainer's class that was never
initialised and holds the few attributes that the method reads; all advantages are 0 and beta is 1,
so that the whole loss is its KL term.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kleash.auditing.targets.dotted import import_target


class Alone:
    """An accelerator with one process: what is gathered or reduced over all processes is one's own."""

    num_processes = 1
    sync_gradients = True

    def gather(self, values: Tensor) -> Tensor:
        """The values."""
        return values

    def reduce(self, values: Tensor, reduction: str = "sum") -> Tensor:
        """The values."""
        return values


class Handed:
    """In front of a trainer: the log-probabilities are handed over instead of computed by a model."""

    handed: Tensor

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self.handed, torch.zeros_like(self.handed.detach()), None


ARGUMENTS = {
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
"""What the loss reads of its configuration, at TRL's defaults."""


def trainer_for(kind: type, token_logp: Tensor, **settings: Any) -> Any:
    """A trainer of this class that was never initialised, with what its loss reads."""
    trainer = object.__new__(type("Audited", (Handed, kind), {}))
    vars(trainer).update(
        handed=token_logp,
        beta=1.0,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            **{**ARGUMENTS, **{k: settings.pop(k) for k in list(settings) if k in ARGUMENTS}}
        ),
        accelerator=Alone(),
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


def batch_of(
    token_logp: Tensor, token_logq: Tensor, mask: Tensor, behaviour_logp: Tensor | None
) -> dict[str, Any]:
    """What the trainer calls its inputs: a prompt of one token before each response, advantages 0."""
    sequences = token_logp.shape[0]
    one = torch.ones(sequences, 1, dtype=torch.long)
    counted = mask.to(torch.long)
    return {
        "prompt_ids": one,
        "prompt_mask": one,
        "completion_ids": torch.zeros_like(counted),
        "completion_mask": counted,
        "advantages": torch.zeros(sequences, dtype=token_logp.dtype),
        "old_per_token_logps": behaviour_logp,
        "ref_per_token_logps": token_logq,
        "num_items_in_batch": counted.sum(),
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
    kind = import_target("trl.trainer.grpo_trainer").GRPOTrainer
    trainer = trainer_for(
        kind,
        token_logp,
        use_bias_correction_kl=use_bias_correction_kl,
        loss_type=loss_type,
        importance_sampling_level=importance_sampling_level,
    )
    return trainer._compute_loss(None, batch_of(token_logp, token_logq, mask, behaviour_logp))


def uncorrected_grpo_loss(
    token_logp: Tensor, token_logq: Tensor, mask: Tensor, *, loss_type: str = "dapo"
) -> Tensor:
    """The same with ``use_bias_correction_kl=False``, which need not know what the tokens were drawn from."""
    return grpo_loss(token_logp, token_logq, None, mask, use_bias_correction_kl=False, loss_type=loss_type)


def gmpo_loss(token_logp: Tensor, token_logq: Tensor, mask: Tensor) -> Tensor:
    """The loss of TRL's experimental ``GMPOTrainer`` with advantages 0 and beta 1: its KL term, a scalar."""
    kind = import_target("trl.experimental.gmpo.gmpo_trainer").GMPOTrainer
    trainer = trainer_for(kind, token_logp)
    return trainer._compute_loss(None, batch_of(token_logp, token_logq, mask, None))


def chunked_divergence(
    hidden_p: Tensor,
    weight_p: Tensor,
    hidden_q: Tensor,
    weight_q: Tensor,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    """TRL's ``ChunkedDivergenceFunction``: student p, teacher q; beta 1 is KL(p || q), 0 is KL(q || p)."""
    apply = import_target("trl.kernels.chunked_divergence").ChunkedDivergenceFunction.apply
    rows_p, rows_q = hidden_p.flatten(0, -2), hidden_q.flatten(0, -2)
    divergence, _ = apply(rows_p, weight_p, None, rows_q, weight_q, None, beta, temperature)
    return divergence.reshape(hidden_p.shape[:-1])


def generalised_jsd(
    logits_p: Tensor, logits_q: Tensor, *, beta: float = 0.5, temperature: float = 1.0
) -> Tensor:
    """TRL's ``GKDTrainer.generalized_jsd_loss``, one number per position: student p, teacher q."""
    trainer = import_target("trl.experimental.gkd.gkd_trainer").GKDTrainer
    jsd = trainer.generalized_jsd_loss(
        logits_p, logits_q, beta=beta, temperature=temperature, reduction="none"
    )
    return jsd.sum(-1)


def generalised_jsd_batchmean(
    logits_p: Tensor, logits_q: Tensor, mask: Tensor, *, beta: float = 0.5
) -> Tensor:
    """TRL's ``GKDTrainer.generalized_jsd_loss`` as the trainer reduces it, over the positions in the mask."""
    trainer = import_target("trl.experimental.gkd.gkd_trainer").GKDTrainer
    labels = torch.where(mask.bool(), 0, -100)
    return trainer.generalized_jsd_loss(logits_p, logits_q, labels=labels, beta=beta)


def top_k_self_distillation(
    logits_p: Tensor, logits_q: Tensor, *, k: int = 2, alpha: float = 1.0, add_tail: bool = True
) -> Tensor:
    """TRL's ``compute_topk_self_distillation_loss``: the student's top k, with a tail bucket or renormalised."""
    loss = import_target("trl.experimental.sdft.loss_utils").compute_topk_self_distillation_loss
    return loss(
        logits_p, logits_q, distillation_topk=k, distillation_alpha=alpha, distillation_add_tail=add_tail
    )


def full_self_distillation(logits_p: Tensor, logits_q: Tensor, *, alpha: float = 1.0) -> Tensor:
    """TRL's ``compute_full_logit_self_distillation_loss``: alpha 1 is KL(p || q), 0 is KL(q || p)."""
    loss = import_target("trl.experimental.sdft.loss_utils").compute_full_logit_self_distillation_loss
    return loss(logits_p, logits_q, distillation_alpha=alpha)


def sampled_self_distillation(logits_p: Tensor, logits_q: Tensor, tokens: Tensor) -> Tensor:
    """TRL's ``compute_sampled_token_self_distillation_loss``, per token."""
    loss = import_target("trl.experimental.sdft.loss_utils").compute_sampled_token_self_distillation_loss
    return loss(logits_p, logits_q, tokens, distillation_alpha=1.0)
