"""A loss function for tinker's ``forward_backward_custom``: policy gradient and any KL term of kleash's."""

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
    """What to hand to ``training_client.forward_backward_custom(data, …)``.

        loss = sum over data and tokens of (-A_t rho_t + beta KL_t),    rho = policy / sampler

    tinker's datums carry nothing but tokens and weights to such a function, so the rest is given here, one tensor
    for each datum, as long as its tokens. Which KL it is, and its gradient, says ``term``: by default
    KL(policy || reference), its gradient that of k2, for tokens that the policy drew; ``KLTerm(ratio="token")`` for
    tokens that an older one drew. Sums, as in tinker's own losses.

    Args:
        term: the KL; its aggregation is not used.
        beta: nats of reward paid for one nat of KL.
        masks: true (or 1) where a token was the policy's own.
        reference_logprobs: of the tokens, under the reference.
        sampled_logprobs: of the tokens, under what drew them.
        advantages: of each token; None for a KL alone.

    Returns:
        A function of tinker's data and log-probabilities that returns the loss and the metrics ``kl`` (nats per
        token, as the term estimates it) and ``tokens``.

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
        _require(logprobs, columns)
        total, nats, tokens = torch.zeros(()), 0.0, 0
        for logp, mask, reference, sampled, advantage in zip(logprobs, *columns, strict=True):
            counts = mask[None] > 0
            behaviour = None if term.ratio == "none" else sampled[None]
            kl = term.per_token(logp[None], reference[None], counts, behaviour_logp=behaviour)
            log_ratio = at_least_float32(logp[None]) - at_least_float32(sampled[None])
            gain = torch.where(counts, advantage[None], 0.0) * torch.where(counts, log_ratio, 0.0).exp()
            total = total + (beta * kl - gain).sum()
            nats, tokens = nats + float(kl.detach().sum()), tokens + int(counts.sum())
        return total, {"kl": nats / max(tokens, 1), "tokens": float(tokens)}

    return loss


def _require(logprobs: Sequence[Tensor], columns: Sequence[Sequence[Tensor]]) -> None:
    lengths = [[len(x) for x in column] for column in (logprobs, *columns)]
    if any(each != lengths[0] for each in lengths):
        raise ShapeError(
            "log-probabilities, masks, reference, sampler and advantages have these many tokens, datum by datum: "
            f"{', '.join(map(str, lengths))}; give the same tokens to each"
        )
