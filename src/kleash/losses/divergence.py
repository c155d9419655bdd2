"""Losses of any f-divergence, from sampled tokens or sequences."""

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import Divergence, find_divergence
from kleash.estimators.sampled import largest_log_ratio
from kleash.losses.surrogate import require_gradient, sampled_pair, with_pair_gradient


@validated
def divergence_loss(
    token_logp: Float[Tensor, "*tokens"],
    token_logq: Float[Tensor, "*tokens"],
    mask: Bool[Tensor, "*tokens"] | Integer[Tensor, "*tokens"],
    *,
    divergence: str | Divergence = "kl",
    weights: Float[Tensor, "*tokens"] | None = None,
) -> Float[Tensor, "*tokens"]:
    """A loss per sample whose mean is D(p || q) = E_p f(u), with its gradient, for a record of an f-divergence.

        value                      weights * f(u),    u = log p(x) - log q(x)
        gradient in token_logp     weights * (f + f')(u)
        gradient in token_logq     -weights * f'(u)

    For ``x ~ p`` value and gradients are those of the divergence in expectation, and so they are for samples of a
    behaviour distribution with its importance weights. ``f`` is the non-negative generator, so "kl" has the value of k3
    and the gradient of ``kl_loss`` in ``token_logp``. A sample is a token, or a whole response whose log-probabilities
    were summed.

    |  | value | gradient in token_logp |
    | masked, or of weight 0 | 0 | 0; the inputs (NaN, inf) are not read |
    | abs(u) above 80 in float32 (700 in float64; divided by the power of p/q or q/p with which ``f`` grows, if that is
      above 1) | linear continuation | linear continuation |
    | probability 0 under q | the record's ``where_q_is_zero`` | the same |

    Limitations: "hellinger", the square root of a mean, cannot be estimated from samples; the loss is that of the mean,
    1 - sum sqrt(p q), which has the same minimum. Far from q the variance is large: for samples of p, that of
    "chi_squared" grows with the square of p/q and that of "reverse_kl" with the square of q/p.

    Args:
        token_logp: log-probabilities of the samples under ``p``, with the gradient.
        token_logq: the same samples under the other distribution, with or without a gradient.
        mask: true (or 1) for the samples that count.
        divergence: a name of ``DIVERGENCES``, or a record: ``alpha_record(0.5)``.
        weights: one per sample (``importance_weights``), without a gradient.

    Raises:
        DetachedError: if gradients are enabled and neither side carries one, or if ``weights`` carry one.
        ShapeError: if the tensors differ in shape.
        UnknownNameError: if there is no such divergence.
    """
    record = find_divergence(divergence)
    pair = sampled_pair(token_logp, token_logq, mask, weights)
    require_gradient(token_logp, token_logq)
    value, grad_p, grad_q = _value_and_gradients(record, pair.log_ratio)
    return with_pair_gradient(value, pair, grad_p, lambda: grad_q)


def _value_and_gradients(record: Divergence, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f, f + f' and -f' for every log ratio, continued linearly where an exponential would overflow.

    Beyond the edges the slope of the value is f', that of the score its difference over the last nat before the edge,
    and -f' keeps its value. Where q is 0 (u = inf), value and score are the record's ``where_q_is_zero``.
    """
    limit = largest_log_ratio(u.dtype)
    above, below = limit / max(1.0, record.from_p.growth), limit / (1 + record.from_q.growth)
    clamped_u = u.clamp(-below, above)
    value, score = record.of(clamped_u), record.score(clamped_u)
    grad_q = value - score
    excess, deficit = (u - above).clamp(min=0), (u + below).clamp(max=0)
    edges = u.new_tensor([above, above - 1, -below, 1 - below])
    f, s = record.of(edges), record.score(edges)
    value = value + _linear_term(s[0] - f[0], excess) + _linear_term(s[2] - f[2], deficit)
    score = score + _linear_term(s[0] - s[1], excess) + _linear_term(s[3] - s[2], deficit)
    q_is_zero, mass = u == torch.inf, record.where_q_is_zero
    return torch.where(q_is_zero, mass, value), torch.where(q_is_zero, mass, score), grad_q


def _linear_term(slope: Tensor, distance: Tensor) -> Tensor:
    """``slope * distance``; 0 if either is 0, even if the other is infinite."""
    return torch.where((distance == 0) | (slope == 0), 0.0, slope * distance)
