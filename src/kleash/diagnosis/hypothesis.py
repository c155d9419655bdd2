"""A hypothesis about the differences between trainer and engine, and the probabilities of several."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kleash.diagnosis.causes import HEALTHY, UNEXPLAINED
from kleash.diagnosis.residuals import Family, Floats, Residuals, held_out
from kleash.diagnosis.token_table import TokenTable

PRIOR_NATS = {HEALTHY: 4.0, UNEXPLAINED: -12.0}
"""Log of the prior odds against a cause."""
LEAST_EVIDENCE = 0.5
"""Share of a difference of log-likelihoods that counts at least, however few blocks it comes from."""

SCREENED_TOKENS, CLOSE_NATS = 2000, 30.0
"""Tokens on which all hypotheses are compared, and nats below the best from which one is left out after that."""


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
    lowest: Floats | None = None
    """What the residual of each token is hardly ever below; None for no bound."""
    penalty: float = 0.0
    """Nats for what was fitted to the same data, or chosen among many."""


def probabilities(table: TokenTable, hypotheses: Sequence[Hypothesis]) -> Floats:
    """The probability of each hypothesis by its likelihood on held-out responses; the last one is the free one.

    A hypothesis is compared with the likeliest by the sum of the differences over blocks of tokens, m with a standard
    error s. If both were right models of independent tokens, s^2 would be about 2 m; it is larger because tokens
    depend on each other and no model is right, so that the evidence is min(m, 2 m^2 / s^2).
    """
    prior = np.array([PRIOR_NATS.get(each.cause, 0.0) for each in hypotheses])
    step = -(-len(table.block) // SCREENED_TOKENS)
    screened = _scores(table, hypotheses, np.arange(len(table.block)) % step == 0)
    is_close = screened.sum(axis=1) + prior > (screened.sum(axis=1) + prior).max() - CLOSE_NATS
    is_close[-1] = True
    likely = np.flatnonzero(is_close).tolist()
    scores = (
        _scores(table, [hypotheses[index] for index in likely], table.block >= 0)
        if step > 1
        else screened[likely]
    )
    best = int((scores.sum(axis=1) + prior[likely]).argmax())
    odds = np.full(len(hypotheses), -np.inf)
    for index, score in zip(likely, scores, strict=True):
        difference = scores[best] - score
        mean, variance = float(difference.sum()), len(difference) * float(difference.var(ddof=1))
        consistent = 2 * mean**2 / variance if variance else abs(mean)
        evidence = math.copysign(min(abs(mean), max(consistent, LEAST_EVIDENCE * abs(mean))), mean)
        odds[index] = prior[index] - prior[likely[best]] - evidence
    likelihoods = np.exp(odds - odds.max())
    # Variants of one cause are one hypothesis: the likeliest of them.
    best_of = {hypotheses[index].cause: index for index in np.argsort(likelihoods).tolist()}
    likelihoods[[index for index, each in enumerate(hypotheses) if best_of[each.cause] != index]] = 0.0
    return likelihoods / likelihoods.sum()


def _scores(table: TokenTable, hypotheses: Sequence[Hypothesis], is_used: np.ndarray) -> Floats:
    """Held-out log-likelihoods [hypotheses, blocks] of some blocks of tokens, less the penalties.

    Where a hypothesis says nothing of a token, it is as likely as under the last one.
    """
    numbers = np.unique(table.block[is_used], return_inverse=True)[1]
    rows, fallback = list[Floats](), np.empty(0)
    for hypothesis in reversed(hypotheses):
        residuals = Residuals(
            hypothesis.residual[is_used], hypothesis.unit[is_used], table.rounding_error[is_used]
        )
        lowest = None if hypothesis.lowest is None else hypothesis.lowest[is_used]
        values = held_out(residuals, hypothesis.family, table.fold[is_used], numbers, lowest)
        fallback = fallback if len(fallback) else np.nan_to_num(values, nan=-10.0)
        sums = np.bincount(numbers, weights=np.where(np.isfinite(values), values, fallback))
        rows.insert(0, np.asarray(sums - hypothesis.penalty / len(sums), dtype=np.float64))
    return np.stack(rows)
