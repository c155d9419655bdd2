"""Temperature and truncated sampling, as functions on distributions."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kleash.arguments import validated
from kleash.masking import as_mask
from kleash.precision import at_least_float32, nan_unless_normalised, normalised
from kleash.registry import (
    options_given,
    require_above,
    require_at_least,
    require_positive_share,
    require_share,
)


class Truncated(NamedTuple):
    """A distribution truncated to its likelier tokens and renormalised."""

    logp: Float[Tensor, "*batch vocab"]
    """Log-probabilities of the truncated distribution; -inf for removed tokens."""
    kept: Bool[Tensor, "*batch vocab"]
    """Which tokens remain."""
    log_kept_mass: Float[Tensor, "*batch"]
    """Log of the total probability of the remaining tokens before truncation, which was subtracted; at most 0."""


@validated
def at_temperature(
    logits: Float[Tensor, "*batch vocab"], temperature: float
) -> Float[Tensor, "*batch vocab"]:
    """log_softmax(logits / temperature): natural log-probabilities, in at least float32.

    Log-probabilities may be passed as logits. Temperature 0 is greedy decoding, which is not a distribution.

    Raises:
        OptionError: if ``temperature`` is not a finite number above 0.
        ShapeError: if there is no axis, or the numbers are not floating-point.
    """
    require_above(0.0, temperature=temperature)
    return normalised(at_least_float32(logits) / temperature)


@validated
def truncate(
    logp: Float[Tensor, "*batch vocab"],
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    order: Int[Tensor, "*batch vocab"] | None = None,
) -> Truncated:
    """Truncate a distribution by top-k, top-p and min-p and renormalise, as the sampler of transformers does.

    In this order, each applied to the result of the one before:

    - ``top_k``: the k likeliest tokens, and all tokens that tie with the last of them;
    - ``top_p``: the smallest set of likeliest tokens whose mass exceeds ``top_p``; of equally likely tokens those with
      the higher ids come first;
    - ``min_p``: the tokens at least ``min_p`` times as likely as the likeliest.

    The likeliest token always remains. vLLM applies ``min_p`` before the other two; the results agree unless ``min_p``
    is combined with ``top_p``. Temperature comes first (``at_temperature``). The set of remaining tokens is a constant
    to the gradient.

    Args:
        logp: natural log-probabilities, normalised over the last axis.
        top_k: at least 1; above the size of the vocabulary it has no effect.
        top_p: above 0, at most 1, which has no effect.
        min_p: from 0 to 1.
        order: the tokens from the least likely on, if they were sorted before; ``top_p`` sorts them otherwise.

    Raises:
        OptionError: if one of the three is outside its range.
        NotProbabilitiesError: as ``kl``.
        ShapeError: if there is no axis, or the numbers are not floating-point.

    References:
        Holtzman et al., "The Curious Case of Neural Text Degeneration" (2019), https://arxiv.org/abs/1904.09751
        Nguyen et al., "Turning Up the Heat: Min-p Sampling" (2024), https://arxiv.org/abs/2407.01082
    """
    require_valid_limits(top_k, top_p, min_p)
    constant_logp = at_least_float32(logp.detach())
    mask = constant_logp != -torch.inf  # comparisons here keep NaN, so that it stays visible
    if top_k is not None:
        mask = mask & _in_top_k(constant_logp, top_k)
    if top_p is not None and top_p < 1:  # at 1 a sum of 0, of probabilities that underflow, would be removed
        mask = mask & _in_top_p(torch.where(mask, constant_logp, -torch.inf), top_p, order)
    if min_p is not None:
        mask = mask & _above_min_p(torch.where(mask, constant_logp, -torch.inf), min_p)
    return restrict(logp, mask)


@validated
def restrict(logp: Float[Tensor, "*batch vocab"], kept: Bool[Tensor, "*batch vocab"]) -> Truncated:
    """Restrict a distribution to the tokens in ``kept``, for instance those of another distribution, and renormalise.

    If ``logp`` gives these tokens no mass, its log kept mass is -inf and its log-probabilities are NaN.

    Raises:
        NotProbabilitiesError: as ``kl``.
        ShapeError: if the two differ in shape.
    """
    upcast, kept = at_least_float32(logp), as_mask(kept)
    log_kept_mass = nan_unless_normalised(_log_mass(upcast, kept), logp=logp)
    return Truncated(torch.where(kept, upcast - log_kept_mass.unsqueeze(-1), -torch.inf), kept, log_kept_mass)


def _in_top_k(logp: Tensor, top_k: int) -> Tensor:
    """Whether each token is among the ``top_k`` likeliest, ties with the last included."""
    threshold = logp.topk(min(top_k, logp.shape[-1]), -1).values[..., -1:]
    return ~(logp < threshold)


def _in_top_p(logp: Tensor, top_p: float, order: Tensor | None) -> Tensor:
    """Whether each token is in the smallest set of likeliest tokens whose mass exceeds ``top_p``."""
    order = torch.argsort(logp, dim=-1, stable=True) if order is None else order
    is_removed = logp.gather(-1, order).softmax(-1).cumsum(-1) <= 1 - top_p
    is_removed[..., -1] = False
    return ~torch.zeros_like(is_removed).scatter(-1, order, is_removed)


def _above_min_p(logp: Tensor, min_p: float) -> Tensor:
    """Whether each token is at least ``min_p`` times as likely as the likeliest."""
    probs = logp.softmax(-1)
    return ~(probs < min_p * probs.amax(-1, keepdim=True))


def _log_mass(logp: Tensor, mask: Tensor) -> Tensor:
    """Log of the mass where ``mask`` is true, from the smaller of both masses; exactly 0 if it is true everywhere."""
    probs = logp.exp()
    inside, outside = torch.where(mask, probs, 0.0).sum(-1), torch.where(mask, 0.0 * probs, probs).sum(-1)
    is_small = outside < 0.5
    return torch.where(
        is_small,
        torch.log1p(-torch.where(is_small, outside, 0.0)),
        torch.log(torch.where(is_small, 1.0, inside)),
    )


def require_valid_limits(top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    """Raise an OptionError if a truncation limit is outside its range."""
    require_at_least(1, **options_given(top_k=top_k))
    require_positive_share(**options_given(top_p=top_p))
    require_share(**options_given(min_p=min_p))
