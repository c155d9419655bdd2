"""Which distribution a log-probability belongs to: declared settings, conversions, and a check of the numbers."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import Truncated, at_temperature, truncate
from kleash.divergences.truncation import require_valid_limits
from kleash.errors import OptionError
from kleash.masking import as_mask
from kleash.uncertainty import Estimate, clustered_mean, ratio_of_sums

WEIGHT_TOLERANCE = 0.01
"""Mean importance weights within this of 1 are explained by the rounding of inference engines."""
SLOPE_TOLERANCE = 0.05
"""Slopes within this of 1 are explained by a few steps of training."""


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
        if not 0 < self.temperature < float("inf"):
            raise OptionError(f"temperature is {self.temperature}; give a finite number above 0")
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


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Statistics of two columns of log-probabilities of the same tokens, and what they show to be inconsistent."""

    weight: Estimate
    """The mean of policy / behaviour. Over tokens drawn from the behaviour distribution it is 1, for any policy; below
    1, it is the mass that the policy gives to the tokens that could be drawn."""
    slope: Estimate
    """Least-squares slope of the policy's log-probability on the behaviour's; about 1 at equal temperatures as long as
    the policy stays near."""
    above: Estimate
    """The share of tokens whose log-probability is larger under the behaviour distribution than under the policy."""
    ruled_out: int
    """Number of drawn tokens with probability 0 under the policy; the slope leaves them out."""
    findings: tuple[str, ...]
    """Inconsistencies beyond the 95 % intervals, in sentences; empty if there are none."""


@validated
def check_agreement(
    token_logp: Float[Tensor, "batch time"],
    behaviour_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
    *,
    prompts: Integer[Tensor, "batch"] | None = None,
) -> Agreement:
    """Test whether importance weights of two columns can be valid: different truncation, different temperatures.

    A mean weight different from 1 proves (up to the interval) that the behaviour column is not of the distribution
    that the tokens were drawn from, or that this distribution lacks tokens of the policy. A slope different from 1 is
    only an indication: the temperatures differ, or the policy has moved far. Tokens that were drawn from a truncated
    distribution and have the *full* log-probability on both sides cannot be detected; their weights are correct up to
    the ratio of the two kept masses.

    Args:
        token_logp: of the policy, for the drawn tokens.
        behaviour_logp: as returned by the engine.
        mask: true (or 1) for the tokens that count.
        prompts: a label per sequence; sequences of one prompt form a cluster. By default each sequence is a cluster.

    Raises:
        ShapeError: if the shapes do not agree.
    """
    labels = torch.arange(len(token_logp)) if prompts is None else prompts
    is_counted = as_mask(mask).cpu()
    policy, behaviour = (x.detach().cpu().double()[is_counted].numpy() for x in (token_logp, behaviour_logp))
    clusters = labels.cpu().unsqueeze(-1).expand(is_counted.shape)[is_counted].numpy()
    weight = clustered_mean(np.exp(policy - behaviour), clusters, unit="none", lower=0.0)
    possible = policy != -np.inf
    slope = _regression_slope(behaviour[possible], policy[possible], clusters[possible])
    above = clustered_mean(
        (behaviour > policy).astype(float), clusters, unit="probability", lower=0.0, upper=1.0
    )
    ruled_out = int((~possible).sum())
    return Agreement(
        weight=weight,
        slope=slope,
        above=above,
        ruled_out=ruled_out,
        findings=tuple(
            filter(None, (_weight_finding(weight), _slope_finding(slope), _ruled_out_finding(ruled_out)))
        ),
    )


def _regression_slope(x: np.ndarray, y: np.ndarray, clusters: np.ndarray) -> Estimate:
    """The least-squares slope as a ratio of sums over clusters, with a cluster-robust error."""
    names, index = np.unique(clusters, return_inverse=True)
    dx, dy = x - x.mean() if len(x) else x, y - y.mean() if len(y) else y
    products, squares = (np.bincount(index, weights=w, minlength=len(names)) for w in (dx * dy, dx * dx))
    return ratio_of_sums(products, squares, unit="none")


def _with_interval(estimate: Estimate) -> str:
    """The value with its 95 % interval as text."""
    return f"{estimate.value:.3f} (95 %: {estimate.ci95[0]:.3f} to {estimate.ci95[1]:.3f})"


def _weight_finding(weight: Estimate) -> str:
    """The inconsistency shown by the mean importance weight; empty if it is 1 within its interval."""
    mean = f"the weights policy / behaviour average {_with_interval(weight)} instead of 1: "
    if weight.ci95[1] < 1 - WEIGHT_TOLERANCE:
        return mean + (
            "the behaviour was truncated to tokens that hold only so much of the policy, as by top-p, and the policy "
            "was not; truncate both to the same tokens"
        )
    if weight.ci95[0] > 1 + WEIGHT_TOLERANCE:
        return mean + (
            "the behaviour's log-probabilities are not of the distribution that the tokens were drawn from, for "
            "example from before temperature and truncation; configure the engine to return processed log-probabilities"
        )
    return ""


def _slope_finding(slope: Estimate) -> str:
    """The inconsistency shown by the regression slope; empty if it is 1 within its interval."""
    low, high = slope.ci95
    if not (low > 1 + SLOPE_TOLERANCE or high < 1 - SLOPE_TOLERANCE):
        return ""
    return (
        f"the policy's log-probability changes by {_with_interval(slope)} nats for each nat of the behaviour's: it is "
        f"the {'flatter' if slope.value < 1 else 'sharper'} one, as at different temperatures; divide the logits of "
        "both by the sampling temperature, unless training has moved the policy far from the behaviour"
    )


def _ruled_out_finding(ruled_out: int) -> str:
    """The inconsistency shown by drawn tokens of probability 0; empty if there are none."""
    if ruled_out == 0:
        return ""
    noun = "token has" if ruled_out == 1 else "tokens have"
    return (
        f"{ruled_out} drawn {noun} no probability under the policy; truncate the policy to the behaviour's tokens, not "
        "to those of its own truncation"
    )
