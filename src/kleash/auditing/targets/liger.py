"""Liger's KL code that runs without a GPU: its losses from hidden states, computed in chunks of PyTorch.

Its Triton kernels (``LigerKLDIVLoss``, ``LigerJSD``, the fused ones and the Triton GRPO loss) need a
GPU and are not audited here.
"""

import torch
from torch import Tensor

from kleash.auditing.targets.cases import MEAN_OF_HIDDEN, STUDENT_NOTE, Target, claiming, make_case
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


def uncorrected_grpo_loss(token_logp: Tensor, token_logq: Tensor, mask: Tensor) -> Tensor:
    """``grpo_loss`` without bias correction, which needs no behaviour log-probabilities."""
    return grpo_loss(token_logp, token_logq, None, mask)


def jsd_loss(
    hidden_p: Tensor, weight_p: Tensor, hidden_q: Tensor, weight_q: Tensor, *, beta: float = 1.0
) -> Tensor:
    """Liger's ``LigerFusedLinearJSDLoss`` without its cross-entropy: the mean over positions, a scalar.

    Student p, teacher q; beta 1 is KL(p || q), 0 is KL(q || p).
    """
    loss = import_target("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False
    )
    rows_p, rows_q = hidden_p.flatten(0, -2), hidden_q.flatten(0, -2)
    return loss(rows_p, weight_p, rows_q, weight_q, torch.zeros(len(rows_p), dtype=torch.long))


LIGER_GRPO = "liger_kernel.chunked_loss.grpo_loss.LigerFusedLinearGRPOFunction.ppo_loss_fn"
GRPO_NOTE = (
    "advantages 0 and beta 1, so that the whole loss is its KL term; starting from the log-probabilities that "
    "LigerFusedLinearGRPOLoss computes from hidden states"
)
LIGER = Target(
    name="liger",
    package="liger_kernel",
    modules=("liger_kernel.chunked_loss",),
    cases=(
        make_case("grpo", LIGER_GRPO, "mean_loss_with_mask", GRPO_NOTE, function=uncorrected_grpo_loss),
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
                claiming(MEAN_OF_HIDDEN, claims),
                STUDENT_NOTE,
                "its cross-entropy weighted 0; not compiled",
                function=jsd_loss,
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
