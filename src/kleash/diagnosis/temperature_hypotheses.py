"""The hypothesis that the two columns are log-probabilities at two temperatures, without the models."""

import math
from collections.abc import Iterator

import numpy as np

from kleash.diagnosis.hypothesis import DISTINCT, Hypothesis
from kleash.diagnosis.noise_models import Floats, NoiseFit, Residuals, rounding, token_unit
from kleash.diagnosis.token_table import TokenTable


def temperature_hypotheses(
    table: TokenTable, residuals: Residuals, largest_scale: float
) -> Iterator[Hypothesis]:
    """The differences follow a curve of the log-probability, as between temperatures.

    log p at beta = 1/T is (beta - 1) (log p + H) more than at 1, with H the Renyi entropy of order beta at the
    position, whose mean among tokens of one probability is about a (1 - p)^power. The rest is the variation of H, of a
    size that beta - 1 determines.
    """
    sides = {"engine": (table.engine, residuals)}
    is_visible = np.abs(residuals.values) > residuals.scale(largest_scale)
    share_above = float(np.mean(residuals.values[is_visible] > 0)) if is_visible.any() else 0.0
    if min(share_above, 1 - share_above) > LEAST_RARE_SIGN:
        swapped = residuals._replace(values=-residuals.values, unit=token_unit(table.trainer))
        sides["trainer"] = (table.trainer, swapped)
    fits = [
        (fit, slope if side == "engine" else 1 / (1 + slope) - 1)
        for side, (column, rest) in sides.items()
        for power in ENTROPY_POWERS
        for fit, slope in _temperature_fits(np.minimum(column, 0.0), rest, largest_scale, power)
    ]
    if not fits:
        return
    fit, slope = max(fits, key=lambda pair: pair[0].total)
    sharper, flatter = ("trainer", "engine") if slope > 0 else ("engine", "trainer")
    ratio = _ratio_of_temperatures(table, sharper)
    yield Hypothesis(
        cause="temperature",
        log_likelihood=table.by_sequence(fit.log_likelihood),
        parameters=5,
        evidence=f"the {sharper} is the sharper one, as at about {ratio:.2f} times the {flatter}'s temperature: the "
        f"{flatter}'s log-odds of the tokens change by so much for each unit of the {sharper}'s",
    )


def _temperature_fits(
    column: Floats, residuals: Residuals, largest_scale: float, power: float
) -> Iterator[tuple[NoiseFit, float]]:
    """The curve of a temperature for one power of 1 - p, and its slope; none if no temperatures give the slope.

    Args:
        column: the log-probabilities of one side.
        residuals: the other side's minus these, with 1 - p of these.
        largest_scale: of rounding.
        power: of 1 - p.
    """
    curve = residuals.unit**power
    basis = np.stack([column, token_unit(column) ** power], axis=1)
    weight = 1 / np.hypot(curve, 0.01)
    usable = np.abs(residuals.values) < 10
    slope, height = np.linalg.lstsq(
        basis[usable] * weight[usable, None], residuals.values[usable] * weight[usable], rcond=None
    )[0]
    entropy = height / slope if slope else 0.0
    if abs(slope) < SMALLEST_SLOPE or slope < SMALLEST_RATIO - 1 or not 0 < entropy < 8:
        return
    values = residuals.values - basis @ np.array([slope, height])
    for spread in ENTROPY_SPREADS:
        spread_nats = np.hypot(abs(slope) * spread * curve, residuals.extra)
        yield rounding(Residuals(values, residuals.unit, spread_nats), largest_scale), float(slope)


def _ratio_of_temperatures(table: TokenTable, sharper: str) -> float:
    """The slope of the log-odds of the flatter side's tokens over those of the sharper side's, by least squares.

    With k equally likely alternatives at every position, log(p / (1 - p)) at a temperature of T is
    (log(p / (1 - p)) + (1 - T) log k) / T, with p that of temperature 1: the slope is the ratio of the temperatures.
    """
    is_uncertain = np.minimum(token_unit(table.trainer), token_unit(table.engine)) > np.maximum(
        SMALLEST_UNIT, DISTINCT * table.rounding_error
    )
    trainer, engine = (
        np.minimum(column[is_uncertain], 0.0) - np.log(token_unit(column[is_uncertain]))
        for column in (table.trainer, table.engine)
    )
    if len(trainer) < 2 or np.ptp(trainer) == 0 or np.ptp(engine) == 0:
        return math.nan
    covariance = np.cov(trainer, engine)
    return float(covariance[0, 1] / covariance[(0, 0) if sharper == "trainer" else (1, 1)])


SMALLEST_UNIT = 1e-4
"""1 - p from which the log-odds of a token are known in spite of the errors of the softmax."""
LEAST_RARE_SIGN = 0.02
"""Share of the differences with the rarer sign above which the curve may be one of the trainer's column: for an engine
at a temperature far below 1, most of whose tokens are certain. After a cut, all differences have one sign."""
SMALLEST_SLOPE = 0.005
"""Difference of 1/T between the two sides from which temperatures are a hypothesis."""
SMALLEST_RATIO = 0.1
"""Ratio of the two temperatures from which they are a hypothesis."""
ENTROPY_POWERS = (1.0, 0.7, 0.5, 0.35)
"""Powers of 1 - p that the mean of H is proportional to. At a temperature far below 1, where H is the Renyi entropy of
the other side, a token that is nearly certain still has some."""
ENTROPY_SPREADS = (0.25, 0.5, 1.0, 1.5, 2.0)
"""Standard deviations of the entropy among positions at which the drawn token has one probability, in nats for each
1 - p: entropies of language models lie between 0 and about 6 nats."""
