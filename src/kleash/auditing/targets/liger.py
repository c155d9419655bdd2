"""Liger's KL code that runs without a GPU: its losses from hidden states, computed in chunks of PyTorch.

Its Triton kernels (``LigerKLDIVLoss``, ``LigerJSD``, the fused ones and the Triton GRPO loss) need a
GPU and are not audited here.
"""

import torch
from torch import Tensor

from kleash.auditing.targets.dotted import import_target


def grpo_loss(
    hidden_p: Tensor,
    weight_p: Tensor,
    hidden_q: Tensor,
    weight_q: Tensor,
    tokens: Tensor,
    behaviour_logp: Tensor | None,
    mask: Tensor,
    *,
    use_bias_correction_kl: bool = False,
    loss_type: str = "dapo",
) -> Tensor:
    """Liger's ``LigerFusedLinearGRPOLoss`` with advantages 0 and beta 1: its KL term, a scalar."""
    chunked = import_target("liger_kernel.chunked_loss")
    loss = chunked.LigerFusedLinearGRPOLoss(
        beta=1.0, compiled=False, loss_type=loss_type, use_bias_correction_kl=use_bias_correction_kl
    )
    found, _ = loss(
        hidden_p,
        weight_p,
        tokens,
        mask.to(hidden_p.dtype),
        torch.zeros(len(tokens), dtype=hidden_p.dtype),
        old_per_token_logps=behaviour_logp,
        ref_input=hidden_q,
        ref_weight=weight_q,
    )
    return found


def jsd_loss(
    hidden_p: Tensor, weight_p: Tensor, hidden_q: Tensor, weight_q: Tensor, *, beta: float = 1.0
) -> Tensor:
    """Liger's ``LigerFusedLinearJSDLoss`` without its cross-entropy: the mean over positions, a scalar.

    Student p, teacher q; beta 1 is KL(p || q), 0 is KL(q || p).
    """
    chunked = import_target("liger_kernel.chunked_loss")
    loss = chunked.LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False
    )
    rows_p, rows_q = hidden_p.flatten(0, -2), hidden_q.flatten(0, -2)
    labels = torch.zeros(len(rows_p), dtype=torch.long)
    return loss(rows_p, weight_p, rows_q, weight_q, labels)
