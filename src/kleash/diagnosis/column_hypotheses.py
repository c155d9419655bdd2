"""Hypotheses that a column does not hold the natural log-probabilities of these tokens."""

import math
from collections.abc import Iterator

import numpy as np

from kleash.diagnosis.hypotheses import IMPOSSIBLE
from kleash.diagnosis.hypothesis import Hypothesis
from kleash.diagnosis.noise_models import Floats, Residuals, rounding, token_unit
from kleash.diagnosis.rollout_records import ROUNDING_NATS
from kleash.diagnosis.token_table import TokenTable

CERTAIN = IMPOSSIBLE + 1
"""Log-likelihood of a token where the values themselves decide: above that of logits."""
BASES = {"2": math.log(2), "10": math.log(10)}
"""Base of a logarithm -> nats for each of its units."""
FALLING = -0.2
"""Correlation of positive values with log-probabilities below which they are no logits, which rise with them."""
LEAST_RESPONSES = 2
"""Responses of several tokens that a column with one value for each response has at least."""
LARGEST_CORRELATION = 0.2
"""Correlation of the columns up to which they may be of different tokens."""


def column_hypotheses(table: TokenTable, largest_scale: float) -> Iterator[Hypothesis]:
    """Hypotheses that a column is constant, in another unit, of the other sign, or of other tokens.

    Args:
        table: the tokens.
        largest_scale: the largest error of logits that rounding explains, in nats.
    """
    sides = (("engine", table.engine, table.trainer), ("trainer", table.trainer, table.engine))
    for name, column, other in sides:
        evidence = _evidence_of_values(column, other) or _evidence_of_sums(table, column, other)
        if evidence is not None:
            yield Hypothesis(
                cause="column",
                log_likelihood=table.by_sequence(np.full(len(column), CERTAIN)),
                parameters=0,
                evidence=f"the {name}'s values {evidence}",
                is_unmistakable=True,
            )
    yield from _base_hypotheses(table, largest_scale)
    yield from _independence_hypotheses(table)


def _evidence_of_values(column: Floats, other: Floats) -> str | None:
    """What the values of a column are instead of log-probabilities, if they show it."""
    if np.ptp(column) == 0:
        if np.ptp(other) == 0:
            return None
        cause = "was not filled in, or that side is greedy" if column[0] == 0 else "was not filled in"
        return f"are all {column[0]:g}: the column {cause}"
    if column.min() >= 0 and column.max() <= 1 and column.mean() > ROUNDING_NATS:
        return f"are from {column.min():.2g} to {column.max():.2g}: probabilities, not their logarithms"
    if column.min() >= 0 and (other <= ROUNDING_NATS).all() and _correlation(column, other) < -0.9:
        return "are those of the other side with the other sign: negative log-likelihoods"
    if column.min() >= 0 and (other <= ROUNDING_NATS).all() and _correlation(column, other) < FALLING:
        return "are above 0 and larger where the other side's log-probabilities are smaller: entropies"
    return None


def _evidence_of_sums(table: TokenTable, column: Floats, other: Floats) -> str | None:
    """Whether a column has one value for each response, in the place of one for each token."""
    first = np.flatnonzero(np.diff(table.sequence, prepend=-1))
    lengths = np.diff(np.r_[first, len(column)])
    if (
        (lengths > 1).sum() < LEAST_RESPONSES
        or (column != np.repeat(column[first], lengths)).any()
        or (other == np.repeat(other[first], lengths)).all()
    ):
        return None
    sums = np.add.reduceat(other, first)
    distances = {
        "the sum over": np.abs(column[first] - sums),
        "the mean of": np.abs(column[first] - sums / lengths),
    }
    statistic = min(distances, key=lambda name: float(np.median(distances[name])))
    return f"are equal within each response, near to {statistic} its log-probabilities; give one value for each token"


def _base_hypotheses(table: TokenTable, largest_scale: float) -> Iterator[Hypothesis]:
    """One column has logarithms to base 2 or 10; the differences in nats are rounding."""
    for base, nats in BASES.items():
        scales = {"engine": (1.0, nats), "trainer": (nats, 1.0)}
        for name, (of_trainer, of_engine) in scales.items():
            engine = of_engine * table.engine
            difference = of_trainer * table.trainer - engine
            fit = rounding(Residuals(difference, token_unit(engine), table.rounding_error), largest_scale)
            yield Hypothesis(
                cause="column",
                log_likelihood=table.by_sequence(fit.log_likelihood),
                parameters=2,
                evidence=f"the {name}'s values are logarithms to base {base}: times {nats:.4g} they equal the other "
                "side's, up to rounding",
            )


def _independence_hypotheses(table: TokenTable) -> Iterator[Hypothesis]:
    """The columns are of different tokens: the trainer's values have their own distribution, whatever the engine's."""
    correlation = _correlation(table.trainer, table.engine)
    mean = -float(table.trainer.mean())
    if mean <= 0 or not -1 < correlation <= LARGEST_CORRELATION:
        return
    yield Hypothesis(
        cause="column",
        log_likelihood=table.by_sequence(np.minimum(table.trainer, 0) / mean - math.log(mean)),
        parameters=1,
        evidence=f"the columns do not depend on each other (correlation {correlation:.2f}), as if they were of other "
        "responses, or of tokens in another order",
    )


def _correlation(first: Floats, second: Floats) -> float:
    """Pearson's correlation; NaN if a column is constant."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])
