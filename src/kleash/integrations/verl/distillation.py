"""verl's top-k distillation loss with the rest of the vocabulary, in any direction."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kleash.integrations.verl.compat import packed_positions
from kleash.losses import top_k_distillation_loss


def compute_topk_loss(
    divergence: str,
    original: Callable[..., dict[str, Tensor]],
    student_logits: Tensor,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    config: Any,
    data_format: str,
) -> dict[str, Tensor]:
    """verl's ``compute_forward_kl_topk`` with another loss: the divergence of the coarse distributions.

    They have the teacher's k likeliest tokens and one token for all others, so that D(teacher || student) of them is
    never negative and never above that of the whole vocabulary. verl's masses and overlaps stay as they are. Padding,
    which verl fills with log-probabilities of 0, gets a loss of 0.

    Args:
        divergence: a name of ``DIVERGENCES``, of D(teacher || student).
        original: verl's function.
        student_logits: of one rank.
        teacher_topk_log_probs: the teacher's lists, nested.
        teacher_topk_ids: their tokens.
        config: of verl.
        data_format: of verl.
    """
    with torch.no_grad():
        outputs = original(student_logits, teacher_topk_log_probs, teacher_topk_ids, config, data_format)
    logp, ids = packed_positions(teacher_topk_log_probs), packed_positions(teacher_topk_ids)
    is_list = (logp != 0).any(-1) | (logp.shape[-1] == 1)
    return outputs | {
        "distillation_losses": top_k_distillation_loss(
            ids, logp, student_logits, is_list, divergence=divergence
        )
    }
