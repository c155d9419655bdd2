"""Which distribution a log-probability belongs to: declared settings and conversions."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import Truncated, at_temperature, truncate
from kleash.divergences.truncation import require_valid_limits
from kleash.errors import OptionError
from kleash.registry import require_above


@dataclass(frozen=True, kw_only=True)
class Semantics:
    """The distribution of log-probabilities: a softmax at a temperature, possibly truncated and renormalised.

    Two log-probabilities may be subtracted if their semantics agree. Raises OptionError for values out of range.
    """

    temperature: float = 1.0
    """Divisor of the logits."""
    top_k: int | None = None
    """Number of likeliest tokens kept; None for all."""
    top_p: float | None = None
    """Mass of the smallest set of likeliest tokens kept; None or 1 for all."""
    min_p: float | None = None
    """Smallest probability kept, relative to the likeliest token; None or 0 for all."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_above(0.0, temperature=self.temperature)
        require_valid_limits(self.top_k, self.top_p, self.min_p)

    @property
    def cuts(self) -> tuple[str, ...]:
        """The limits that have an effect, as text; none for the full softmax."""
        limits = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        no_effect = {"top_k": None, "top_p": 1, "min_p": 0}
        return tuple(f"{name} {x:g}" for name, x in limits.items() if x is not None and x != no_effect[name])

    @property
    def truncated(self) -> bool:
        """Whether tokens were removed and the others renormalised; otherwise it is a full softmax."""
        return bool(self.cuts)

    def of(self, logits: Float[Tensor, "*batch vocab"]) -> Truncated:
        """The distribution of ``logits`` under these settings."""
        return truncate(
            at_temperature(logits, self.temperature), top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )

    def __str__(self) -> str:
        """The settings as text, such as "the full softmax at temperature 1"."""
        distribution = f"cut to {', '.join(self.cuts)}" if self.truncated else "the full softmax"
        return f"{distribution} at temperature {self.temperature:g}"


def require_same_semantics(**sides: Semantics) -> None:
    """Raise an error unless all log-probabilities that are to be subtracted have the same semantics.

        require_same_semantics(policy=FULL, behaviour=engine, reference=FULL, sampler=settings)

    The ratio of a full policy and a truncated behaviour distribution contains the kept mass as a factor, on every
    token; a ratio across temperatures compares different distributions. Pass the settings that the tokens were drawn
    with (``sampler``) as one more side, since engines may return log-probabilities from before temperature and
    truncation. Equal limits keep different tokens of different models: restrict the policy to the tokens of the
    behaviour distribution (``restrict``).

    Args:
        sides: a name for the error message, and the semantics of its log-probabilities.

    Raises:
        OptionError: naming the first two that differ, and what to do.
    """
    names_and_semantics = list(sides.items())
    for name, other in names_and_semantics[1:]:
        first_name, first = names_and_semantics[0]
        difference = f"{first_name} is {first} and {name} {other}"
        if first.temperature != other.temperature:
            raise OptionError(
                f"{difference}; divide the logits by one temperature on both sides before the softmax, which no "
                "token's log-probability alone can be moved across"
            )
        if first.truncated != other.truncated:
            raise OptionError(
                f"{difference}, so their ratio carries the kept mass as a factor; add its log to the truncated side "
                "(to_full), or cut the other to the same tokens (restrict, to_truncated)"
            )
        if first.cuts != other.cuts:
            raise OptionError(f"{difference}; cut both to the tokens that were kept when sampling (restrict)")


@validated
def to_truncated(
    token_logp: Float[Tensor, "*tokens"],
    log_kept_mass: Float[Tensor, "*tokens"],
    kept: Bool[Tensor, "*tokens"] | None = None,
) -> Float[Tensor, "*tokens"]:
    """Convert full-softmax log-probabilities to the truncated distribution: ``token_logp - log_kept_mass``.

    Args:
        token_logp: of the sampled tokens.
        log_kept_mass: per token, the log mass that *this* distribution gives to the kept tokens; at most 0.
        kept: whether the token itself was kept; otherwise it has probability 0. None if all were, as drawn tokens are.

    Raises:
        ShapeError: if the shapes differ.
    """
    truncated_logp = token_logp - log_kept_mass
    return truncated_logp if kept is None else torch.where(kept, truncated_logp, -torch.inf)


@validated
def to_full(
    token_logp: Float[Tensor, "*tokens"], log_kept_mass: Float[Tensor, "*tokens"]
) -> Float[Tensor, "*tokens"]:
    """Convert truncated log-probabilities to the full softmax: ``token_logp + log_kept_mass``.

    Valid for kept tokens. The full log-probability of a removed token cannot be recovered.

    Raises:
        ShapeError: if the two differ in shape.
    """
    return token_logp + log_kept_mass
