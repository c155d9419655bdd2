"""A KL term with estimator, place, gradient, ratio, scope and aggregation, checked against ``kl_rules``."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.errors import OptionError
from kleash.estimators import ESTIMATORS, Estimator, importance_weights
from kleash.estimators.weights import Level
from kleash.kl_rules import TermSpec, refusal, term_spec
from kleash.losses.aggregation import AGGREGATIONS, aggregate, count_of
from kleash.losses.surrogate import (
    attach_weights,
    future_kl_of_tokens,
    kl_of_pair,
    require_gradient,
    sampled_pair,
)
from kleash.masking import Mean
from kleash.precision import at_least_float32
from kleash.registry import look_up

Place = Literal["loss", "reward"]
Gradient = Literal["score", "backpropagated", "ratio_attached", "none"]
Scope = Literal["token", "sequence"]


@dataclass(frozen=True, kw_only=True)
class KLTerm:
    """A KL term of a trainer. Combinations whose gradient is not the named one raise an error (``kl_rules``).

    ``.loss`` and ``.per_token`` use ``kl_loss``, ``future_kl_loss``, ``importance_weights`` and ``aggregate``.
    """

    estimator: str | Estimator = "k3"
    """"k1", "abs", "k2", "k3", a record, or "exact": whole distributions, summed over the vocabulary."""
    place: Place = "loss"
    """"loss": differentiated. "reward": detached, subtracted from the score that multiplies log p."""
    gradient: Gradient | None = None
    """The gradient of a loss: "score" (weights * u on log p, as ``kl_loss``), "backpropagated" (through the estimator,
    with constant weights) or "ratio_attached" (through weights * estimator). None: "score", and "backpropagated" for
    the exact KL. A reward has "none"."""
    ratio: Level | Literal["none"] = "none"
    """Importance weights, if the tokens were not sampled from the policy that is trained."""
    cap: float | None = None
    """The largest weight, which introduces a bias."""
    scope: Scope | None = None
    """"token": the KL of each token, at the prefixes of the batch. "sequence": the KL between responses. None: "token"
    in a loss, "sequence" in a reward. A reward of scope "token" must be credited to its own token only, one of scope
    "sequence" to the whole response or as a return."""
    aggregation: str = "token_mean"
    """A name of ``AGGREGATIONS``."""
    length: int | None = None
    """The length that aggregation "constant" divides by."""
    follows: str = "KL(p ‖ q)"
    """The divergence whose gradient it is meant to have, as in ``Estimator.backpropagated``."""

    def __post_init__(self) -> None:
        """Raise OptionError, with the reason, for a combination that ``kl_rules`` refuses."""
        count_of(torch.ones(1, 1, dtype=torch.bool), self.aggregation, length=self.length)
        reason = refusal(self.spec)
        if reason is not None:
            raise OptionError(reason)

    @property
    def spec(self) -> TermSpec:
        """The term with all defaults filled in."""
        return term_spec(
            self._name,
            self._record,
            place=self.place,
            scope=self.scope,
            gradient=self.gradient,
            ratio=self.ratio,
            cap=self.cap,
            aggregation=self.aggregation,
            sums_sequences=AGGREGATIONS[self.aggregation].sums_sequences,
            follows=self.follows,
        )

    @property
    def rule(self) -> str:
        """The gradient rule: ``gradient`` with the default filled in. It is unrelated to ``kl_rules.Rule``."""
        return self.spec.gradient

    @property
    def _name(self) -> str:
        """The estimator's name in error messages."""
        return self.estimator if isinstance(self.estimator, str) else "this estimator"

    @property
    def _record(self) -> Estimator | None:
        """The record of the estimator; None for the exact KL."""
        records: dict[str, Estimator | None] = {**ESTIMATORS, "exact": None}
        return look_up(records, self.estimator, "estimator")

    def loss(
        self,
        token_logp: Float[Tensor, "batch time"],
        token_logq: Float[Tensor, "batch time"],
        mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
        *,
        behaviour_logp: Float[Tensor, "batch time"] | None = None,
        token_kl: Float[Tensor, "batch time"] | None = None,
    ) -> Mean:
        """The aggregated term of a batch: ``.value``, or ``.share(count)`` for a micro-batch.

        Args:
            token_logp: log-probabilities of the sampled tokens under the policy, with the gradient.
            token_logq: the same tokens under the reference, which is a constant here.
            mask: true (or 1) for the tokens that count.
            behaviour_logp: their log-probabilities under the distribution that they were sampled from; needed if there
                is a ratio.
            token_kl: the exact KL of each token with its gradient; needed if the estimator is "exact".

        Raises:
            OptionError: if an input is missing or not used, or if the term is a reward.
        """
        if self.place == "reward":
            raise OptionError("this term is a reward; subtract beta times its per_token from the rewards")
        per_token = self.per_token(
            token_logp, token_logq, mask, behaviour_logp=behaviour_logp, token_kl=token_kl
        )
        return aggregate(per_token, mask, self.aggregation, length=self.length)

    @validated
    def per_token(
        self,
        token_logp: Float[Tensor, "batch time"],
        token_logq: Float[Tensor, "batch time"],
        mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
        *,
        behaviour_logp: Float[Tensor, "batch time"] | None = None,
        token_kl: Float[Tensor, "batch time"] | None = None,
    ) -> Float[Tensor, "batch time"]:
        """The term of each token in nats: a loss with its gradient, or a detached penalty for the reward.

        Raises:
            OptionError: if an input is missing or not used.
        """
        self._require_input(
            "behaviour_logp", behaviour_logp, self.ratio != "none", f"ratio is {self.ratio!r}"
        )
        self._require_input("token_kl", token_kl, self._record is None, f"estimator is {self._name!r}")
        weights = None
        if behaviour_logp is not None and self.ratio != "none":
            weights = importance_weights(
                token_logp, behaviour_logp, mask, level=self.ratio, cap=self.cap
            ).values
        pair = sampled_pair(token_logp, token_logq.detach(), mask, weights)
        if self.rule == "ratio_attached" and self.ratio != "none":
            pair = attach_weights(pair, self.ratio)
        if token_kl is None:
            estimator = self._record
            assert estimator is not None, "only the exact KL has no record, and it needs token_kl"
            term = kl_of_pair(pair, estimator, backpropagated=self.rule != "score")
        else:
            term = pair.times_weights(torch.where(pair.is_counted, at_least_float32(token_kl), 0.0))
        if self.place == "reward":
            return term.detach()
        if token_kl is None:
            require_gradient(term)
        else:
            require_gradient(token_kl, name="token_kl")
        if self.spec.scope == "token" or self.rule == "ratio_attached":
            return term
        require_gradient(token_logp)
        return term + future_kl_of_tokens(pair.token_logp, term.detach(), pair.mask)

    def _require_input(self, name: str, tensor: Tensor | None, is_needed: bool, reason: str) -> None:
        """Raise OptionError if an input is missing or not used."""
        if is_needed and tensor is None:
            raise OptionError(f"{reason}, so {name} is needed; give it")
        if tensor is not None and not is_needed:
            raise OptionError(f"{reason}, so {name} would not be used; leave it out, or change the term")
