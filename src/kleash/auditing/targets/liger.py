"""Liger's KL code that runs without a GPU: its losses from hidden states, computed in chunks of PyTorch.

Its Triton kernels (``LigerKLDIVLoss``, ``LigerJSD``, the fused ones and the Triton GRPO loss) need a
GPU and are not audited here.
"""

import torch
from torch import Tensor

from kleash.auditing.targets.cases import STUDENT_NOTE, Target, as_in_words, make_case
from kleash.auditing.targets.packages import import_target


def grpo_loss(
    token_logp: Tensor,
    token_logq: Tensor,
    behaviour_logp: Tensor | None,
    mask: Tensor,
    *,
    use_bias_correction_kl: bool = False,
) -> Tensor:
    """The loss inside Liger's ``LigerFusedLinearGRPOLoss`` with advantages 0 and beta 1: its KL term, a scalar.

    It starts from log-probabilities, which the layer computes from hidden states, one sequence at a time.
    """
    token_mask = mask.to(token_logp.dtype)
    loss, _ = import_target("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOFunction.ppo_loss_fn(
        token_logp,
        token_mask,
        torch.zeros(len(token_logp), dtype=token_logp.dtype),
        token_mask,
        ref_per_token_logps=token_logq,
        old_per_token_logps=behaviour_logp,
        beta=1.0,
        loss_type="dapo",
        use_bias_correction_kl=use_bias_correction_kl,
    )
    return loss


LIGER_GRPO = "liger_kernel.chunked_loss.grpo_loss.LigerFusedLinearGRPOFunction.ppo_loss_fn"
GRPO_NOTE = (
    "advantages 0 and beta 1, so that the whole loss is its KL term; starting from the log-probabilities that "
    "LigerFusedLinearGRPOLoss computes from hidden states"
)
JSD_CALL = (
    "f(weight_hard_loss=0, weight_soft_loss=1, compiled=False)"
    "(hidden_p.flatten(0, 1), head_p, hidden_q.flatten(0, 1), head_q, tokens.flatten()) -> mean "
)
"""Without its cross-entropy; beta 1 is KL(p || q), 0 is KL(q || p)."""
LIGER = Target(
    name="liger",
    package="liger_kernel",
    modules=("liger_kernel.chunked_loss",),
    cases=(
        make_case(
            "grpo", LIGER_GRPO, "f(token_logp, token_logq, None, mask) -> mean", GRPO_NOTE, function=grpo_loss
        ),
        make_case(
            "grpo_bias_correction",
            LIGER_GRPO,
            "mean_loss_with_behaviour_and_mask",
            GRPO_NOTE,
            function=grpo_loss,
            use_bias_correction_kl=True,
        ),
        *(
            make_case(
                name,
                "liger_kernel.chunked_loss.LigerFusedLinearJSDLoss",
                as_in_words(JSD_CALL + claims, "f(hidden_p, head_p, hidden_q, head_q)"),
                STUDENT_NOTE,
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
