"""Liger's KL code that runs without a GPU: its losses from hidden states, computed in chunks of PyTorch.

Its Triton kernels (``LigerKLDIVLoss``, ``LigerJSD``, the fused ones and the Triton GRPO loss) need a
GPU and are not audited here.
"""

import torch
from torch import Tensor

from kleash.auditing.targets.dotted import import_target


def grpo_loss(
    token_logp: Tensor,
    token_logq: Tensor,
    behaviour_logp: Tensor | None,
    mask: Tensor,
    *,
    use_bias_correction_kl: bool = False,
    loss_type: str = "dapo",
) -> Tensor:
    """The loss inside Liger's ``LigerFusedLinearGRPOLoss`` with advantages 0 and beta 1: its KL term, a scalar.

    From log-probabilities on; the layer computes those from hidden states, in chunks of one sequence.
    """
    function = import_target("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOFunction
    counted = mask.to(token_logp.dtype)
    loss, _ = function.ppo_loss_fn(
        token_logp,
        counted,
        torch.zeros(len(token_logp), dtype=token_logp.dtype),
        counted,
        ref_per_token_logps=token_logq,
        old_per_token_logps=behaviour_logp,
        beta=1.0,
        loss_type=loss_type,
        use_bias_correction_kl=use_bias_correction_kl,
    )
    return loss


def uncorrected_grpo_loss(token_logp: Tensor, token_logq: Tensor, mask: Tensor) -> Tensor:
    """The same without its bias correction, for which it need not know what the tokens were drawn from."""
    return grpo_loss(token_logp, token_logq, None, mask)


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
