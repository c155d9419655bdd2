"""Trust regions from importance ratios and estimated KL, for off-policy samples."""

from math import inf
from typing import Literal

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.nn.functional import pad

from kleash.arguments import validated
from kleash.errors import OptionError
from kleash.estimators import ESTIMATORS, Estimator, importance_weights
from kleash.leash.trust_region import TrustRegion, counted_log_ratio, is_within, log_bounds, region_of
from kleash.masking import as_mask
from kleash.registry import look_up

Over = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]
OVER: tuple[Over, ...] = ("token", "sequence_sum", "sequence_mean", "sequence_max")


@validated
def kl_mask(
    token_logp: Float[Tensor, "batch_p time_p"],
    behaviour_logp: Float[Tensor, "batch_b time_b"],
    mask: Bool[Tensor, "batch_m time_m"] | Integer[Tensor, "batch_m time_m"],
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
    if over not in OVER:
        raise OptionError(f"over is {over!r}; there are {', '.join(OVER)}")
    record = look_up(ESTIMATORS, estimator, "estimator") if isinstance(estimator, str) else estimator
    is_counted, log_ratio = counted_log_ratio(token_logp, behaviour_logp, mask)
    values = torch.where(is_counted, record.of(-log_ratio), 0.0)
    if over == "token":
        return region_of(is_counted, is_within(values, bounds))
    if over == "sequence_max":
        values = pad(torch.where(is_counted, values, -inf), (0, 1), value=-inf).amax(-1)
    else:
        values = values.sum(-1) / (is_counted.sum(-1) if over == "sequence_mean" else 1)
    return region_of(is_counted, is_within(values, bounds))


@validated
def truncated_weights(
    token_logp: Float[Tensor, "batch_p time_p"],
    behaviour_logp: Float[Tensor, "batch_b time_b"],
    mask: Bool[Tensor, "batch_m time_m"] | Integer[Tensor, "batch_m time_m"],
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
    _require_level(level)
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
    token_logp: Float[Tensor, "batch_p time_p"],
    behaviour_logp: Float[Tensor, "batch_b time_b"],
    mask: Bool[Tensor, "batch_m time_m"] | Integer[Tensor, "batch_m time_m"],
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
    _require_level(level)
    window = log_bounds(bounds)
    is_counted, log_ratio = counted_log_ratio(token_logp, behaviour_logp, mask)
    log_weight = log_ratio if level == "token" else log_ratio.sum(-1)
    return region_of(is_counted, is_within(log_weight, window), log_weight)


@validated
def geometric_mask(
    token_logp: Float[Tensor, "batch_p time_p"],
    behaviour_logp: Float[Tensor, "batch_b time_b"],
    mask: Bool[Tensor, "batch_m time_m"] | Integer[Tensor, "batch_m time_m"],
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
    window = log_bounds(bounds)
    is_counted, log_ratio = counted_log_ratio(token_logp, behaviour_logp, mask)
    return region_of(is_counted, is_within(log_ratio.sum(-1) / is_counted.sum(-1), window))


def _require_level(level: str) -> None:
    if level not in ("token", "sequence"):
        raise OptionError(f"level is {level!r}; there are token, sequence")
