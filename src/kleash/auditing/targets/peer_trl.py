"""What of TRL is audited."""

from typing import Any

from kleash.auditing.targets import trl, trl_rloo
from kleash.auditing.targets.calling import (
    MINUS_SEQUENCE_REWARD,
    SAMPLED_FROM_LOGITS,
    STUDENT,
    TOP_2,
    case,
    claiming,
)
from kleash.auditing.targets.case import Case, Target

GRPO = "trl.trainer.grpo_trainer.GRPOTrainer._compute_loss"
OFF_POLICY_MEAN = "mean_loss_with_behaviour_and_mask"
UNINITIALISED = (
    "the trainer's own method, on an object that was never initialised and holds the few attributes that it "
    "reads, with advantages 0 and beta 1, so that the whole loss is its KL term"
)


def grpo(name: str, *notes: str, **arguments: Any) -> Case:
    """TRL's GRPO loss with these settings."""
    return case(name, trl.grpo_loss, OFF_POLICY_MEAN, GRPO, UNINITIALISED, *notes, **arguments)


def distillation(name: str, beta: float, claims: str) -> tuple[Case, Case]:
    """TRL's two ways to its generalised Jensen-Shannon divergence, from hidden states and from logits."""
    audits = "trl.kernels.chunked_divergence.ChunkedDivergenceFunction"
    chunked = case(
        f"chunked_{name}", trl.chunked_divergence, claiming("hidden", claims), audits, STUDENT, beta=beta
    )
    audits = "trl.experimental.gkd.gkd_trainer.GKDTrainer.generalized_jsd_loss"
    gkd = case(f"gkd_{name}", trl.generalised_jsd, claiming("logits", claims), audits, STUDENT, beta=beta)
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
        grpo("grpo", "TRL's defaults: use_bias_correction_kl, loss type dapo (a mean over tokens)"),
        case(
            "grpo_plain",
            trl.uncorrected_grpo_loss,
            "mean_loss_with_mask",
            GRPO,
            UNINITIALISED,
            "use_bias_correction_kl=False",
        ),
        grpo("grpo_sequence_ratio", importance_sampling_level="sequence"),
        case(
            "gmpo",
            trl.gmpo_loss,
            "mean_loss_with_mask",
            "trl.experimental.gmpo.gmpo_trainer.GMPOTrainer._compute_loss",
            UNINITIALISED,
        ),
        case(
            "rloo",
            trl_rloo.rloo_reward,
            MINUS_SEQUENCE_REWARD,
            "trl.trainer.rloo_trainer.RLOOTrainer._generate_and_score_completions",
            "the trainer's own method, on an object that was never initialised, with scores of 0 and beta 1; read off "
            "the advantage of each response in a group of two whose other response has a KL of 0",
        ),
        *distillation("forward", 0.0, "reverse_kl"),
        *distillation("jsd", 0.5, "jensen_shannon"),
        *distillation("reverse", 1.0, "kl"),
        case(
            "gkd_masked",
            trl.generalised_jsd_batchmean,
            "mean_logits_with_mask",
            "trl.experimental.gkd.gkd_trainer.GKDTrainer.generalized_jsd_loss",
            STUDENT,
            "with labels, and reduced as the trainer reduces it",
            beta=1.0,
        ),
        case(
            "sdft_full",
            trl.full_self_distillation,
            "logits",
            "trl.experimental.sdft.loss_utils.compute_full_logit_self_distillation_loss",
            STUDENT,
            alpha=1.0,
        ),
        *(
            case(
                name,
                trl.top_k_self_distillation,
                "logits",
                "trl.experimental.sdft.loss_utils.compute_topk_self_distillation_loss",
                STUDENT,
                TOP_2,
                k=2,
                alpha=1.0,
                add_tail=add_tail,
            )
            for name, add_tail in (("sdft_topk", False), ("sdft_topk_tail", True))
        ),
        case(
            "sdft_sampled",
            trl.sampled_self_distillation,
            SAMPLED_FROM_LOGITS,
            "trl.experimental.sdft.loss_utils.compute_sampled_token_self_distillation_loss",
            STUDENT,
        ),
    ),
    not_audited=(
        "OnlineDPOTrainer and AsyncGRPOTrainer, which only log a KL, inside their training step",
        "the Triton kernels of chunked_divergence, which need a GPU; the PyTorch ones were run",
    ),
)
