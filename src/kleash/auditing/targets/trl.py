"""TRL's KL code as an audit target: the losses of its trainers, and its distillation losses."""

from typing import Any

import torch
from torch import Tensor

from kleash.auditing.targets.cases import (
    MINUS_SEQUENCE_REWARD,
    SAMPLED_FROM_LOGITS,
    STUDENT_NOTE,
    TOP_2_NOTE,
    Case,
    Target,
    claiming,
    make_case,
)
from kleash.auditing.targets.packages import import_target
from kleash.auditing.targets.trl_trainers import gmpo_loss, grpo_loss, rloo_reward, uncorrected_grpo_loss


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


GRPO_PATH = "trl.trainer.grpo_trainer.GRPOTrainer._compute_loss"
MEAN_WITH_BEHAVIOUR = "mean_loss_with_behaviour_and_mask"
UNINITIALISED_NOTE = (
    "the trainer's own method, on an object that was never initialised and holds the few attributes that it "
    "reads, with advantages 0 and beta 1, so that the whole loss is its KL term"
)


def grpo_case(name: str, *notes: str, **arguments: Any) -> Case:
    """TRL's GRPO loss with these settings."""
    return make_case(name, grpo_loss, MEAN_WITH_BEHAVIOUR, GRPO_PATH, UNINITIALISED_NOTE, *notes, **arguments)


def distillation_cases(name: str, beta: float, claims: str) -> tuple[Case, Case]:
    """TRL's two implementations of the generalised Jensen-Shannon divergence, from hidden states and from logits."""
    audits = "trl.kernels.chunked_divergence.ChunkedDivergenceFunction"
    chunked = make_case(
        f"chunked_{name}", chunked_divergence, claiming("hidden", claims), audits, STUDENT_NOTE, beta=beta
    )
    audits = "trl.experimental.gkd.gkd_trainer.GKDTrainer.generalized_jsd_loss"
    gkd = make_case(
        f"gkd_{name}", generalised_jsd, claiming("logits", claims), audits, STUDENT_NOTE, beta=beta
    )
    return chunked, gkd


TRL = Target(
    name="trl",
    package="trl",
    modules=(
        "trl.trainer.grpo_trainer",
        "trl.trainer.rloo_trainer",
        "trl.experimental.gmpo.gmpo_trainer",
        "trl.kernels.chunked_divergence",
        "trl.experimental.gkd.gkd_trainer",
        "trl.experimental.sdft.loss_utils",
    ),
    cases=(
        grpo_case("grpo", "TRL's defaults: use_bias_correction_kl, loss type dapo (a mean over tokens)"),
        make_case(
            "grpo_plain",
            uncorrected_grpo_loss,
            "mean_loss_with_mask",
            GRPO_PATH,
            UNINITIALISED_NOTE,
            "use_bias_correction_kl=False",
        ),
        grpo_case("grpo_sequence_ratio", importance_sampling_level="sequence"),
        make_case(
            "gmpo",
            gmpo_loss,
            "mean_loss_with_mask",
            "trl.experimental.gmpo.gmpo_trainer.GMPOTrainer._compute_loss",
            UNINITIALISED_NOTE,
        ),
        make_case(
            "rloo",
            rloo_reward,
            MINUS_SEQUENCE_REWARD,
            "trl.trainer.rloo_trainer.RLOOTrainer._generate_and_score_completions",
            "the trainer's own method, on an object that was never initialised, with scores of 0 and beta 1; read off "
            "the advantage of each response in a group of two whose other response has a KL of 0",
        ),
        *distillation_cases("forward", 0.0, "reverse_kl"),
        *distillation_cases("jsd", 0.5, "jensen_shannon"),
        *distillation_cases("reverse", 1.0, "kl"),
        make_case(
            "gkd_masked",
            generalised_jsd_batchmean,
            "mean_logits_with_mask",
            "trl.experimental.gkd.gkd_trainer.GKDTrainer.generalized_jsd_loss",
            STUDENT_NOTE,
            "with labels, and reduced as the trainer reduces it",
            beta=1.0,
        ),
        make_case(
            "sdft_full",
            full_self_distillation,
            "logits",
            "trl.experimental.sdft.loss_utils.compute_full_logit_self_distillation_loss",
            STUDENT_NOTE,
            alpha=1.0,
        ),
        *(
            make_case(
                name,
                top_k_self_distillation,
                "logits",
                "trl.experimental.sdft.loss_utils.compute_topk_self_distillation_loss",
                STUDENT_NOTE,
                TOP_2_NOTE,
                k=2,
                alpha=1.0,
                add_tail=add_tail,
            )
            for name, add_tail in (("sdft_topk", False), ("sdft_topk_tail", True))
        ),
        make_case(
            "sdft_sampled",
            sampled_self_distillation,
            SAMPLED_FROM_LOGITS,
            "trl.experimental.sdft.loss_utils.compute_sampled_token_self_distillation_loss",
            STUDENT_NOTE,
        ),
    ),
    not_audited=(
        "OnlineDPOTrainer and AsyncGRPOTrainer, which only log a KL, inside their training step",
        "the Triton kernels of chunked_divergence, which need a GPU; the PyTorch ones were run",
    ),
)
