"""verl's KL code: the penalty, also as a loss and as a reward, and distillation on the top k."""

from types import SimpleNamespace

import torch
from torch import Tensor

from kleash.auditing.targets.cases import (
    MINUS_REWARD,
    STUDENT_NOTE,
    TOP_2_NOTE,
    Target,
    as_in_words,
    make_case,
)
from kleash.auditing.targets.packages import import_target


def kl_loss(
    token_logp: Tensor,
    token_logq: Tensor,
    mask: Tensor,
    *,
    kl_penalty: str = "low_var_kl",
    loss_agg_mode: str = "token-mean",
) -> Tensor:
    """verl's penalty followed by ``agg_loss``, as its actor's loss calls them: a scalar."""
    core = import_target("verl.trainer.ppo.core_algos")
    per_token = core.kl_penalty(logprob=token_logp, ref_logprob=token_logq, kl_penalty=kl_penalty)
    return core.agg_loss(
        loss_mat=per_token, loss_mask=mask, loss_agg_mode=loss_agg_mode, global_batch_size=len(mask)
    )


def kl_reward(token_logp: Tensor, token_logq: Tensor, mask: Tensor, *, kl_penalty: str = "kl") -> Tensor:
    """verl's ``apply_kl_penalty`` on scores of 0 with a coefficient of 1: minus the KL, per token."""
    trainer, tensordict = import_target("verl.trainer.ppo.ray_trainer"), import_target("tensordict")
    tensors = {
        "response_mask": mask,
        "token_level_scores": torch.zeros_like(token_logp),
        "old_log_probs": token_logp,
        "ref_log_prob": token_logq,
    }
    batch = SimpleNamespace(batch=tensordict.TensorDict(tensors, batch_size=len(mask)))
    controller = SimpleNamespace(value=1.0, update=lambda **_: None)
    rewarded, _ = trainer.apply_kl_penalty(batch, controller, kl_penalty=kl_penalty)
    return rewarded.batch["token_level_rewards"]


def forward_kl_topk(
    logits_p: Tensor,
    logits_q: Tensor,
    *,
    k: int = 2,
) -> Tensor:
    """verl's distillation loss on the teacher's top k, per position: student p, teacher q.

    The clamp of log-probabilities at -10 is verl's default; that of the aggregated loss at 0 and 10 is not included.
    """
    teacher = logits_q.detach().flatten(0, -2).log_softmax(-1).topk(min(k, logits_q.shape[-1]), dim=-1)
    settings = SimpleNamespace(use_chunked_topk=False, chunked_topk_chunk_size=4096, log_prob_min_clamp=-10.0)
    result = import_target("verl.trainer.distillation.fsdp.losses").compute_forward_kl_topk(
        logits_p.flatten(0, -2).unsqueeze(0),
        *(torch.nested.as_nested_tensor([x], layout=torch.jagged) for x in (teacher.values, teacher.indices)),
        SimpleNamespace(distillation_loss=settings),
        "thd",
    )
    return result["distillation_losses"].reshape(logits_p.shape[:-1])


PENALTIES = ("kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "low_var_kl+", "full")
TWO_STEPS = "kl_penalty followed by agg_loss, as the actor's loss calls them"
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
        *(
            make_case(name, "verl.trainer.ppo.core_algos.kl_penalty", "loss", kl_penalty=name)
            for name in PENALTIES
        ),
        *(
            make_case(
                f"reward_{name}",
                "verl.trainer.ppo.ray_trainer.apply_kl_penalty",
                MINUS_REWARD,
                "scores of 0 and a coefficient of 1",
                function=kl_reward,
                kl_penalty=name,
            )
            for name in ("kl", "abs", "mse", "low_var_kl")
        ),
        *(
            make_case(
                f"loss_{mode}",
                "verl.trainer.ppo.core_algos.agg_loss",
                "mean_loss_with_mask",
                TWO_STEPS,
                function=kl_loss,
                kl_penalty="low_var_kl+",
                loss_agg_mode=mode,
            )
            for mode in ("token-mean", "seq-mean-token-mean")
        ),
        make_case(
            "loss_seq-mean-token-sum",
            "verl.trainer.ppo.core_algos.agg_loss",
            as_in_words(
                "torch.stack([f(*x) for x in zip(token_logp.split(1), token_logq.split(1), mask.split(1))]) "
                "-> sequence",
                "f(token_logp, token_logq, mask)",
            ),
            TWO_STEPS,
            "each response in a batch of its own",
            function=kl_loss,
            kl_penalty="low_var_kl+",
            loss_agg_mode="seq-mean-token-sum",
        ),
        make_case(
            "distillation_topk",
            "verl.trainer.distillation.fsdp.losses.compute_forward_kl_topk",
            "distillation",
            STUDENT_NOTE,
            TOP_2_NOTE,
            "the sum over the teacher's k likeliest tokens, the rest dropped; without the clamp of the aggregated loss",
            function=forward_kl_topk,
            k=2,
        ),
        *(
            make_case(
                f"rollout_{metric}",
                "verl.trainer.ppo.rollout_corr_helper.compute_offpolicy_metrics",
                as_in_words(
                    f"f(token_logq, token_logp, mask)[{metric!r}] -> mean metric",
                    "f(token_logp, token_logq, mask)",
                ),
                "the rollout engine is p, the trainer's policy q",
            )
            for metric in ("kl", "k3_kl")
        ),
    ),
    not_audited=(
        "k1, k2 and k3: verl's other names for kl, mse and low_var_kl",
        "the Megatron and fused kernels, which need a GPU or packages that are not installed",
    ),
)
