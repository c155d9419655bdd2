"""Of which distribution a token's log-probability is: the whole softmax or what sampling left of it."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import Truncated, at_temperature, truncate
from kleash.divergences.truncation import require_valid_limits
from kleash.errors import OptionError, ShapeError


@dataclass(frozen=True, kw_only=True)
class Semantics:
    """The distribution that log-probabilities are of: logits over a temperature, then cut and renormalised.

    Two log-probabilities may be subtracted where these agree. Raises OptionError for values out of range.
    """

    temperature: float = 1.0
    """What the logits were divided by."""
    top_k: int | None = None
    """The k likeliest tokens were kept; None for all."""
    top_p: float | None = None
    """The fewest that hold this mass were kept; None or 1 for all."""
    min_p: float | None = None
    """Those at least so likely relative to the likeliest were kept; None or 0 for all."""

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if not 0 < self.temperature < float("inf"):
            raise OptionError(f"temperature is {self.temperature}; give a finite number above 0")
        require_valid_limits(self.top_k, self.top_p, self.min_p)

    @property
    def cuts(self) -> tuple[str, ...]:
        """The limits that cut something, in words; none for the full softmax."""
        limits = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        nothing = {"top_k": None, "top_p": 1, "min_p": 0}
        return tuple(f"{name} {x:g}" for name, x in limits.items() if x is not None and x != nothing[name])

    @property
    def truncated(self) -> bool:
        """Whether tokens were cut and the rest renormalised; otherwise it is a full softmax."""
        return bool(self.cuts)

    def of(self, logits: Float[Tensor, "*batch vocab"]) -> Truncated:
        """The distribution that these semantics make of ``logits``."""
        return truncate(
            at_temperature(logits, self.temperature), top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )

    def __str__(self) -> str:
        """In words: "the full softmax at temperature 1"."""
        what = f"cut to {', '.join(self.cuts)}" if self.truncated else "the full softmax"
        return f"{what} at temperature {self.temperature:g}"


def require_same_semantics(**sides: Semantics) -> None:
    """Raise unless all log-probabilities that are to be subtracted are of the same kind.

        require_same_semantics(policy=FULL, behaviour=engine, reference=FULL, sampler=settings)

    A ratio of a full policy and a truncated behaviour carries the kept mass as a factor, on every token; one
    across temperatures compares different distributions. Give what the tokens were really drawn with
    (``sampler``) as one more side: engines may return log-probabilities from before temperature and cuts.
    Equal limits keep different tokens of different models: cut the policy to the behaviour's (``restrict``).

    Args:
        sides: a name for the error, and what its log-probabilities are of.

    Raises:
        OptionError: naming the first two that differ, and what to do.
    """
    named = list(sides.items())
    for name, other in named[1:]:
        first, one = named[0]
        said = f"{first} is {one} and {name} {other}"
        if one.temperature != other.temperature:
            raise OptionError(
                f"{said}; divide the logits by one temperature on both sides before the softmax, which no "
                "token's log-probability alone can be moved across"
            )
        if one.truncated != other.truncated:
            raise OptionError(
                f"{said}, so their ratio carries the kept mass as a factor; add its log to the truncated side "
                "(to_full), or cut the other to the same tokens (restrict, to_truncated)"
            )
        if one.cuts != other.cuts:
            raise OptionError(f"{said}; cut both to the tokens that were kept when sampling (restrict)")


@validated
def to_truncated(
    token_logp: Float[Tensor, "*tokens"],
    log_kept_mass: Float[Tensor, "*tokens"],
    kept: Bool[Tensor, "*tokens"] | None = None,
) -> Float[Tensor, "*tokens"]:
    """From the full softmax to the distribution cut and renormalised: ``token_logp - log_kept_mass``.

    Args:
        token_logp: of the sampled tokens.
        log_kept_mass: per token, of *this* side's distribution on the tokens that were kept; at most 0.
        kept: where the token itself was; elsewhere it has probability 0. None if all were, as those drawn are.

    Raises:
        ShapeError: if the shapes differ.
    """
    _require_one_shape(token_logp, log_kept_mass, kept)
    cut = token_logp - log_kept_mass
    return cut if kept is None else torch.where(kept, cut, -torch.inf)


@validated
def to_full(
    token_logp: Float[Tensor, "*tokens"], log_kept_mass: Float[Tensor, "*tokens"]
) -> Float[Tensor, "*tokens"]:
    """From the distribution cut and renormalised to the full softmax: ``token_logp + log_kept_mass``.

    Right for tokens that were kept; of the others, a truncated log-probability tells nothing.

    Raises:
        ShapeError: if the two differ in shape.
    """
    _require_one_shape(token_logp, log_kept_mass, None)
    return token_logp + log_kept_mass


def _require_one_shape(token_logp: Tensor, log_kept_mass: Tensor, kept: Tensor | None) -> None:
    shapes = [tuple(x.shape) for x in (token_logp, log_kept_mass, kept) if x is not None]
    if len(set(shapes)) > 1:
        names = ("token_logp", "log_kept_mass", "kept")
        said = ", ".join(f"{name} {shape}" for name, shape in zip(names, shapes, strict=False))
        raise ShapeError(f"the tokens do not fit together: {said}; give one number per token in each")
