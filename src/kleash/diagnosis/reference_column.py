"""Hypotheses about the reference's column: whether its log-probabilities are of the reference."""

from collections.abc import Iterator

import numpy as np

from kleash.diagnosis.causes import HEALTHY
from kleash.diagnosis.hypothesis import Hypothesis
from kleash.diagnosis.model_scores import ModelScores
from kleash.diagnosis.residuals import DISTINCT, SMALLEST_DIFFERENCE, everywhere, rounding, token_unit
from kleash.diagnosis.token_table import TokenTable


def reference_hypotheses(table: TokenTable, scores: ModelScores | None, limit: float) -> Iterator[Hypothesis]:
    """Hypotheses about the reference's column, the healthy one last; none without such a column or the models.

    A healthy column equals the reference's own log-probabilities up to rounding.

    Args:
        table: the tokens.
        scores: of the models, if they are at hand.
        limit: the largest error of logits that rounding explains, in nats.
    """
    column = table.reference
    if column is None or scores is None:
        return
    rest, unit = column - scores.reference, token_unit(scores.reference)
    typical = float(np.median(np.abs(rest)))
    away = f"the column differs from the reference's own scores by {typical:.2g} nats in the median"
    as_policy = f"{away}, and equals the policy's: adapters were not disabled"
    fault = everywhere(max(SMALLEST_DIFFERENCE, DISTINCT * limit))
    yield Hypothesis(
        cause="reference",
        evidence=as_policy,
        residual=column - scores.policy,
        family=rounding(limit),
        unit=token_unit(scores.policy),
    )
    yield Hypothesis(cause="reference", evidence=away, residual=rest, family=fault, unit=unit)
    yield Hypothesis(cause=HEALTHY, evidence="", residual=rest, family=rounding(limit), unit=unit)
