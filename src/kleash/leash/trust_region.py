"""Trust regions of off-policy samples: tokens or sequences that are kept, removed or weighted in a loss."""

from math import inf, log
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.nn.functional import pad

from kleash.arguments import validated
from kleash.divergences import DIVERGENCES
from kleash.divergences.functions import divergence_of_rows
from kleash.errors import OptionError, ShapeError
from kleash.estimators import ESTIMATORS, Estimator, importance_weights
from kleash.estimators.weights import effective_sample_size
from kleash.masking import as_mask
from kleash.precision import at_least_float32
from kleash.registry import look_up, require_at_least, require_choice

Over = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]
OVER: tuple[Over, ...] = ("token", "sequence_sum", "sequence_mean", "sequence_max")
BinaryDivergence = Literal["kl", "total_variation"]
MAX_POSITIVE_LOGP = 1e-3
"""The largest positive log-probability that rounding explains; larger values are invalid."""


class TrustRegion(NamedTuple):
    """Mask, weights and statistics of a trust region on a batch; all detached.

    Shares and sample size count units: tokens if the region decides on tokens, or whole sequences.
    """

    weights: Float[Tensor, "batch time"]
    """Factor on each token's loss: 0 if it is removed or masked; otherwise 1, or its ratio."""
    kept: Bool[Tensor, "batch time"]
    """Tokens that count and are not removed: the mask of a mean in which removed tokens do not count as 0."""
    removed_share: Float[Tensor, ""]
    """The share of unmasked units that are removed, those with NaN included. NaN if there are no units."""
    capped_share: Float[Tensor, ""]
    """The share of unmasked units whose weight was lowered to a cap. NaN if there are no units."""
    effective_sample_size: Float[Tensor, ""]
    """The number of equally weighted units with the same variance, (sum w)^2 / sum w^2; 0 if all are removed."""


@validated
def intersection(
    *regions: TrustRegion, mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"]
) -> TrustRegion:
    """The tokens that no region removes, with the product of their weights; the unit is the token.

    Each region decides on the whole batch, independently of the others. ``capped_share`` is 0, since a product does not
    show which weights were capped; read it from the single region.

    Args:
        regions: trust regions of this batch.
        mask: true (or 1) for the tokens that count, as for the regions.

    Raises:
        OptionError: if there are no regions.
        ShapeError: if a region has another shape than ``mask``.
    """
    if not regions:
        raise OptionError("no trust regions to intersect; give at least one")
    is_kept, weights = as_mask(mask), torch.ones_like(regions[0].weights)
    for region in regions:
        if region.kept.shape != is_kept.shape:
            raise ShapeError(f"a region is {tuple(region.kept.shape)} and mask {tuple(is_kept.shape)}")
        is_kept, weights = is_kept & region.kept, weights * region.weights
    return region_of(as_mask(mask), is_kept, weights)


@validated
def kl_mask(
    token_logp: Float[Tensor, "batch time"],
    behaviour_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
    *,
    bounds: tuple[float, float],
    estimator: str | Estimator = "k3",
    over: Over = "token",
) -> TrustRegion:
    """Keep the tokens, or whole sequences, whose estimated KL(behaviour || policy) lies within ``bounds``.

        u = log behaviour - log policy,    least <= estimator(u) <= most

    With over "token" each token is compared with the bounds; with "sequence_sum", "sequence_mean" and "sequence_max"
    the sum, mean or maximum over each sequence, which is removed as a whole. The tokens were drawn from the behaviour,
    so the KL averages over it. k2 and k3 are never negative; k1 is negative for tokens that the policy made likelier,
    and "sequence_mean" of k1 is the logarithm of the geometric mean of behaviour / policy.

    A unit whose estimate is NaN is removed and counted as removed. Masked values are not read. To keep a sequence with
    one token that could not be scored, remove that token from ``mask``.

    Args:
        token_logp: log-probabilities of the sampled tokens under the policy.
        behaviour_logp: their log-probabilities under the distribution that they were sampled from: the policy before
            the update, or the rollout engine.
        mask: true (or 1) for the tokens that count.
        bounds: lower and upper bound, in nats; ``-inf`` or ``inf`` for none.
        estimator: "k1", "abs", "k2", "k3", or a record.
        over: the unit and its statistic: a name of ``OVER``.

    Raises:
        ShapeError: if the three differ in shape, or are not [batch, time].
        OptionError: if the bounds are in the wrong order, or ``over`` is unknown.
        UnknownNameError: if there is no such estimator.

    References:
        Li et al., "Trust Region Masking for Long-Horizon LLM Reinforcement Learning" (2025),
        https://arxiv.org/abs/2512.23075
    """
    require_choice(OVER, over=over)
    record = look_up(ESTIMATORS, estimator, "estimator")
    is_counted, log_ratio = counted_log_ratio(token_logp, behaviour_logp, mask)
    values = record.of(-log_ratio)
    if over == "sequence_max":
        # with one step more, so that there is a maximum over no steps
        values = pad(torch.where(is_counted, values, -inf), (0, 1), value=-inf).amax(-1)
    elif over != "token":
        values = values.sum(-1) / (is_counted.sum(-1) if over == "sequence_mean" else 1)
    return region_of(is_counted, is_within(values, bounds))


@validated
def truncated_weights(
    token_logp: Float[Tensor, "batch time"],
    behaviour_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
    *,
    cap: float,
    level: Literal["token", "sequence"] = "token",
) -> TrustRegion:
    """Truncated importance weights (TIS): ``min(rho, cap)``, ``rho = policy / behaviour``; nothing is removed.

    The weights are those of ``importance_weights``, whose documentation has the bias of a cap. The weight of a token
    with a NaN log-probability is NaN, since no token is removed.

    Args:
        token_logp: log-probabilities of the sampled tokens under the policy.
        behaviour_logp: under what drew them.
        mask: true (or 1) for the tokens that count.
        cap: the largest weight, above 0.
        level: "token", or "sequence" for the product over the response.

    Raises:
        ShapeError, OptionError: as ``importance_weights``.

    References:
        Ionides, "Truncated Importance Sampling" (2008), as in https://mc-stan.org/loo/reference/tis.html
    """
    require_choice(("token", "sequence"), level=level)
    weights = importance_weights(token_logp, behaviour_logp, mask, level=level, cap=cap)
    return TrustRegion(
        weights=weights.values,
        kept=as_mask(mask),
        removed_share=torch.zeros_like(weights.truncated_share).where(
            weights.truncated_share >= 0, torch.nan
        ),
        capped_share=weights.truncated_share,
        effective_sample_size=weights.effective_sample_size,
    )


@validated
def window_weights(
    token_logp: Float[Tensor, "batch time"],
    behaviour_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
    *,
    bounds: tuple[float, float],
    level: Literal["token", "sequence"] = "token",
) -> TrustRegion:
    """Importance weights within a window; tokens or sequences with a ratio outside it are removed (IcePop, MIS).

        rho = policy / behaviour,    weight rho where least <= rho <= most, else 0

    With level "token" each token has its own ratio; with "sequence", all tokens of a response have the product of
    their ratios. A unit with a NaN ratio is removed.

    Args:
        token_logp: log-probabilities of the sampled tokens under the policy.
        behaviour_logp: under what drew them.
        mask: true (or 1) for the tokens that count.
        bounds: the smallest and the largest ratio inside the window, such as (0.5, 5.0).
        level: "token" or "sequence".

    Raises:
        ShapeError: if the three differ in shape, or are not [batch, time].
        OptionError: if the bounds are negative or in the wrong order, or the level is unknown.

    References:
        Ling Team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"
        (2025), https://arxiv.org/abs/2510.18855
    """
    require_choice(("token", "sequence"), level=level)
    window = log_bounds(bounds)
    is_counted, log_ratio = counted_log_ratio(token_logp, behaviour_logp, mask)
    log_weight = log_ratio if level == "token" else log_ratio.sum(-1)
    return region_of(is_counted, is_within(log_weight, window), log_weight.exp())


@validated
def geometric_mask(
    token_logp: Float[Tensor, "batch time"],
    behaviour_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
    *,
    bounds: tuple[float, float],
) -> TrustRegion:
    """Keep the sequences whose importance ratios have a geometric mean within ``bounds``; mask the other sequences.

        least <= (product over T tokens of policy / behaviour)^(1 / T) <= most

    Unlike the product, the geometric mean does not grow with the length. The weights are 1; for importance weights,
    take the ``intersection`` with ``truncated_weights``. It is ``kl_mask`` of k1 over "sequence_mean" with bounds on
    the ratio policy / behaviour instead of on log behaviour - log policy.

    Raises:
        ShapeError: if the three differ in shape, or are not [batch, time].
        OptionError: if the bounds are negative or in the wrong order.

    References:
        Ericsson, "A geometric view of off-policy sequence masking" (2026),
        https://leonericsson.github.io/blog/2026-02-01-opsm-geometric-masking
    """
    least, most = log_bounds(bounds)
    return kl_mask(
        token_logp, behaviour_logp, mask, bounds=(-most, -least), estimator="k1", over="sequence_mean"
    )


@validated
def binary_divergence(
    token_logp: Float[Tensor, "*tokens"],
    behaviour_logp: Float[Tensor, "*tokens"],
    divergence: BinaryDivergence = "kl",
) -> Float[Tensor, "*tokens"]:
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
    require_choice(("kl", "total_variation"), divergence=divergence)
    rounding = torch.finfo(at_least_float32(token_logp).dtype).eps / 2
    p, q = _binary_log_probs(behaviour_logp, 0.0), _binary_log_probs(token_logp, rounding)
    return divergence_of_rows(DIVERGENCES[divergence], p, q)


@validated
def binary_divergence_mask(
    token_logp: Float[Tensor, "batch time"],
    behaviour_logp: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch *time_a"] | None,
    mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
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
        OptionError: if ``most`` is not a finite number of at least 0, or there is no such divergence.

    References:
        Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning" (2026),
        https://arxiv.org/abs/2602.04879
    """
    require_at_least(0.0, most=most)
    is_counted, log_ratio = counted_log_ratio(token_logp, behaviour_logp, mask)
    p, b = (torch.where(is_counted, x, 0.0) for x in (token_logp, behaviour_logp))
    divergences = binary_divergence(p, b, divergence)
    if advantages is None:
        return region_of(is_counted, divergences <= most)
    token_advantages = _per_token(advantages, is_counted)
    moves_out = ((token_advantages > 0) & (log_ratio > 0)) | ((token_advantages < 0) & (log_ratio < 0))
    return region_of(is_counted, ~divergences.isnan() & ((divergences <= most) | ~moves_out))


@validated
def off_policy_sequence_mask(
    token_logp: Float[Tensor, "batch time"],
    behaviour_logp: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch *time_a"],
    mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
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
        OptionError: if ``most`` is not a finite number of at least 0.

    References:
        DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models" (2025),
        https://arxiv.org/abs/2512.02556
    """
    require_at_least(0.0, most=most)
    is_counted, log_ratio = counted_log_ratio(token_logp, behaviour_logp, mask)
    within_bound = -log_ratio.sum(-1) / is_counted.sum(-1) <= most
    if advantages.ndim == 1:
        _per_token(advantages, is_counted)
        return region_of(is_counted, within_bound | ~(advantages < 0))
    return region_of(is_counted, within_bound.unsqueeze(-1) | ~(_per_token(advantages, is_counted) < 0))


def counted_log_ratio(token_logp: Tensor, behaviour_logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The boolean mask, and log policy - log behaviour where it is true, 0 elsewhere; detached."""
    is_counted = as_mask(mask)
    log_ratio = at_least_float32(token_logp.detach()) - at_least_float32(behaviour_logp.detach())
    return is_counted, torch.where(is_counted, log_ratio, 0.0)


def is_within(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Whether each value lies within the bounds; false for NaN.

    Raises:
        OptionError: if the first bound is above the second, or one is NaN.
    """
    least, most = bounds
    if not least <= most:
        raise OptionError(f"bounds are {least} and {most}; give the least first, then the most")
    return (least <= values) & (values <= most)


def log_bounds(bounds: tuple[float, float]) -> tuple[float, float]:
    """Bounds on the logarithm of a ratio, from bounds on the ratio.

    Raises:
        OptionError: if the first bound is negative or above the second, or the second is not above 0.
    """
    least, most = bounds
    if not (0 <= least <= most and most > 0):
        raise OptionError(f"bounds are {least} and {most}; give ratios, the least first, such as 0.5 and 2")
    return -inf if least == 0 else log(least), log(most)


def region_of(is_counted: Tensor, inside: Tensor, weights: Tensor | None = None) -> TrustRegion:
    """The trust region of a decision (and weight) per token [batch, time] or per sequence [batch], without a cap."""
    per_token = inside.ndim == 2
    units = is_counted if per_token else is_counted.any(-1)
    unit_kept = units & inside
    unit_weights = torch.where(unit_kept, unit_kept.to(torch.float32) if weights is None else weights, 0.0)
    is_kept = is_counted & (unit_kept if per_token else unit_kept.unsqueeze(-1))
    return TrustRegion(
        weights=torch.where(is_kept, unit_weights if per_token else unit_weights.unsqueeze(-1), 0.0),
        kept=is_kept,
        removed_share=(units & ~unit_kept).sum().float() / units.sum(),
        capped_share=torch.zeros_like(units).sum().float() / units.sum(),
        effective_sample_size=torch.where(
            unit_kept.any(),
            effective_sample_size(unit_weights.log()),
            torch.where(units.any(), 0.0, torch.nan).float(),
        ),
    )


def _binary_log_probs(token_logp: Tensor, min_rest: float) -> Tensor:
    """Log-probabilities of the token and of all other tokens in total, on a new last axis."""
    token_logp = at_least_float32(token_logp.detach())
    token_logp = torch.where(token_logp > MAX_POSITIVE_LOGP, torch.nan, token_logp.clamp(max=0))
    rest = (-torch.expm1(token_logp)).clamp(min=min_rest)
    return torch.stack([token_logp, rest.log()], dim=-1)


def _per_token(advantages: Tensor, is_counted: Tensor) -> Tensor:
    """The advantages, with an axis of tokens, of size 1 if there is one for each sequence."""
    if advantages.shape not in (is_counted.shape, is_counted.shape[:1]):
        raise ShapeError(
            f"advantages are {tuple(advantages.shape)} and mask {tuple(is_counted.shape)}; "
            "give one for each token, or one for each sequence"
        )
    return advantages if advantages.ndim == 2 else advantages.unsqueeze(-1)
