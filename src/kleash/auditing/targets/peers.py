"""The packages whose KL code is known by name, and what of it is audited."""

from collections.abc import Mapping
from types import MappingProxyType

from kleash.auditing.targets import liger, openrlhf, ours, verl
from kleash.auditing.targets.calling import (
    MEAN_OF_HIDDEN,
    MINUS_REWARD,
    STUDENT,
    TOP_2,
    case,
    claiming,
)
from kleash.auditing.targets.case import Target
from kleash.auditing.targets.peer_trl import TRL
from kleash.divergences import kl
from kleash.estimators import sampled_kl
from kleash.linear import linear_kl
from kleash.losses.relative_entropy import kl_loss

PENALTIES = ("kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "low_var_kl+", "full")
TWO_STEPS = "kl_penalty and agg_loss, one after the other, as the actor's loss calls them"
KL_PENALTY = "verl.trainer.ppo.core_algos.kl_penalty"
VERL = Target(
    name="verl",
    package="verl",
    modules=(
        "verl.trainer.ppo.core_algos",
        "verl.trainer.ppo.ray_trainer",
        "verl.trainer.ppo.rollout_corr_helper",
        "verl.trainer.distillation.fsdp.losses",
    ),
    stood_in=("uvicorn", "fastapi"),
    cases=(
        *(case(name, verl.kl_penalty, "loss", KL_PENALTY, kl_penalty=name) for name in PENALTIES),
        *(
            case(
                f"reward_{name}",
                verl.kl_reward,
                MINUS_REWARD,
                "verl.trainer.ppo.ray_trainer.apply_kl_penalty",
                "scores of 0 and a coefficient of 1",
                kl_penalty=name,
            )
            for name in ("kl", "abs", "mse", "low_var_kl")
        ),
        *(
            case(
                f"loss_{mode}",
                verl.kl_loss,
                "mean_loss_with_mask",
                "verl.trainer.ppo.core_algos.agg_loss",
                TWO_STEPS,
                kl_penalty="low_var_kl+",
                loss_agg_mode=mode,
            )
            for mode in ("token-mean", "seq-mean-token-mean")
        ),
        case(
            "loss_seq-mean-token-sum",
            verl.kl_loss_of_each,
            "sequence_loss_with_mask",
            "verl.trainer.ppo.core_algos.agg_loss",
            TWO_STEPS,
            "each response a batch of its own",
            kl_penalty="low_var_kl+",
        ),
        case(
            "distillation_topk",
            verl.forward_kl_topk,
            claiming("logits", "reverse_kl"),
            "verl.trainer.distillation.fsdp.losses.compute_forward_kl_topk",
            STUDENT,
            TOP_2,
            "the sum over the teacher's k likeliest tokens, the rest dropped; the clamp of the loss comes later",
            k=2,
        ),
        *(
            case(
                f"rollout_{metric}",
                verl.rollout_metric,
                "mean_metric_with_mask",
                "verl.trainer.ppo.rollout_corr_helper.compute_offpolicy_metrics",
                "the rollout engine is p, the trainer's policy q",
                metric=metric,
            )
            for metric in ("kl", "k3_kl")
        ),
    ),
    not_audited=(
        "k1, k2 and k3 apart: they are verl's other names for kl, mse and low_var_kl",
        "the Megatron and fused kernels, which need a GPU or packages that are not installed",
    ),
)

APPROX = "openrlhf.models.utils.compute_approx_kl"
OPENRLHF = Target(
    name="openrlhf",
    package="openrlhf",
    modules=("openrlhf.models.utils", "openrlhf.models.loss"),
    stood_in=("deepspeed", "flash_attn", "pylatexenc"),
    cases=(
        *(
            case(name, openrlhf.compute_approx_kl, "loss", APPROX, kl_estimator=name)
            for name in ("k1", "k2", "k3")
        ),
        *(
            case(
                f"{name}_unbiased",
                openrlhf.compute_approx_kl,
                "loss_with_behaviour",
                APPROX,
                kl_estimator=name,
                unbiased_gradient=True,
            )
            for name in ("k1", "k2", "k3")
        ),
        case(
            "reward_k1",
            openrlhf.kl_reward,
            MINUS_REWARD,
            "openrlhf.models.utils.compute_reward",
            "scores of 0 and a coefficient of 1",
            "compute_reward does not mask; OpenRLHF's actor hands over log-probabilities that are 0 in the padding "
            "(openrlhf.models.actor), and its advantages mask the rewards again",
            fragile=("padding_counts",),
        ),
        *(
            case(
                name,
                openrlhf.kl_loss,
                "mean_loss_with_mask",
                "openrlhf.models.loss.aggregate_loss",
                "compute_approx_kl and aggregate_loss, one after the other, as the actor calls them",
                kl_estimator="k2",
                token_level_loss=by_token,
            )
            for name, by_token in (("loss_by_token", True), ("loss_by_sample", False))
        ),
    ),
)

LIGER_GRPO = "liger_kernel.chunked_loss.grpo_loss.LigerFusedLinearGRPOFunction.ppo_loss_fn"
INSIDE = (
    "advantages 0 and beta 1, so that the whole loss is its KL term; from log-probabilities on, which "
    "LigerFusedLinearGRPOLoss computes from hidden states"
)
LIGER = Target(
    name="liger",
    package="liger_kernel",
    modules=("liger_kernel.chunked_loss",),
    cases=(
        case("grpo", liger.uncorrected_grpo_loss, "mean_loss_with_mask", LIGER_GRPO, INSIDE),
        case(
            "grpo_bias_correction",
            liger.grpo_loss,
            "mean_loss_with_behaviour_and_mask",
            LIGER_GRPO,
            INSIDE,
            use_bias_correction_kl=True,
        ),
        *(
            case(
                name,
                liger.jsd_loss,
                claiming(MEAN_OF_HIDDEN, claims),
                "liger_kernel.chunked_loss.LigerFusedLinearJSDLoss",
                STUDENT,
                "its cross-entropy weighted 0; not compiled",
                beta=beta,
            )
            for name, beta, claims in (
                ("jsd_forward", 0.0, "reverse_kl"),
                ("jsd", 0.5, "jensen_shannon"),
                ("jsd_reverse", 1.0, "kl"),
            )
        ),
    ),
    not_audited=(
        "the Triton kernels (KLDiv, JSD, their fused linear forms, the Triton GRPO loss), which need a GPU",
    ),
)

KLEASH = Target(
    name="kleash",
    package="kleash",
    modules=("kleash.integrations.verl",),
    cases=(
        case("kl_loss", kl_loss, "loss_with_mask", "kleash.losses.kl_loss"),
        case("kl_loss_k2", kl_loss, "loss_with_mask", "kleash.losses.kl_loss", estimator="k2"),
        case(
            "kl_loss_weighted",
            ours.weighted_kl_loss,
            "loss_with_behaviour_and_mask",
            "kleash.losses.kl_loss",
            "with the token weights of importance_weights",
        ),
        case("sampled_k1", sampled_kl, "reward", "kleash.estimators.sampled_kl", estimator="k1"),
        case("sampled_k3", sampled_kl, "metric", "kleash.estimators.sampled_kl", estimator="k3"),
        case("kl", kl, "log_probabilities", "kleash.divergences.kl"),
        case("linear_kl", linear_kl, "heads", "kleash.linear.linear_kl"),
        case("verl_k3+", ours.verl_kl_penalty, "loss", "kleash.integrations.verl.kl_penalty"),
    ),
)

TARGETS: Mapping[str, Target] = MappingProxyType({t.name: t for t in (TRL, VERL, OPENRLHF, LIGER, KLEASH)})
"""Name -> record: what ``kleash audit NAME`` audits."""
