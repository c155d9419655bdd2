"""What the values of a column are where they cannot be log-probabilities of these tokens."""

import numpy as np

from kleash.diagnosis.causes import likely_cause
from kleash.diagnosis.residuals import Floats
from kleash.diagnosis.rollout_records import ROUNDING_NATS
from kleash.diagnosis.token_table import TokenTable
from kleash.store.rollout_results import LikelyCause

LEAST_ABOVE = 0.02
"""Share of values above 0 from which they are logits, and not a few mistakes."""


def cause_in_values(table: TokenTable) -> LikelyCause | None:
    """The finding of what a column holds in the place of log-probabilities; None if it may hold them."""
    for name, column, other in (
        ("engine", table.engine, table.trainer),
        ("trainer", table.trainer, table.engine),
    ):
        content = _of_column(column, other)
        if content is not None:
            return likely_cause("column", f"the {name}'s values {content}")
        above = column > ROUNDING_NATS
        if above.mean() > LEAST_ABOVE:
            what = f"{above.mean():.0%} of the {name}'s values are above 0, up to {column.max():.3g}: they are logits"
            causes = ("column", "processed") if above.all() else ("processed", "column")
            return likely_cause(causes[0], f"{what}, not log-probabilities", alike=causes[1:])
    return None


def _of_column(column: Floats, other: Floats) -> str | None:
    """What the values of a column are instead of log-probabilities, if they show it."""
    if np.ptp(column) == 0:
        if np.ptp(other) == 0:
            return None
        cause = "was not filled in, or that side is greedy" if column[0] == 0 else "was not filled in"
        return f"are all {column[0]:g}: the column {cause}"
    if column.min() < 0 or column.mean() <= ROUNDING_NATS:
        return None
    if (column == column.round()).all():
        return f"are whole numbers up to {column.max():g}: ranks of the tokens"
    if column.max() <= 1:
        return f"are from {column.min():.2g} to {column.max():.2g}: probabilities, not their logarithms"
    is_negative = np.ptp(other) > 0 and float(np.corrcoef(column, other)[0, 1]) < -0.9
    return (
        "are those of the other side with the other sign: negative log-likelihoods" if is_negative else None
    )
