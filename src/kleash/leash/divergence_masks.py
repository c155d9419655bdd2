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
    """The divergence of "this token or another one" between behaviour and policy, in nats (or as a probability).

        kl                 KL(behaviour || policy) = b log(b / p) + (1 - b) log((1 - b) / (1 - p))
        total_variation    abs(b - p)

    What one sampled token's two probabilities certify: by the data-processing inequality at most the
    divergence over the whole vocabulary.

    | | value |
    | p = 0 < b | inf, by kl |
    | p = 1 up to rounding | 1 - p is taken as half a rounding step: what is left below that is not known |
    | a log-probability above 0.001, or NaN | NaN |

    Args:
        token_logp: log-probabilities of the sampled tokens under the policy.
        behaviour_logp: under what drew them.
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
    """Removes tokens that have left the trust region and that the update would push further out (DPPO).

        removed where binary_divergence > most, and either advantage > 0 and policy > behaviour,
                                                    or advantage < 0 and policy < behaviour

    So a token that is too likely already is not made likelier, and one that is too unlikely not less likely; the
    way back stays open. Without advantages, every token outside the region goes, whichever way.

    Bounds in use are 0.05 nats for kl and 0.2 for total variation. The weights are 1: DPPO's loss carries the
    ratio itself, not clipped. A token whose divergence is NaN is removed; a NaN advantage pushes nowhere, stays, and is
    seen in the loss.

    Args:
        token_logp: log-probabilities of the sampled tokens under the policy that is updated.
        behaviour_logp: under what drew them, to which the region is anchored.
        advantages: [batch, time], or [batch] for one per sequence; None to look at the divergence alone.
        mask: true (or 1) for the tokens that count.
        most: the divergence up to which tokens are inside.
        divergence: "kl" or "total_variation".

    Raises:
        ShapeError: if the tensors do not fit together.
        OptionError: if ``most`` is not a number of at least 0, or there is no such divergence.

    References:
        Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning" (2026),
        https://arxiv.org/abs/2602.04879
    """
    _require_bound(most)
    counts, log_ratio = counted_log_ratio(token_logp, behaviour_logp, mask)
    p, b = (torch.where(counts, x.detach(), 0.0) for x in (token_logp, behaviour_logp))
    divergences = binary_divergence(p, b, divergence)
    if advantages is None:
        return region_of(counts, divergences <= most)
    token_advantages = _per_token(advantages, counts)
    pushed_out = ((token_advantages > 0) & (log_ratio > 0)) | ((token_advantages < 0) & (log_ratio < 0))
    return region_of(counts, ~divergences.isnan() & ((divergences <= most) | ~pushed_out))


@validated
def off_policy_sequence_mask(
    token_logp: Float[Tensor, "batch_p time_p"],
    behaviour_logp: Float[Tensor, "batch_b time_b"],
    advantages: Float[Tensor, "batch_a *time_a"],
    mask: Bool[Tensor, "batch_m time_m"] | Integer[Tensor, "batch_m time_m"],
    *,
    most: float,
) -> TrustRegion:
    """Removes what would be learnt from bad responses that the policy has moved away from (OPSM).

        removed where advantage < 0 and the sequence's mean of log behaviour - log policy > most

    The mean is an estimate of KL(behaviour || policy) per token, by k1. Good responses stay however far they
    are. Advantages of [batch] decide about whole sequences, which are then the unit of the shares; of
    [batch, time], as published, about the tokens of a sequence with a negative one.

    A sequence with a NaN log-probability among the tokens that count has no mean: with a negative advantage it
    is removed. To judge it by its other tokens, take that token out of ``mask``.

    Args:
        token_logp: log-probabilities of the sampled tokens under the policy that is updated.
        behaviour_logp: under what drew them: best the rollout engine's own.
        advantages: [batch], or [batch, time].
        mask: true (or 1) for the tokens that count.
        most: nats per token up to which a sequence may be learnt from either way.

    Raises:
        ShapeError: if the tensors do not fit together.
        OptionError: if ``most`` is not a number of at least 0.

    References:
        DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models" (2025),
        https://arxiv.org/abs/2512.02556
    """
    _require_bound(most)
    counts, log_ratio = counted_log_ratio(token_logp, behaviour_logp, mask)
    within_bound = -log_ratio.sum(-1) / counts.sum(-1) <= most
    if advantages.ndim == 1:
        _per_token(advantages, counts)
        return region_of(counts, within_bound | ~(advantages.detach() < 0))
    return region_of(counts, within_bound.unsqueeze(-1) | ~(_per_token(advantages, counts) < 0))


def _binary_log_probs(token_logp: Tensor, min_rest: float) -> Tensor:
    """Log-probabilities of the token and of all others together, on a new last axis."""
    token_logp = at_least_float32(token_logp.detach())
    token_logp = torch.where(token_logp > MAX_POSITIVE_LOGP, torch.nan, token_logp.clamp(max=0))
    rest = (-torch.expm1(token_logp)).clamp(min=min_rest)
    return torch.stack([token_logp, rest.log()], dim=-1)


def _per_token(advantages: Tensor, counts: Tensor) -> Tensor:
    if advantages.shape not in (counts.shape, counts.shape[:1]):
        raise ShapeError(
            f"advantages are {tuple(advantages.shape)} and mask {tuple(counts.shape)}; "
            "give one for each token, or one for each sequence"
        )
    advantages = advantages.detach()
    per_token = advantages if advantages.ndim == 2 else advantages.unsqueeze(-1).expand(counts.shape)
    return torch.where(counts, per_token, 0.0)


def _require_bound(most: float) -> None:
    if not most >= 0:
        raise OptionError(f"most is {most}; give a divergence of at least 0")
