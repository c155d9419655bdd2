"""Trust-region masks that use the sign of the advantage: DPPO's binary divergences, DeepSeek's sequence mask."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import kl, total_variation
from kleash.errors import OptionError, ShapeError
from kleash.leash.trust_region import TrustRegion, counted_log_ratio, region_of
from kleash.precision import at_least_float32

MAX_POSITIVE_LOGP = 1e-3
"""The largest positive log-probability that rounding explains; larger values are invalid."""

BinaryDivergence = Literal["kl", "total_variation"]


@validated
def binary_divergence(
    token_logp: Float[Tensor, "*tokens_p"],
    behaviour_logp: Float[Tensor, "*tokens_b"],
    divergence: BinaryDivergence = "kl",
) -> Float[Tensor, "*tokens_p"]:
    """The divergence of the binary event "the sampled token" between behaviour and policy, per token.

        kl                 KL(behaviour || policy) = b log(b / p) + (1 - b) log((1 - b) / (1 - p)), in nats
        total_variation    abs(b - p), a probability

    By the data-processing inequality it is a lower bound of the divergence over the whole vocabulary.

    | | value |
    | p = 0 < b | inf for kl |
    | p = 1 up to rounding | 1 - p is replaced by half a unit of rounding |
    | a log-probability above 0.001, or NaN | NaN |

    Args:
        token_logp: log-probabilities of the sampled tokens under the policy.
        behaviour_logp: their log-probabilities under the distribution that they were sampled from.
        divergence: "kl" or "total_variation".

    Raises:
        ShapeError: if the two differ in shape.
        OptionError: if there is no such divergence.

    References:
        Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning" (2026),
        https://arxiv.org/abs/2602.04879
    """
    if divergence not in ("kl", "total_variation"):
        raise OptionError(f"divergence is {divergence!r}; there are kl, total_variation")
    if token_logp.shape != behaviour_logp.shape:
        raise ShapeError(
            f"token_logp is {tuple(token_logp.shape)} and behaviour_logp {tuple(behaviour_logp.shape)}; "
            "give the same tokens under both"
        )
    function = kl if divergence == "kl" else total_variation
    rounding = torch.finfo(at_least_float32(token_logp).dtype).eps / 2
    return function(_binary_log_probs(behaviour_logp, 0.0), _binary_log_probs(token_logp, rounding))


@validated
def binary_divergence_mask(
    token_logp: Float[Tensor, "batch_p time_p"],
    behaviour_logp: Float[Tensor, "batch_b time_b"],
    advantages: Float[Tensor, "batch_a *time_a"] | None,
    mask: Bool[Tensor, "batch_m time_m"] | Integer[Tensor, "batch_m time_m"],
    *,
    most: float,
    divergence: BinaryDivergence = "kl",
) -> TrustRegion:
    """Remove tokens outside a trust region that the update would move further out (DPPO).

        removed where binary_divergence > most, and either advantage > 0 and policy > behaviour,
                                                    or advantage < 0 and policy < behaviour

    So a token that is already too likely is not made likelier, and one that is too unlikely is not made less likely;
    updates back towards the behaviour remain. Without advantages, every token outside the region is removed.

    Common bounds are 0.05 nats for kl and 0.2 for total variation. The weights are 1, since DPPO's loss contains the
    unclipped ratio. A token whose divergence is NaN is removed. A token whose advantage is NaN is not removed, so the
    NaN shows in the loss.

    Args:
        token_logp: log-probabilities of the sampled tokens under the policy that is updated.
        behaviour_logp: their log-probabilities under the distribution that they were sampled from, the centre of the
            region.
        advantages: [batch, time], or [batch] for one per sequence; None to decide by the divergence alone.
        mask: true (or 1) for the tokens that count.
        most: the largest divergence inside the region.
        divergence: "kl" or "total_variation".

    Raises:
        ShapeError: if the tensors do not fit together.
        OptionError: if ``most`` is not a number of at least 0, or there is no such divergence.

    References:
        Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning" (2026),
        https://arxiv.org/abs/2602.04879
    """
    _require_bound(most)
    is_counted, log_ratio = counted_log_ratio(token_logp, behaviour_logp, mask)
    p, b = (torch.where(is_counted, x.detach(), 0.0) for x in (token_logp, behaviour_logp))
    divergences = binary_divergence(p, b, divergence)
    if advantages is None:
        return region_of(is_counted, divergences <= most)
    token_advantages = _per_token(advantages, is_counted)
    moves_out = ((token_advantages > 0) & (log_ratio > 0)) | ((token_advantages < 0) & (log_ratio < 0))
    return region_of(is_counted, ~divergences.isnan() & ((divergences <= most) | ~moves_out))


@validated
def off_policy_sequence_mask(
    token_logp: Float[Tensor, "batch_p time_p"],
    behaviour_logp: Float[Tensor, "batch_b time_b"],
    advantages: Float[Tensor, "batch_a *time_a"],
    mask: Bool[Tensor, "batch_m time_m"] | Integer[Tensor, "batch_m time_m"],
    *,
    most: float,
) -> TrustRegion:
    """Remove responses with negative advantages from which the policy has moved away (OPSM).

        removed where advantage < 0 and the sequence's mean of log behaviour - log policy > most

    The mean is the k1 estimate of KL(behaviour || policy) per token. Responses with positive advantages are never
    removed. Advantages of shape [batch] decide on whole sequences, which are then the unit of the shares; advantages
    of [batch, time], as published, decide on each token of such a sequence by its own sign.

    The mean of a sequence with a NaN log-probability among the tokens that count is NaN: with a negative advantage the
    sequence is removed. To decide by its other tokens, remove that token from ``mask``.

    Args:
        token_logp: log-probabilities of the sampled tokens under the policy that is updated.
        behaviour_logp: their log-probabilities under the distribution that they were sampled from, preferably as the
            rollout engine returned them.
        advantages: [batch], or [batch, time].
        mask: true (or 1) for the tokens that count.
        most: the largest mean, in nats per token, of a sequence with a negative advantage that is not removed.

    Raises:
        ShapeError: if the tensors do not fit together.
        OptionError: if ``most`` is not a number of at least 0.

    References:
        DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models" (2025),
        https://arxiv.org/abs/2512.02556
    """
    _require_bound(most)
    is_counted, log_ratio = counted_log_ratio(token_logp, behaviour_logp, mask)
    within_bound = -log_ratio.sum(-1) / is_counted.sum(-1) <= most
    if advantages.ndim == 1:
        _per_token(advantages, is_counted)
        return region_of(is_counted, within_bound | ~(advantages.detach() < 0))
    return region_of(is_counted, within_bound.unsqueeze(-1) | ~(_per_token(advantages, is_counted) < 0))


def _binary_log_probs(token_logp: Tensor, min_rest: float) -> Tensor:
    """Log-probabilities of the token and of all other tokens in total, on a new last axis."""
    token_logp = at_least_float32(token_logp.detach())
    token_logp = torch.where(token_logp > MAX_POSITIVE_LOGP, torch.nan, token_logp.clamp(max=0))
    rest = (-torch.expm1(token_logp)).clamp(min=min_rest)
    return torch.stack([token_logp, rest.log()], dim=-1)


def _per_token(advantages: Tensor, is_counted: Tensor) -> Tensor:
    """The advantage of each token, detached; 0 where masked."""
    if advantages.shape not in (is_counted.shape, is_counted.shape[:1]):
        raise ShapeError(
            f"advantages are {tuple(advantages.shape)} and mask {tuple(is_counted.shape)}; "
            "give one for each token, or one for each sequence"
        )
    advantages = advantages.detach()
    per_token = advantages if advantages.ndim == 2 else advantages.unsqueeze(-1).expand(is_counted.shape)
    return torch.where(is_counted, per_token, 0.0)


def _require_bound(most: float) -> None:
    """Raise OptionError unless the bound is at least 0."""
    if not most >= 0:
        raise OptionError(f"most is {most}; give a divergence of at least 0")
