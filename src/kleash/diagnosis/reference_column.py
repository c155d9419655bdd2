"""Hypotheses about the reference's column: whether its log-probabilities are of the reference."""

from collections.abc import Iterator

import numpy as np

from kleash.diagnosis.causes import HEALTHY
from kleash.diagnosis.hypothesis import Hypothesis
from kleash.diagnosis.model_scores import ModelScores
from kleash.diagnosis.residuals import DISTINCT, SMALLEST_DIFFERENCE, everywhere, free, rounding, token_unit
from kleash.diagnosis.token_table import TokenTable


def reference_hypotheses(table: TokenTable, scores: ModelScores | None, limit: float) -> Iterator[Hypothesis]:
    """Hypotheses about the reference's column, the healthy one last; none if there is no such column.

    With the models, a healthy column equals the reference's own log-probabilities up to rounding. Without them, all
    that can be seen is whether it fits the trainer's values of a neighbouring token better.

    Args:
        table: the tokens.
        scores: of the models, if they are at hand.
        limit: the largest error of logits that rounding explains, in nats.
    """
    column = table.reference
    if column is None:
        return
    if scores is None:
        families = {offset: free() for offset in (1, -1, 0)}
        for offset, family in families.items():
            when = "next" if offset == 1 else "previous"
            yield Hypothesis(
                cause="reference" if offset else HEALTHY,
                evidence=f"the reference's value of the {when} token fits the trainer's better: the column is shifted",
                residual=table.neighbour(column, offset) - table.trainer,
                family=family,
                unit=token_unit(table.trainer),
            )
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
