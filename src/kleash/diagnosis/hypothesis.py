"""A hypothesis about the differences between trainer and engine: a cause with its likelihood of the columns."""

import math
from dataclasses import dataclass

from kleash.diagnosis.noise_models import Floats, NoiseFit
from kleash.diagnosis.token_table import TokenTable

DISTINCT = 3.0
"""A fault's errors are at least so many times as large as those that rounding explains."""
SMALLEST_DIFFERENCE = 3e-3
"""Errors of logits, in nats, from which another model, context or routing is a hypothesis."""
UNEXPLAINED = math.log(1 / 60)
"""Log-density of a token about which a hypothesis says nothing: uniform over 60 nats."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Hypothesis:
    """A cause with its log-likelihood of the columns, and what supports it."""

    cause: str
    log_likelihood: Floats
    """Of each response."""
    parameters: int
    """Number of fitted parameters."""
    evidence: str
    is_unmistakable: bool = False
    """Whether the evidence excludes the causes that are otherwise alike."""
    second_cause: str | None = None
    """A second cause, if both are needed."""
    is_superseded: bool = False
    """Whether it is left out where the models are at hand, which test what it stands for one by one."""

    @property
    def score(self) -> float:
        """The log-likelihood with a penalty for the parameters (BIC / -2)."""
        return float(self.log_likelihood.sum()) - self.penalty

    @property
    def penalty(self) -> float:
        """Half the number of parameters times the log of the number of responses."""
        return 0.5 * self.parameters * math.log(max(2, len(self.log_likelihood)))


def from_fit(
    table: TokenTable, cause: str, fit: NoiseFit, evidence: str, more_parameters: int = 0
) -> Hypothesis:
    """The hypothesis of a noise model."""
    return Hypothesis(
        cause=cause,
        log_likelihood=table.by_sequence(fit.log_likelihood),
        parameters=fit.parameters + more_parameters,
        evidence=evidence,
    )
