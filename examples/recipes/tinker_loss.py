"""Loss function for tinker's ``forward_backward_custom``: policy gradient and a KL term.

Written for the signature of tinker-cookbook at commit 9dfcc3a (19 August 2026): a function of the data and their
log-probabilities that returns a loss and metrics, as in its ``tutorials/202_loss_functions.py``. Needs kleash; tinker
itself is not imported. Copy this file beside the training script and import ``leashed_loss`` from it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kleash.errors import ShapeError
from kleash.losses import KLTerm
from kleash.precision import at_least_float32

__all__ = ["leashed_loss"]

LossFunction = Callable[[list[Any], list[Tensor]], tuple[Tensor, dict[str, float]]]


def leashed_loss(
    term: KLTerm,
    *,
    beta: float,
    masks: Sequence[Tensor],
    reference_logprobs: Sequence[Tensor],
    sampled_logprobs: Sequence[Tensor],
    advantages: Sequence[Tensor] | None = None,
) -> LossFunction:
    """Return a loss function for ``training_client.forward_backward_custom(data, loss)``.

        loss = sum over data and tokens of (-A_t rho_t + beta KL_t),    rho = policy / sampler

    tinker passes only tokens and log-probabilities to the loss function, so the other columns are arguments here: one
    tensor for each datum, as long as its tokens. ``term`` decides the KL and its gradient. The default of ``KLTerm``
    is KL(policy || reference) with the gradient of k2, for tokens that the current policy drew; take
    ``KLTerm(ratio="token")`` for tokens that an older policy drew. The loss is a sum, as in tinker's own losses.

    Args:
        term: the KL term; its aggregation is not used.
        beta: coefficient of the KL, in units of reward per nat.
        masks: true (or 1) for tokens that the policy generated.
        reference_logprobs: log-probabilities of the tokens under the reference.
        sampled_logprobs: log-probabilities of the tokens under the policy that drew them.
        advantages: advantage of each token; None for a loss of the KL alone.

    Returns:
        A function of tinker's data and log-probabilities. It returns the loss and the metrics ``kl`` (nats per token,
        by the estimator of ``term``) and ``tokens``.

    Raises:
        ShapeError: from that function, if the numbers of data or tokens differ.
    """

    def loss(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        columns = [
            masks,
            reference_logprobs,
            sampled_logprobs,
            advantages or [torch.zeros_like(x) for x in logprobs],
        ]
        _require_same_lengths(logprobs, columns)
        total, nats, tokens = torch.zeros(()), 0.0, 0
        for logp, mask, reference, behaviour, advantage in zip(logprobs, *columns, strict=True):
            in_loss = mask[None] > 0
            behaviour_logp = None if term.ratio == "none" else behaviour[None]
            kl = term.per_token(logp[None], reference[None], in_loss, behaviour_logp=behaviour_logp)
            log_ratio = at_least_float32(logp[None]) - at_least_float32(behaviour[None])
            gain = torch.where(in_loss, advantage[None], 0.0) * torch.where(in_loss, log_ratio, 0.0).exp()
            total = total + (beta * kl - gain).sum()
            nats, tokens = nats + float(kl.detach().sum()), tokens + int(in_loss.sum())
        return total, {"kl": nats / max(tokens, 1), "tokens": float(tokens)}

    return loss


def _require_same_lengths(logprobs: Sequence[Tensor], columns: Sequence[Sequence[Tensor]]) -> None:
    lengths = [[len(x) for x in column] for column in (logprobs, *columns)]
    if any(row != lengths[0] for row in lengths):
        raise ShapeError(
            "log-probabilities, masks, reference, sampler and advantages have these numbers of tokens, datum by datum: "
            f"{', '.join(map(str, lengths))}; pass the same tokens to each"
        )
