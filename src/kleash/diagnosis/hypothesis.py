"""A hypothesis about the differences between trainer and engine, and the probabilities of several."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kleash.diagnosis.causes import HEALTHY, UNEXPLAINED
from kleash.diagnosis.residuals import Family, Floats, Residuals, held_out
from kleash.diagnosis.token_table import TokenTable

PRIOR_NATS = {HEALTHY: 4.0, UNEXPLAINED: -6.0}
"""Log of the prior odds against a cause."""
LEAST_EVIDENCE = 0.3
"""Share of a difference of log-likelihoods that counts at least, however few blocks it comes from."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Hypothesis:
    """A cause that predicts the differences up to residuals of a family."""

    cause: str
    evidence: str
    residual: Floats
    """What the prediction leaves of trainer minus engine, in nats; NaN at tokens that it does not concern."""
    family: Family
    unit: Floats
    """Of the residuals of each token: 1 - p, times a profile."""
    penalty: float = 0.0
    """Nats for what was fitted to the same data, or chosen among many."""
    second_cause: str | None = None
    """A second cause, if both are needed."""
    alike: tuple[str, ...] | None = None
    """Causes that cannot be told from it; None for those of its entry in ``CAUSES``."""

    @property
    def causes(self) -> tuple[str, ...]:
        """Its one or two causes."""
        return tuple(cause for cause in (self.cause, self.second_cause) if cause is not None)


def probabilities(table: TokenTable, hypotheses: Sequence[Hypothesis]) -> Floats:
    """The probability of each hypothesis by its likelihood on held-out responses; the last one is the free one.

    A hypothesis is compared with the likeliest by the sum of the differences over blocks of tokens, m with a standard
    error s. If both were right models of independent tokens, s^2 would be about 2 m; it is larger because tokens
    depend on each other and no model is right, so that the evidence is min(m, 2 m^2 / s^2).
    """
    floor, fallback = table.rounding_error, np.empty(0)
    scores: list[Floats] = []
    for hypothesis in reversed(hypotheses):
        residuals = Residuals(hypothesis.residual, hypothesis.unit, floor)
        values = held_out(residuals, hypothesis.family, table.fold)
        if not len(fallback):
            fallback = np.nan_to_num(values, nan=-10.0)
        values = np.where(np.isfinite(values), values, fallback)
        sums = np.bincount(table.block, weights=values)
        scores.insert(0, sums - hypothesis.penalty / len(sums))
    prior = np.array([PRIOR_NATS.get(each.cause, 0.0) for each in hypotheses])
    totals = np.array([score.sum() for score in scores]) + prior
    best = int(totals.argmax())
    odds = np.zeros(len(scores))
    for index, score in enumerate(scores):
        difference = scores[best] - score
        mean, variance = float(difference.sum()), len(difference) * float(difference.var(ddof=1))
        consistent = 2 * mean**2 / variance if variance else abs(mean)
        evidence = math.copysign(min(abs(mean), max(consistent, LEAST_EVIDENCE * abs(mean))), mean)
        odds[index] = prior[index] - prior[best] - evidence
    likelihoods = np.exp(odds - odds.max())
    # Variants of one cause are one hypothesis: the likeliest of them.
    for index, hypothesis in enumerate(hypotheses):
        same = [k for k, each in enumerate(hypotheses) if each.causes == hypothesis.causes]
        if likelihoods[index] < likelihoods[same].max() or same[int(likelihoods[same].argmax())] != index:
            likelihoods[index] = 0.0
    return likelihoods / likelihoods.sum()
