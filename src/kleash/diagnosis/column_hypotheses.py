"""What needs no model: what the values of a column show, and hypotheses of what one column, or its noise, predicts."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from kleash.diagnosis.causes import HEALTHY, UNEXPLAINED, likely_cause
from kleash.diagnosis.hypothesis import Hypothesis
from kleash.diagnosis.residuals import (
    DISTINCT,
    FREE,
    MISTAKES,
    SMALLEST_DIFFERENCE,
    Family,
    Floats,
    at_most,
    everywhere,
    most,
    on_some,
    rounding,
    token_unit,
)
from kleash.diagnosis.token_table import TokenTable, short_dtype
from kleash.sources.sequences import ROUNDING_NATS
from kleash.store.rollout_results import LikelyCause
from kleash.store.summary import counted

SHIFTS = (1, -1, 2, -2, 3, -3)
"""Tokens by which a column may be shifted."""
BASES = {"to base 2": math.log(2), "to base 10": math.log(10)}
"""Logarithm -> nats for each of its units."""
PROBABILITY_BINS, POSITION_BINS, LEAST_IN_CELL = 12, 4, 20
"""Cells in which a bias is fitted, by rank of the probability and by position, and the tokens that one needs."""
SMALLEST_CHANGE = 2.0
"""Ratio of the sizes of errors from which a break is a hypothesis."""
STEEPEST = -0.4
"""Power of the position below which errors that shrink with it may be of another context."""
FLAGGED_NATS = 1e-3
"""Difference, beside that of rounded columns, from which a token in a run of equal values may be a placeholder."""
ONE_SIGN_PENALTY = 2.0
"""``penalty`` of the hypotheses that one side's values are larger."""
EXCEPTIONS = 0.07
"""Share of the visible differences at which the tokens that a penalty does not lower are lower, at most, by noise."""
LOWEST = -1e3
"""In nats, below all differences."""
LEAST_RARE_SIGN = 0.03
"""Share of the visible differences with the rarer sign below which they are no temperature's: under one, log p plus an
entropy, of mean 0, is scaled. After a cut, all have one sign."""
LEAST_CORRELATION, LARGEST_CORRELATION = 0.6, 0.4
"""Correlation of the columns at two temperatures, at least; of columns of different tokens, at most."""
SMALLEST_UNIT = 1e-4
"""1 - p from which the log-odds of a token are known in spite of the errors of the softmax."""
LARGEST_LEFT = 0.8
"""Share of the differences in the mean, that the curve of a temperature leaves at most."""
SMALLEST_SLOPE = 0.001
"""Difference of 1/T between the two sides from which temperatures are a hypothesis."""
COARSEST = 0.01
"""Rounding of the columns in nats from which their curve is not known."""
SMALLEST_RATIO = 0.1
"""Ratio of the two temperatures from which they are a hypothesis."""
LARGEST_FITTED = 10.0
"""Difference in nats from which a token is left out when the curve of a temperature is fitted."""
LEAST_CURVE = 0.01
"""Added in quadrature to each token's (1 - p)^power, by which the fit divides: near-certain tokens would decide it."""
LARGEST_HEIGHT = 8.0
"""Mean of H over (1 - p)^power, in nats, that a fitted curve stays below."""
ENTROPY_POWERS = (1.0, 0.7, 0.5, 0.35)
"""Powers of 1 - p that the mean of H is proportional to."""
LARGEST_SPREAD = 2.0
"""Standard deviation of the entropy among positions at which the drawn token has one probability, in nats for each
1 - p, at most."""
LEAST_ABOVE = 0.02
"""Share of values above 0 from which they are logits, and not a few mistakes."""


def _of_differences(
    table: TokenTable, cause: str, evidence: str, family: Family, penalty: float, **changes: Any
) -> Hypothesis:
    """The hypothesis that the differences, or another ``residual``, are errors of a family."""
    fields: dict[str, Any] = {"residual": table.difference, "unit": table.unit, "penalty": penalty}
    return Hypothesis(cause=cause, evidence=evidence, family=family, **fields | changes)


def noise_hypotheses(table: TokenTable, limit: float, everywhere_is: str = "weights") -> Iterator[Hypothesis]:
    """Yield hypotheses that the differences are rounding, or noise of other sizes or on a part of the tokens.

    Args:
        table: the tokens.
        limit: the largest error of logits that rounding explains, in nats.
        everywhere_is: the cause of errors on all tokens.
    """
    fault, size = max(SMALLEST_DIFFERENCE, DISTINCT * limit), np.abs(table.difference)
    far = _is_visible(table, limit, DISTINCT)
    few = (
        f"{far.sum():,} of {len(size):,} tokens differ by more than rounding, by up to {size.max():.2g} nats"
    )
    shapes, slope = _shapes(table, table.difference, limit), _trend(table, table.position)[0]
    for residual, unit in (shapes[0], shapes[-1]):
        yield _of_differences(table, HEALTHY, "", rounding(limit), 0.0, residual=residual, unit=unit)
    for cause, low, high in (("routing", 0.03, 0.5), ("tensor_parallel", 2e-3, 0.02)):
        yield _of_differences(table, cause, few, on_some(limit, DISTINCT * limit, low, high), 1.0)
    # Of two distributions over the same tokens neither is the larger one everywhere.
    if min(above := _share_above(table, table.difference, limit), 1 - above) > LEAST_RARE_SIGN:
        every = f"every token differs, by {np.median(size):.2g} nats in the median"
        for residual, unit in shapes[: 3 if slope > STEEPEST else 2]:
            yield _of_differences(
                table,
                everywhere_is,
                every,
                everywhere(limit / math.sqrt(DISTINCT)),
                4.0,
                residual=residual,
                unit=unit,
            )
        yield from _contexts(table, fault)


def _shapes(
    table: TokenTable, values: Floats, limit: float = 0.0, group: Any = 0
) -> list[tuple[Floats, Floats]]:
    """Differences and their units: plain, less a bias by probability and position, of sizes that grow with it.

    Args:
        table: the tokens.
        values: the differences, perhaps with other signs.
        limit: errors of logits that rounding explains, in nats; a bias within them is none.
        group: 0 or 1 for each token: the bias is that of each group.
    """
    bias, profile = _bias(table, values, table.trainer, group), _trend(table, table.position)[1]
    rest = values - bias * np.any(np.abs(bias) > limit * table.unit)
    return [(values, table.unit), (rest, table.unit), (values, table.unit * profile)]


def _contexts(table: TokenTable, fault: float) -> Iterator[Hypothesis]:
    """Yield hypotheses that errors above rounding shrink along the response or the sequence."""
    trends = [_trend(table, place) for place in (table.position, table.position + table.prompt_tokens)]
    profiles = [(profile, fault / DISTINCT) for slope, profile in trends if slope < STEEPEST]
    profiles += [
        (1 / (1 + table.position / decay) + least, fault)
        for decay, least in product((1.0, 3.0, 10.0, 30.0), (0.003, 0.03, 0.1))
    ]
    for profile, smallest in profiles:
        what = "the differences shrink along the response"
        yield _of_differences(table, "context", what, most(smallest), 7.0, unit=table.unit * profile)


def unexplained(table: TokenTable, limit: float) -> Iterator[Hypothesis]:
    """Yield hypotheses that errors have any sizes and signs: sizes that grow along the response, a bias, neither."""
    what = (
        f"the differences, of {np.median(np.abs(table.difference)):.2g} nats in the median, follow no cause better "
        "than errors of any size and sign"
    )
    for residual, unit in reversed(_shapes(table, table.difference, limit)):
        yield _of_differences(table, UNEXPLAINED, what, FREE, 0.0, residual=residual, unit=unit)


def break_hypotheses(table: TokenTable) -> Iterator[Hypothesis]:
    """Yield hypotheses that the errors' size changes at a token, counted from the start of response or sequence."""
    for what, place in (
        ("response", table.position),
        ("sequence", table.position + table.prompt_tokens),
    ):
        start, ratio = _change(table, place)
        larger = max(ratio, 1 / ratio)
        if larger > SMALLEST_CHANGE:
            unit = table.unit * np.where(place < start, 1.0, ratio)
            what = (
                f"from token {start} of the {what} on, counted from 0, the differences are {larger:.2g} times as "
                f"{'large' if ratio > 1 else 'small'} as before"
            )
            yield _of_differences(table, "break", what, FREE, 8.0, unit=unit)


def _log_sizes(table: TokenTable) -> tuple[Floats, np.ndarray]:
    """Log of each error of a logit, and which tokens have one: uncertain ones whose columns differ."""
    size = np.abs(table.difference) / np.maximum(table.unit, 1e-12)
    return np.log(np.maximum(size, 1e-7)), (table.unit > 1e-3) & (table.difference != 0)


def _change(table: TokenTable, place: np.ndarray) -> tuple[int, float]:
    """The place at which the mean log of the errors changes most, and the ratio of sizes; 1 with few tokens."""
    logs, chosen = _log_sizes(table)
    counts = np.bincount(place[chosen], minlength=2).astype(float)
    sums = np.bincount(place[chosen], weights=logs[chosen], minlength=2)
    before, after = counts.cumsum()[:-1], counts.sum() - counts.cumsum()[:-1]
    low = sums.cumsum()[:-1] / np.maximum(before, 1)
    high = (sums.sum() - sums.cumsum()[:-1]) / np.maximum(after, 1)
    is_possible = np.minimum(before, after) >= max(20, 0.03 * counts.sum())
    gain = np.where(is_possible, (high - low) ** 2 * before * after, 0.0)
    best = int(gain.argmax())
    return best + 1, math.exp(float(np.clip(high[best] - low[best], -20, 20))) if gain[best] else 1.0


def _trend(table: TokenTable, place: np.ndarray) -> tuple[float, Floats]:
    """The power of a place that the errors grow or shrink with, and its values, whose logarithms have mean 0."""
    logs, is_uncertain = _log_sizes(table)
    if len(np.unique(place[is_uncertain])) < 2:  # whose logarithms differ from their mean by rounding alone
        return 0.0, np.ones(len(place))
    log_place = np.log1p(place) - np.log1p(place)[is_uncertain].mean()
    slope = float((log_place * logs)[is_uncertain].sum() / (log_place[is_uncertain] ** 2).sum())
    return slope, np.exp(np.clip(slope * log_place, -8, 8))


def _bias(table: TokenTable, values: Floats, column: Floats, group: Any = 0) -> Floats:
    """The median of values at tokens of like probability and position and one group, by the other fold's tokens."""
    order = np.argsort(np.argsort(column)) * PROBABILITY_BINS // len(column)
    place = table.position * POSITION_BINS // (table.position.max() + 1)
    cell, scaled = (order * POSITION_BINS + place) * 2 + group, values / np.maximum(table.unit, 1e-12)
    bias = np.zeros(len(cell))
    for number, each in product((0, 1), np.unique(cell)):
        is_fitted = (table.fold != number) & (cell == each)
        if is_fitted.sum() >= LEAST_IN_CELL:
            bias[(table.fold == number) & (cell == each)] = np.median(scaled[is_fitted])
    return bias * table.unit


def prediction_hypotheses(table: TokenTable, limit: float) -> Iterator[Hypothesis]:
    """Yield hypotheses that one column predicts the other up to rounding: shifted, cut, in another unit, penalised."""
    exact = rounding(limit, MISTAKES)
    for offset in SHIFTS:
        when = "next token" if offset > 0 else "previous token"
        when += f" but {abs(offset) - 1}" if abs(offset) > 1 else ""
        what = f"the trainer's value of the {when} equals the engine's of this one, up to rounding"
        rest = table.neighbour(table.trainer, offset) - table.engine
        yield _of_differences(table, "shift", what, exact, 1.0, residual=rest)
    rest, faulty, example = _realigned(table, limit)
    if faulty:
        what = (
            f"in {faulty} of {table.num_sequences} responses one column has a token more or less from some token on, "
            f"after which its values are {counted(abs(example), 'token')} apart from the other's"
        )
        penalty = faulty * math.log(6 * len(rest) / table.num_sequences)
        yield _of_differences(table, "insertion", what, exact, penalty, residual=rest)
    correlation = correlated(table)
    if correlation < LARGEST_CORRELATION:
        what = (
            f"the columns do not depend on each other (correlation {correlation:.2f}), as if they were of other "
            "tokens"
        )
        ones = np.ones(len(table.trainer))
        yield _of_differences(
            table, "column", what, FREE, 2.0, residual=-table.trainer, unit=ones, lowest=0 * ones
        )
    yield from _of_side(table, "engine", limit)
    yield from _of_side(table, "trainer", limit)


def _of_side(table: TokenTable, name: str, limit: float) -> Iterator[Hypothesis]:
    """Yield hypotheses that one side has logarithms to another base, placeholders, a cut or a penalty."""
    sign = -1 if name == "engine" else 1
    column, other = (table.trainer, table.engine)[::sign]
    for base, nats in BASES.items():
        what = f"the {name}'s values are logarithms {base}: times {nats:.4g} they equal the other side's"
        yield _of_differences(
            table,
            "column",
            what,
            rounding(limit, MISTAKES),
            1.0,
            residual=sign * (nats * column - other),
        )
    # Rounding both columns makes a difference of at most sqrt(6) of its standard deviations.
    in_run = table.placeholder_runs(column) & (
        np.abs(table.difference) > FLAGGED_NATS + math.sqrt(6) * table.rounding_error
    )
    if in_run.any() and not in_run.all():
        yield _placeholders(table, name, column, in_run, limit)
    if correlated(table) > LARGEST_CORRELATION:
        yield from _of_one_sign(table, name, limit)


def _of_one_sign(table: TokenTable, name: str, limit: float) -> Iterator[Hypothesis]:
    """Yield hypotheses that one side's values are larger where they differ, except in some tokens (cut or penalty).

    After a cut the group is empty; a penalty lowers tokens that stand before, and a bias tokens of certain ids, while
    the others rise by one constant at each position.
    """
    sign = -1 if name == "engine" else 1
    mass = np.exp(-np.maximum(sign * table.difference, 0)).mean()
    larger = (
        f"the {name}'s log-probability is the larger one where they differ, as after a cut that keeps "
        f"{100 * mass:.1f} %"
    )
    lower = f"the {name}'s log-probabilities of {{}} are lower, those of all others higher"
    for cause, most_others, what, is_lower in (
        (
            "truncation",
            LEAST_RARE_SIGN,
            f"{larger} of the mass on average",
            np.zeros(len(table.trainer), dtype=bool),
        ),
        (
            "penalty",
            EXCEPTIONS,
            lower.format("tokens that stand earlier in prompt or response"),
            table.is_seen,
        ),
        ("penalty", EXCEPTIONS, lower.format("tokens that stand earlier in the response"), table.is_repeated),
        ("penalty", EXCEPTIONS, lower.format("certain tokens"), _lower_ids(table, sign, limit)),
    ):
        values = table.difference * np.where(is_lower, -1.0, 1.0)
        # share of the expected sign outside and inside the group
        shares = [
            sign * (_share_above(table, values, limit, each) - 0.5) + 0.5 for each in (~is_lower, is_lower)
        ]
        if shares[0] > 1 - most_others and (shares[1] > 0.5 or cause == "truncation"):
            if cause == "truncation" and _is_of_likeliest(table, limit):
                cause = "column"
                what = f"the {name}'s values may be those of the likeliest tokens: they are the larger ones"
            for residual, _ in _shapes(table, values, group=is_lower)[:2]:
                lowest = np.where(is_lower, LOWEST, sign * (residual - values) - limit * table.unit)
                yield _of_differences(
                    table, cause, what, FREE, ONE_SIGN_PENALTY, residual=sign * residual, lowest=lowest
                )


def _lower_ids(table: TokenTable, sign: int, limit: float) -> np.ndarray:
    """Whether the tokens with each token's id are mostly the lower ones of a side, by the other fold's tokens."""
    votes, ids = np.sign(sign * table.difference), np.unique(table.token_id, return_inverse=True)[1]
    is_visible = _is_visible(table, limit)
    sums = [np.bincount(ids, weights=votes * (is_visible & (table.fold != number))) for number in (0, 1)]
    return np.stack(sums)[table.fold, ids] < 0


def _is_of_likeliest(table: TokenTable, limit: float) -> bool:
    """Whether the larger values of one side are not those after a cut.

    Two tokens have 1 together at most; after a cut, the likelier ones have more than the others would leave them.
    """
    is_apart = _is_visible(table, limit, DISTINCT)
    has_more = np.exp(table.trainer) + np.exp(table.engine) > 1
    is_other = np.median(np.abs(table.difference[is_apart]) if is_apart.any() else 0.0) > math.log(2)
    return bool(is_other and (has_more & is_apart).sum() < MISTAKES * is_apart.sum())


def _placeholders(
    table: TokenTable, name: str, column: Floats, in_run: np.ndarray, limit: float
) -> Hypothesis:
    """The hypothesis that repeated values are placeholders, and the other tokens differ by rounding."""
    values, count = np.unique(column[in_run]), int(in_run.sum())
    what = (
        f"the {name}'s value is {' or '.join(f'{value:g}' for value in values[:3])} at "
        f"{counted(count, 'token')} that stand in runs, or first or last in a response"
    )
    bits = 16 if short_dtype(column) is None else 7
    penalty = 1.0 + 2.0 * min(len(values), 3) - bits * math.log(2) * (count - len(values))
    rest = np.where(in_run, np.nan, table.difference)
    return _of_differences(table, "mask", what, rounding(limit, MISTAKES), penalty, residual=rest)


def _realigned(table: TokenTable, limit: float) -> tuple[Floats, int, int]:
    """The differences where, from some token of a response on, one column is shifted; how many responses; one shift.

    In each response the shift and the token are chosen that make the sum of log(|difference|) smallest.
    """
    residual = table.difference.copy()
    small = float(np.quantile(np.abs(residual) / np.maximum(table.unit, 1e-3), 0.1).clip(1e-6, limit))
    width = np.hypot(np.hypot(small * table.unit, 1e-6), table.rounding_error)
    moved = {0: table.difference} | {
        offset: table.neighbour(table.trainer, offset) - table.engine for offset in SHIFTS
    }
    # A token that a shift does not predict costs what it costs as it is.
    costs = {
        offset: np.log1p(
            np.minimum(np.abs(np.where(np.isnan(rest), table.difference, rest)) / width, 1e9) ** 2 / 2
        )
        for offset, rest in moved.items()
    }
    faulty, example = 0, 0
    starts = np.flatnonzero(np.diff(table.sequence, prepend=-1))
    for start, end in zip(starts, [*starts[1:], len(residual)], strict=True):
        before = costs[0][start:end].cumsum()
        best = (float(before[-1]) - 2 * math.log(6 * (end - start)), 0, 0)
        for offset in SHIFTS if end - start > 2 else ():
            # The token at which the shift begins is a value of its own, which costs what it costs as it is.
            total = before[1:-1] + costs[offset][start:end][::-1].cumsum()[::-1][2:]
            best = min(best, (float(total.min()), offset, int(start + total.argmin())))
        if best[1]:
            _, example, place = best
            faulty += 1
            residual[place + 1] = np.nan
            residual[place + 2 : end] = moved[example][place + 2 : end]
    return residual, faulty, example


def correlated(table: TokenTable) -> float:
    """Pearson's correlation of the columns; NaN if one is constant."""
    if np.ptp(table.trainer) == 0 or np.ptp(table.engine) == 0:
        return math.nan
    return float(np.corrcoef(table.trainer, table.engine)[0, 1])


def temperature_hypotheses(table: TokenTable, limit: float) -> Iterator[Hypothesis]:
    """Yield hypotheses that the differences follow a curve of the log-probability, as between temperatures.

    log p at beta = 1/T is (beta - 1) (log p + H) more than at 1, with H the Renyi entropy of order beta at the
    position, whose mean among tokens of one probability is about a (1 - p)^power. The rest is the variation of H, of a
    size that beta - 1 determines.
    """
    above = _share_above(table, table.difference, limit)
    usable = np.abs(table.difference) < LARGEST_FITTED
    if (
        not table.difference[usable].any()
        or min(above, 1 - above) < LEAST_RARE_SIGN
        or not correlated(table) > LEAST_CORRELATION
        or float(np.median(table.rounding_error)) > COARSEST
    ):
        return
    for name, column, sign in (("engine", table.engine, 1.0), ("trainer", table.trainer, -1.0)):
        values, column = sign * table.difference, np.minimum(column, 0.0)
        for power in ENTROPY_POWERS:
            curve = token_unit(column) ** power
            basis = np.stack([column, curve], axis=1)
            weight = np.where(usable, 1 / np.hypot(curve, LEAST_CURVE), 0.0)
            slope, height = np.linalg.lstsq(basis * weight[:, None], values * weight, rcond=None)[0]
            rest = values - basis @ np.array([slope, height])
            left = float(np.abs(rest[usable]).mean() / np.abs(values[usable]).mean())
            if (
                left > LARGEST_LEFT
                or abs(slope) < SMALLEST_SLOPE
                or slope < SMALLEST_RATIO - 1
                or not 0 < height / slope < LARGEST_HEIGHT
            ):
                continue
            family = at_most(max(LARGEST_SPREAD * abs(slope), limit))
            sharper = "trainer" if (slope > 0) == (name == "engine") else "engine"
            ratio = _ratio(table, sharper)
            what = f"the {sharper} is the sharper one, as at about {ratio:.2f} times the other's temperature"
            for residual in (rest, values - _bias(table, values, column)):
                yield _of_differences(table, "temperature", what, family, 2.0, residual=residual, unit=curve)


def _ratio(table: TokenTable, sharper: str) -> float:
    """The ratio of two temperatures: the slope of the log-odds of the flatter side's tokens over the sharper side's.

    With k equally likely alternatives at every position, log(p / (1 - p)) at a temperature of T is
    (log(p / (1 - p)) + (1 - T) log k) / T, with p that of temperature 1.
    """
    pair = np.minimum([table.trainer, table.engine], 0.0)
    is_uncertain = token_unit(pair).min(axis=0) > np.maximum(SMALLEST_UNIT, DISTINCT * table.rounding_error)
    odds = (pair - np.log(token_unit(pair).clip(SMALLEST_UNIT)))[:, is_uncertain]
    covariance = np.cov(odds if sharper == "trainer" else odds[::-1])
    return float(covariance[0, 1] / covariance[0, 0])


def _is_visible(table: TokenTable, limit: float, times: float = 1.0) -> np.ndarray:
    """Which differences are above rounding, or above so many times it."""
    return np.abs(table.difference) > times * np.hypot(limit * table.unit, table.rounding_error)


def _share_above(table: TokenTable, values: Floats, limit: float, among: Any = True) -> float:
    """The share of values above 0 among those of visible differences; a half if there are few."""
    is_visible = _is_visible(table, limit) & among
    return float(np.mean(values[is_visible] > 0)) if is_visible.mean() > MISTAKES else 0.5


def cause_in_values(table: TokenTable) -> LikelyCause | None:
    """The finding of what a column holds in the place of log-probabilities; None if it may hold them."""
    for name, column, other in (
        ("engine", table.engine, table.trainer),
        ("trainer", table.trainer, table.engine),
    ):
        content = _of_column(table, column, other)
        if content is not None:
            return likely_cause("column", f"the {name}'s values {content}")
        above = column > ROUNDING_NATS
        if above.mean() > LEAST_ABOVE:
            what = f"{100 * above.mean():.0f} % of the {name}'s values are above 0, up to {column.max():.3g}"
            causes = ("column", "processed") if above.all() else ("processed", "column")
            return likely_cause(
                causes[0], f"{what}: they are logits, not log-probabilities", alike=causes[1:]
            )
    return None


def _of_column(table: TokenTable, column: Floats, other: Floats) -> str | None:
    """What the values of a column are instead of log-probabilities, if they show it."""
    if np.ptp(column) == 0:
        if np.ptp(other) == 0:
            return None
        cause = "was not filled in, or that side is greedy" if column[0] == 0 else "was not filled in"
        return f"are all {column[0]:g}: the column {cause}"
    starts = np.flatnonzero(np.diff(table.sequence, prepend=-1))
    is_of_responses = [
        np.array_equal(np.maximum.reduceat(each, starts), np.minimum.reduceat(each, starts))
        for each in (column, other)
    ]
    if is_of_responses == [True, False]:
        return "are one number for each response, as its sum or mean, not those of its tokens"
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
