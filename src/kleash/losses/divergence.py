"""Losses of any f-divergence, from sampled tokens or sequences."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import DIVERGENCES, Divergence
from kleash.estimators import largest_log_ratio
from kleash.losses.surrogate import sampled_pair, with_pair_gradient
from kleash.registry import look_up


@validated
def divergence_loss(
    token_logp: Float[Tensor, "*tokens_p"],
    token_logq: Float[Tensor, "*tokens_q"],
    mask: Bool[Tensor, "*tokens_m"] | Integer[Tensor, "*tokens_m"],
    *,
    divergence: str | Divergence = "kl",
    weights: Float[Tensor, "*tokens_w"] | None = None,
) -> Float[Tensor, "*tokens_p"]:
    """D(p || q) = E_p f(u) per sample, to be descended on, for any record of ``DIVERGENCES`` or family.

        value                      weights * f(u),    u = log p(x) - log q(x)
        gradient in token_logp     weights * (f + f')(u)
        gradient in token_logq     -weights * f'(u)

    For ``x ~ p`` value and gradients are those of the divergence in expectation; for samples of a
    behaviour distribution, with its importance weights. ``f`` is the non-negative generator, so "kl" has the
    value of k3 and the gradient in ``token_logp`` of ``kl_loss``. A sample is whatever one number
    stands for: a token, or a whole response whose log-probabilities were summed.

    |  | value | gradient in token_logp |
    | masked, or of weight 0 | 0 | 0; what stands there (NaN, inf) is not read |
    | beyond 80 nats either way in float32 (700 in float64; divided by the power of p/q or q/p that
      ``f`` grows with, where that is above 1) | the tangent there | goes on as a line |
    | q rules the sample out | what the record says of mass alone | the same; finite if that is |

    Two things no sample can do. A divergence that is a function of the mean ("hellinger" is its
    square root) trains the mean: the inner sum, 1 - sum sqrt(p q), whose minimum is the same. And
    some of them are hopeless far from q: the variance of "chi_squared" on samples of p grows with the
    square of p/q, that of "reverse_kl" with the square of q/p.

    Args:
        token_logp: log-probabilities of the samples under ``p``, with the gradient.
        token_logq: the same samples under the other distribution; may carry a gradient, and need not.
        mask: true (or 1) for what counts.
        divergence: a name of ``DIVERGENCES``, or a record: ``alpha_record(0.5)``.
        weights: one per sample (``importance_weights``), without a gradient.

    Raises:
        DetachedError: if gradients are enabled and neither side carries one, or if ``weights`` carry one.
        ShapeError: if the tensors differ in shape.
        UnknownNameError: if there is no such divergence.
    """
    record = look_up(DIVERGENCES, divergence, "divergence") if isinstance(divergence, str) else divergence
    pair = sampled_pair(token_logp, token_logq, mask, weights)
    parts = _value_and_slopes(record, pair.log_ratio)
    return with_pair_gradient(parts.value, pair, parts.score, lambda: parts.grad_q)


class _ValueAndSlopes(NamedTuple):
    value: Tensor
    score: Tensor
    grad_q: Tensor


def _value_and_slopes(record: Divergence, u: Tensor) -> _ValueAndSlopes:
    """f, f + f' and -f' for every log ratio, each followed by a line where an exponential would overflow."""
    limit = largest_log_ratio(u.dtype)
    above, below = limit / max(1.0, record.from_p.growth), limit / (1 + record.from_q.growth)
    inside = u.clamp(-below, above)
    value, score = record.of(inside), record.score(inside)
    grad_q = value - score
    excess, deficit = (u - above).clamp(min=0), (u + below).clamp(max=0)
    edges = u.new_tensor([above, above - 1, -below, 1 - below])
    f, s = record.of(edges), record.score(edges)
    value = value + _line(s[0] - f[0], excess) + _line(s[2] - f[2], deficit)
    score = score + _line(s[0] - s[1], excess) + _line(s[3] - s[2], deficit)
    q_is_zero, mass = u == torch.inf, record.where_q_is_zero
    return _ValueAndSlopes(torch.where(q_is_zero, mass, value), torch.where(q_is_zero, mass, score), grad_q)


def _line(slope: Tensor, beyond: Tensor) -> Tensor:
    """``slope * beyond``, and 0 wherever ``beyond`` is."""
    return torch.where(beyond == 0, 0.0, slope * beyond)
