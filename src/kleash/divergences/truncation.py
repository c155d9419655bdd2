"""Temperature and truncated sampling, as functions on distributions."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kleash.arguments import validated
from kleash.errors import OptionError, ShapeError
from kleash.precision import at_least_float32


class Truncated(NamedTuple):
    """A distribution of which only the likelier tokens were kept."""

    logp: Float[Tensor, "*batch vocab"]
    """Log-probabilities of the distribution really drawn from; -inf where a token was cut."""
    kept: Bool[Tensor, "*batch vocab"]
    """Which tokens can still be drawn."""
    log_kept_mass: Float[Tensor, "*batch"]
    """Log of the probability that they had before: what was subtracted from their ``logp``; at most 0."""


@validated
def at_temperature(
    logits: Float[Tensor, "*batch vocab"], temperature: float
) -> Float[Tensor, "*batch vocab"]:
    """log_softmax(logits / temperature): natural log-probabilities, in float32 at least.

    Log-probabilities may stand for logits. Temperature 0 decodes greedily: that is no distribution.

    Raises:
        OptionError: if ``temperature`` is not a finite number above 0.
        ShapeError: if there is no axis, or the numbers are not floating-point.
    """
    if not 0 < temperature < float("inf"):
        raise OptionError(f"temperature is {temperature}; give a finite number above 0")
    return (at_least_float32(logits) / temperature).log_softmax(-1)


@validated
def truncate(
    logp: Float[Tensor, "*batch vocab"],
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Truncated:
    """Keep the likelier tokens and renormalise, as Hugging Face's sampler does.

    In this order, each on what the one before has left:

    - ``top_k``: the k likeliest, and all that tie with the last of them;
    - ``top_p``: the fewest likeliest whose mass exceeds ``top_p``; of equally likely tokens those with
      the higher ids come first;
    - ``min_p``: those at least ``min_p`` times as likely as the likeliest.

    The likeliest token always stays. vLLM cuts with ``min_p`` before the other two: the two agree
    unless ``min_p`` is combined with ``top_p``. Temperature comes before all of them (``at_temperature``).
    What is kept is a constant to the gradient.

    Args:
        logp: natural log-probabilities, normalised over the last axis.
        top_k: at least 1; more than the vocabulary keeps all.
        top_p: above 0, at most 1.
        min_p: from 0 to 1.

    Raises:
        OptionError: if one of the three is outside its range.
        ShapeError: if there is no axis, or the numbers are not floating-point.

    References:
        Holtzman et al., "The Curious Case of Neural Text Degeneration" (2019), https://arxiv.org/abs/1904.09751
        Nguyen et al., "Turning Up the Heat: Min-p Sampling" (2024), https://arxiv.org/abs/2407.01082
    """
    require_ranges(top_k, top_p, min_p)
    logp = at_least_float32(logp)
    seen = logp.detach()
    kept = seen > -torch.inf
    if top_k is not None:
        kept = kept & _among_k(seen, top_k)
    if top_p is not None:
        kept = kept & _in_nucleus(torch.where(kept, seen, -torch.inf), top_p)
    if min_p is not None:
        kept = kept & _likely_enough(torch.where(kept, seen, -torch.inf), min_p)
    return restrict(logp, kept)


@validated
def restrict(logp: Float[Tensor, "*batch vocab"], kept: Bool[Tensor, "*batch vocab"]) -> Truncated:
    """Only the tokens ``kept``, renormalised: those that another distribution, or an engine's mask, has kept.

    Where nothing of ``logp`` is kept, its log kept mass is -inf and its log-probabilities are NaN.

    Raises:
        ShapeError: if the two differ in shape.
    """
    if logp.shape != kept.shape:
        raise ShapeError(
            f"logp is {tuple(logp.shape)} and kept {tuple(kept.shape)}; say for each token of each"
        )
    logp = at_least_float32(logp)
    log_kept_mass = _log_mass(logp, kept)
    return Truncated(torch.where(kept, logp - log_kept_mass.unsqueeze(-1), -torch.inf), kept, log_kept_mass)


def _among_k(logp: Tensor, top_k: int) -> Tensor:
    last = logp.topk(min(top_k, logp.shape[-1]), -1).values[..., -1:]
    return logp >= last


def _in_nucleus(logp: Tensor, top_p: float) -> Tensor:
    rising, order = torch.sort(logp, dim=-1, stable=True)
    dropped = rising.softmax(-1).cumsum(-1) <= 1 - top_p
    dropped[..., -1] = False
    return ~torch.zeros_like(dropped).scatter(-1, order, dropped)


def _likely_enough(logp: Tensor, min_p: float) -> Tensor:
    probs = logp.softmax(-1)
    most = probs.amax(-1, keepdim=True)
    return probs >= min_p * most


def _log_mass(logp: Tensor, kept: Tensor) -> Tensor:
    """From whichever of the two masses is smaller: it is exactly 0 where nothing was cut."""
    probs = logp.exp()
    inside, outside = torch.where(kept, probs, 0.0).sum(-1), torch.where(kept, 0.0, probs).sum(-1)
    little = outside < 0.5
    return torch.where(
        little,
        torch.log1p(-torch.where(little, outside, 0.0)),
        torch.log(torch.where(little, 1.0, inside)),
    )


def require_ranges(top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    """Raise for a limit that means nothing."""
    if top_k is not None and top_k < 1:
        raise OptionError(f"top_k is {top_k}; give at least 1, or leave it out to keep every token")
    if top_p is not None and not 0 < top_p <= 1:
        raise OptionError(f"top_p is {top_p}; give a probability above 0, at most 1")
    if min_p is not None and not 0 <= min_p <= 1:
        raise OptionError(f"min_p is {min_p}; give a share from 0 to 1")
