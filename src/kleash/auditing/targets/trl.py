"""TRL's KL code as an audit target: the losses of its trainers, and its distillation losses.

The trainers' own methods are called on objects that were never initialised: of the trainer's class, with only the
attributes that the method reads. GRPO and GMPO: advantages are 0 and beta is 1, so that the whole loss is its KL term.
RLOO subtracts from each response's reward the mean of the others in its group; each response is therefore put into a
group of two with one whose log-probabilities are the same under both models, so that with scores of 0 and beta 1 its
advantage is minus its KL.
"""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kleash.auditing.targets.cases import (
    STUDENT_NOTE,
    TOP_2_NOTE,
    Case,
    Target,
    as_in_words,
    make_case,
)
from kleash.auditing.targets.packages import import_target

ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"),
    num_processes=1,
    process_index=0,
    sync_gradients=True,
    gather=lambda values: values,
    reduce=lambda values, reduction="sum": values,
)
"""Stands in for an accelerator of one process."""

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
    """A trainer of this class that was never initialised, with what its loss reads; log-probabilities are given."""
    trainer = object.__new__(trainer_class)
    arguments = {name: settings.pop(name, default) for name, default in TRL_DEFAULTS.items()}
    vars(trainer).update(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            token_logp,
            torch.zeros_like(token_logp.detach()),
            None,
        ),
        beta=1.0,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(**arguments),
        accelerator=ACCELERATOR,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=token_logp.shape[1],
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        **{"importance_sampling_level": "token", "loss_type": "dapo", **settings},
    )
    return trainer


def trainer_inputs(
    token_logp: Tensor, token_logq: Tensor, mask: Tensor, behaviour_logp: Tensor | None
) -> dict[str, Any]:
    """The inputs of the trainer's loss: a prompt of one token before each response, advantages 0."""
    ones = torch.ones(len(mask), 1, dtype=torch.long)
    token_mask = mask.to(torch.long)
    return {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": torch.zeros_like(token_mask),
        "completion_mask": token_mask,
        "advantages": torch.zeros(len(mask), dtype=token_logp.dtype),
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
    module: str = "trl.trainer.grpo_trainer",
    trainer_class: str = "GRPOTrainer",
    **settings: Any,
) -> Tensor:
    """The loss of TRL's ``GRPOTrainer``, or another one, with advantages 0 and beta 1: its KL term, a scalar."""
    trainer = uninitialised_trainer(getattr(import_target(module), trainer_class), token_logp, **settings)
    return trainer._compute_loss(None, trainer_inputs(token_logp, token_logq, mask, behaviour_logp))


def rloo_reward(token_logp: Tensor, token_logq: Tensor) -> Tensor:
    """Minus the KL of each response: its advantage in TRL's ``RLOOTrainer`` in a group with one whose KL is 0."""
    trainer = object.__new__(import_target("trl.trainer.rloo_trainer").RLOOTrainer)
    # Each response is followed by one whose log-probabilities are -1 under both models.
    p, q = (
        torch.stack([x.detach(), torch.full_like(x, -1.0)], dim=1).flatten(0, 1)
        for x in (token_logp, token_logq)
    )
    model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    vars(trainer).update(
        _generate=lambda prompts: ([[0]] * len(p), [[0] * p.shape[1]] * len(p), [""] * len(p)),
        _get_per_token_logps_and_entropies=lambda of, *_, **__: (p if of is model else q, None, None),
        _calculate_rewards=lambda *_: torch.zeros(len(p), 1, dtype=p.dtype),
        beta=1.0,
        model=model,
        ref_model=SimpleNamespace(),
        accelerator=ACCELERATOR,
        args=SimpleNamespace(per_device_train_batch_size=1, gradient_checkpointing_kwargs=None),
        processing_class=SimpleNamespace(),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        reward_weights=torch.ones(1, dtype=p.dtype),
        reward_clip_range=None,
        reward_func_names=["none"],
        num_generations=2,
        normalize_advantages=False,
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
    )
    return trainer._generate_and_score_completions([{"prompt": ""}] * len(p))["advantages"][::2]


SDFT = "trl.experimental.sdft.loss_utils"
GMPO = "trl.experimental.gmpo.gmpo_trainer"
GKD_LOSS = "trl.experimental.gkd.gkd_trainer.GKDTrainer.generalized_jsd_loss"
GRPO_PATH = "trl.trainer.grpo_trainer.GRPOTrainer._compute_loss"
UNINITIALISED_NOTE = (
    "the trainer's own method, on an object that was never initialised and holds the few attributes that it "
    "reads, with advantages 0 and beta 1, so that the whole loss is its KL term"
)


def grpo_case(name: str, *notes: str, **arguments: Any) -> Case:
    """TRL's GRPO loss with these settings."""
    return make_case(
        name,
        GRPO_PATH,
        "mean_loss_with_behaviour_and_mask",
        UNINITIALISED_NOTE,
        *notes,
        function=grpo_loss,
        **arguments,
    )


CHUNKED_CALL = (
    "f(hidden_p.flatten(0, 1), head_p, None, hidden_q.flatten(0, 1), head_q, None, {beta}, 1.0)[0]"
    ".view_as(tokens)"
)
"""Without biases, at a temperature of 1; beta 1 is KL(p || q), 0 is KL(q || p)."""

TRL = Target(
    name="trl",
    package="trl",
    modules=(
        "trl.trainer.grpo_trainer",
        "trl.trainer.rloo_trainer",
        "trl.experimental.gmpo.gmpo_trainer",
        "trl.kernels.chunked_divergence",
        "trl.experimental.gkd.gkd_trainer",
        SDFT,
    ),
    cases=(
        grpo_case("grpo", "TRL's defaults: use_bias_correction_kl, loss type dapo (a mean over tokens)"),
        make_case(
            "grpo_plain",
            GRPO_PATH,
            "f(token_logp, token_logq, None, mask) -> mean",
            UNINITIALISED_NOTE,
            function=grpo_loss,
            use_bias_correction_kl=False,
        ),
        grpo_case("grpo_sequence_ratio", importance_sampling_level="sequence"),
        make_case(
            "gmpo",
            f"{GMPO}.GMPOTrainer._compute_loss",
            "f(token_logp, token_logq, None, mask) -> mean",
            UNINITIALISED_NOTE,
            function=partial(grpo_loss, module=GMPO, trainer_class="GMPOTrainer"),
        ),
        make_case(
            "rloo",
            "trl.trainer.rloo_trainer.RLOOTrainer._generate_and_score_completions",
            "f(token_logp, token_logq) -> minus sequence reward",
            "the trainer's own method, on an object that was never initialised, with scores of 0 and beta 1; read off "
            "the advantage of each response in a group of two whose other response has a KL of 0",
            function=rloo_reward,
        ),
        *(
            case
            for name, beta, claims in (
                ("forward", 0.0, "reverse_kl"),
                ("jsd", 0.5, "jensen_shannon"),
                ("reverse", 1.0, "kl"),
            )
            for case in (
                make_case(
                    f"chunked_{name}",
                    "trl.kernels.chunked_divergence.ChunkedDivergenceFunction.apply",
                    as_in_words(
                        f"{CHUNKED_CALL.format(beta=beta)} -> {claims}",
                        f"f(hidden_p, head_p, hidden_q, head_q, beta={beta})",
                    ),
                    STUDENT_NOTE,
                ),
                make_case(
                    f"gkd_{name}",
                    GKD_LOSS,
                    f"f(logits_p, logits_q) -> vocabulary {claims}",
                    STUDENT_NOTE,
                    beta=beta,
                    reduction="none",
                ),
            )
        ),
        make_case(
            "gkd_masked",
            GKD_LOSS,
            "f(logits_p, logits_q, labels) -> mean",
            STUDENT_NOTE,
            "with labels, and reduced as the trainer reduces it",
            beta=1.0,
        ),
        make_case(
            "sdft_full",
            f"{SDFT}.compute_full_logit_self_distillation_loss",
            "logits",
            STUDENT_NOTE,
            distillation_alpha=1.0,
        ),
        *(
            make_case(
                name,
                f"{SDFT}.compute_topk_self_distillation_loss",
                "logits",
                STUDENT_NOTE,
                TOP_2_NOTE,
                distillation_topk=2,
                distillation_alpha=1.0,
                distillation_add_tail=add_tail,
            )
            for name, add_tail in (("sdft_topk", False), ("sdft_topk_tail", True))
        ),
        make_case(
            "sdft_sampled",
            f"{SDFT}.compute_sampled_token_self_distillation_loss",
            "f(logits_p, logits_q, tokens)",
            STUDENT_NOTE,
            distillation_alpha=1.0,
        ),
    ),
    not_audited=(
        "OnlineDPOTrainer and AsyncGRPOTrainer, which only log a KL, inside their training step",
        "the Triton kernels of chunked_divergence, which need a GPU; the PyTorch ones were run",
    ),
)
