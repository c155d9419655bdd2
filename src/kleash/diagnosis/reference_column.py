"""Hypotheses about the reference's column: whether its log-probabilities are of the reference."""

from collections.abc import Sequence

import numpy as np

from kleash.diagnosis.causes import HEALTHY
from kleash.diagnosis.hypothesis import DISTINCT, SMALLEST_DIFFERENCE, UNEXPLAINED, Hypothesis, from_fit
from kleash.diagnosis.model_scores import ModelScores
from kleash.diagnosis.noise_models import Floats, Residuals, other_model, rounding, token_unit
from kleash.diagnosis.token_table import TokenTable, rounding_error


def reference_hypotheses(
    table: TokenTable, scores: ModelScores | None, largest_scale: float
) -> Sequence[Hypothesis]:
    """Hypotheses about the reference's column, the healthy one first; none if there is no such column.

    With the models, a healthy column equals the reference's own log-probabilities up to rounding. Without them, all
    that can be seen is whether it equals the trainer's column, or fits that of a neighbouring token better.

    Args:
        table: the tokens.
        scores: of the models, if they are at hand.
        largest_scale: the largest error of logits that rounding explains, in nats.
    """
    column = table.reference
    if column is None:
        return ()
    if scores is not None:
        return _with_models(table, column, scores, largest_scale)
    return _without_models(table, column, largest_scale)


def _with_models(
    table: TokenTable, column: Floats, scores: ModelScores, largest_scale: float
) -> list[Hypothesis]:
    """The column against the scores of reference and policy."""
    unit = token_unit(scores.reference)
    error = rounding_error(column)
    rest = Residuals(column - scores.reference, unit, error)
    typical = float(np.median(np.abs(rest.values)))
    away = f"the column differs from the reference's own scores by {typical:.2g} nats in the median"
    of_policy = Residuals(column - scores.policy, token_unit(scores.policy), error)
    as_policy = rounding(of_policy, largest_scale)
    other = other_model(rest, max(SMALLEST_DIFFERENCE, DISTINCT * largest_scale))
    return [
        from_fit(table, HEALTHY, rounding(rest, largest_scale), "the reference's own scores"),
        from_fit(
            table, "reference", as_policy, f"{away}, and equals the policy's: adapters were not disabled"
        ),
        from_fit(table, "reference", other, away),
    ]


def _without_models(table: TokenTable, column: Floats, largest_scale: float) -> list[Hypothesis]:
    """The column against the trainer's."""
    trainer = table.trainer
    unit, smallest = token_unit(trainer), max(SMALLEST_DIFFERENCE, DISTINCT * largest_scale)
    error = np.hypot(rounding_error(column), rounding_error(trainer))
    hypotheses = [
        from_fit(
            table, HEALTHY, other_model(Residuals(column - trainer, unit, error), smallest), "another model"
        ),
        from_fit(
            table,
            "reference",
            rounding(Residuals(column - trainer, unit, error), largest_scale),
            "the reference's column equals the trainer's up to rounding, which is right only before the first update",
            more_parameters=1,
        ),
    ]
    for offset in (1, -1):
        moved = table.neighbour(column, offset)
        is_known = np.isfinite(moved)
        if is_known.sum() < 2:
            continue
        fit = other_model(
            Residuals(moved[is_known] - trainer[is_known], unit[is_known], error[is_known]), smallest
        )
        log_likelihood = np.full(len(moved), UNEXPLAINED)
        log_likelihood[is_known] = fit.log_likelihood
        hypotheses.append(
            Hypothesis(
                cause="reference",
                log_likelihood=table.by_sequence(log_likelihood),
                parameters=2,
                evidence=f"the reference's value of the {'next' if offset == 1 else 'previous'} token fits the "
                "trainer's better: the column is shifted",
            )
        )
    return hypotheses
