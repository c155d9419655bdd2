"""Hypotheses that need no model: what one column, or its noise, predicts of the other."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from kleash.diagnosis.causes import HEALTHY, UNEXPLAINED
from kleash.diagnosis.hypothesis import Hypothesis
from kleash.diagnosis.residuals import (
    DISTINCT,
    EQUAL_SHARE,
    MISTAKES,
    SMALLEST_DIFFERENCE,
    Family,
    Floats,
    at_most,
    equal_noise,
    everywhere,
    free,
    most,
    on_some,
    one_sided,
    rounding,
    token_unit,
)
from kleash.diagnosis.token_table import TokenTable, short_dtype

SHIFTS = (1, -1, 2, -2, 3, -3)
"""Tokens by which a column may be shifted."""
BASES = {"to base 2": math.log(2), "to base 10": math.log(10)}
"""Logarithm -> nats for each of its units."""
PROBABILITY_BINS, POSITION_BINS = 12, 4


def _of_differences(
    table: TokenTable, cause: str, evidence: str, family: Family, penalty: float, **changes: Any
) -> Hypothesis:
    """The hypothesis that the differences, or another ``residual``, are errors of a family."""
    fields = {"residual": table.difference, "unit": table.unit, "penalty": penalty} | changes
    return Hypothesis(cause=cause, evidence=evidence, family=family, **fields)


def noise_hypotheses(table: TokenTable, limit: float, everywhere_is: str = "weights") -> Iterator[Hypothesis]:
    """Differences that are rounding, and noise of other sizes or on a part of the tokens.

    Args:
        table: the tokens.
        limit: the largest error of logits that rounding explains, in nats.
        everywhere_is: the cause of errors on all tokens.
    """
    fault, size = max(SMALLEST_DIFFERENCE, DISTINCT * limit), np.abs(table.difference)
    far = size > DISTINCT * np.hypot(limit * table.unit, table.rounding_error)
    few = (
        f"{far.sum():,} of {len(size):,} tokens differ by more than rounding, by up to {size.max():.2g} nats"
    )
    shapes, slope = _shapes(table), _trend(table, table.position)[0]
    for residual, unit in (shapes[0], shapes[-1]):
        what = f"errors of logits of {np.median(size):.2g} nats"
        yield _of_differences(table, HEALTHY, what, rounding(limit), 0.0, residual=residual, unit=unit)
    some = on_some(limit, fault, 0.03, 0.8)
    yield _of_differences(table, "routing", f"{few}; the others round", some, 1.0)
    yield _of_differences(table, "tensor_parallel", few, on_some(limit, fault, 2e-3, 0.02), 1.0)
    for scale in np.geomspace(max(3e-4, 2 * EQUAL_SHARE * limit), 0.3, 8):
        what = (
            f"errors of about {scale:.2g} nats on all log-probabilities, also where a token is nearly certain"
        )
        yield _of_differences(table, "precision", what, equal_noise(limit, float(scale)), 3.0)
    # Of two distributions over the same tokens neither is the larger one everywhere.
    if min(above := _share_above(table, limit), 1 - above) > LEAST_RARE_SIGN:
        every = f"every token differs, by {np.median(size):.2g} nats in the median"
        for residual, unit in shapes[: 3 if slope > STEEPEST else 2]:
            family = everywhere(limit / math.sqrt(DISTINCT))
            yield _of_differences(table, everywhere_is, every, family, 4.0, residual=residual, unit=unit)
        yield from _contexts(table, fault)


def _shapes(table: TokenTable) -> list[tuple[Floats, Floats]]:
    """The differences and their units: plain, less a bias by probability and position, of sizes that grow with it."""
    rest, profile = table.difference - _bias(table, table.trainer), _trend(table, table.position)[1]
    return [(table.difference, table.unit), (rest, table.unit), (table.difference, table.unit * profile)]


def _contexts(table: TokenTable, fault: float) -> Iterator[Hypothesis]:
    """Errors that shrink along the response or the sequence, from a size above that of rounding."""
    trends = [_trend(table, place) for place in (table.position, table.position + table.prompt_tokens)]
    profiles = [(profile, fault / DISTINCT) for slope, profile in trends if slope < STEEPEST]
    for decay in (1.0, 3.0, 10.0, 30.0):
        profiles += [(1 / (1 + table.position / decay) + least, fault) for least in (0.003, 0.03, 0.1)]
    for profile, smallest in profiles:
        fall = float(np.median(profile[table.position > 10]) / np.median(profile[table.position <= 10]))
        what = f"the differences shrink along the response, after 10 tokens to {fall:.2g} times those before"
        yield _of_differences(table, "context", what, most(smallest), 4.0, unit=table.unit * profile)


def unexplained(table: TokenTable) -> Iterator[Hypothesis]:
    """Errors of any sizes and signs; the last one without a bias by probability and position."""
    what = (
        f"the differences, of {np.median(np.abs(table.difference)):.2g} nats in the median, follow no cause better "
        "than errors of any size and sign"
    )
    for residual, unit in reversed(_shapes(table)):
        yield _of_differences(table, UNEXPLAINED, what, free(), 0.0, residual=residual, unit=unit)


def break_hypotheses(table: TokenTable, limit: float) -> Iterator[Hypothesis]:
    """The size of the errors changes at a token, counted from the beginning of the response or of the sequence."""
    for what, place in (
        ("response", table.position),
        ("sequence", table.position + table.prompt_tokens),
    ):
        change = _change(table, place, np.ones(len(place), dtype=bool))
        if change is None:
            continue
        profile = np.ones(len(place))
        for number in (0, 1):
            start, ratio = _change(table, place, table.fold != number) or change
            inside = table.fold == number
            profile[inside] = np.where(place[inside] < start, 1.0, ratio)
        start, ratio = change
        if not max(ratio, 1 / ratio) > SMALLEST_CHANGE:
            continue
        what = (
            f"from token {start} of the {what} on, counted from 0, the differences are "
            f"{max(ratio, 1 / ratio):.2g} times as {'large' if ratio > 1 else 'small'} as before"
        )
        yield _of_differences(table, "break", what, free(), 8.0, unit=table.unit * profile)


SMALLEST_CHANGE = 2.0
"""Ratio of the sizes of errors from which a break is a hypothesis."""


def _log_sizes(table: TokenTable) -> tuple[Floats, np.ndarray]:
    """Log of each error of a logit, and which tokens have one: uncertain ones whose columns differ."""
    size = np.abs(table.difference) / np.maximum(table.unit, 1e-12)
    return np.log(np.maximum(size, 1e-7)), (table.unit > 1e-3) & (table.difference != 0)


def _change(table: TokenTable, place: np.ndarray, is_used: np.ndarray) -> tuple[int, float] | None:
    """The place at which the mean log of the errors changes most, and the ratio of sizes; None with few tokens."""
    logs, is_uncertain = _log_sizes(table)
    chosen = is_used & is_uncertain
    counts = np.bincount(place[chosen], minlength=1).astype(float)
    sums = np.bincount(place[chosen], weights=logs[chosen], minlength=1)
    before, after = counts.cumsum()[:-1], counts.sum() - counts.cumsum()[:-1]
    is_possible = np.minimum(before, after) >= max(20, 0.03 * counts.sum())
    if not is_possible.any():
        return None
    low = sums.cumsum()[:-1] / np.maximum(before, 1)
    high = (sums.sum() - sums.cumsum()[:-1]) / np.maximum(after, 1)
    gain = np.where(is_possible, (high - low) ** 2 * before * after, -1.0)
    best = int(gain.argmax())
    return best + 1, math.exp(float(np.clip(high[best] - low[best], -20, 20)))


STEEPEST = -0.4
"""Power of the position below which errors that shrink with it may be of another context."""


def _trend(table: TokenTable, place: np.ndarray) -> tuple[float, Floats]:
    """The power of a place that the errors grow or shrink with, and its values, whose logarithms have mean 0."""
    logs, is_uncertain = _log_sizes(table)
    if not is_uncertain.any():
        return 0.0, np.ones(len(place))
    log_place = np.log1p(place) - np.log1p(place)[is_uncertain].mean()
    total = float((log_place[is_uncertain] ** 2).sum())
    slope = float((log_place * logs)[is_uncertain].sum()) / total if total else 0.0
    return slope, np.exp(np.clip(slope * log_place, -8, 8))


def _bias(table: TokenTable, column: Floats) -> Floats:
    """The median difference of tokens of like probability and position, by the other fold's tokens."""
    order = np.argsort(np.argsort(column)) * PROBABILITY_BINS // len(column)
    place = table.position * POSITION_BINS // (table.position.max() + 1)
    cell, bias = order * POSITION_BINS + place, np.zeros(len(order))
    for number in (0, 1):
        is_fitted = table.fold != number
        for number_of_cell in np.unique(cell):
            values = (table.difference / np.maximum(table.unit, 1e-12))[is_fitted & (cell == number_of_cell)]
            inside = (table.fold == number) & (cell == number_of_cell)
            if len(values) >= 20:
                bias[inside] = float(np.median(values)) * table.unit[inside]
    return bias


def prediction_hypotheses(table: TokenTable, limit: float) -> Iterator[Hypothesis]:
    """One column predicts the other up to rounding: shifted, cut, in another unit, after a penalty."""
    exact = rounding(limit, MISTAKES)
    for offset in SHIFTS:
        when = f"{'next' if offset > 0 else 'previous'} token" + f" but {abs(offset) - 1}" * (abs(offset) > 1)
        what = f"the trainer's value of the {when} equals the engine's of this one, up to rounding"
        rest = table.neighbour(table.trainer, offset) - table.engine
        yield _of_differences(table, "shift", what, exact, 1.0, residual=rest)
    rest, faulty, example = _realigned(table, limit)
    if faulty:
        what = (
            f"in {faulty} of {table.num_sequences} responses one column has a token more or less from some token on, "
            f"after which its values are {abs(example)} token{'s' * (abs(example) > 1)} apart from the other's"
        )
        penalty = faulty * math.log(6 * len(rest) / table.num_sequences)
        yield _of_differences(table, "insertion", what, exact, penalty, residual=rest)
    correlation = correlated(table)
    if correlation < LARGEST_CORRELATION:
        what = (
            f"the columns do not depend on each other (correlation {correlation:.2f}), as if they were of other "
            "tokens"
        )
        unit = np.ones(len(table.trainer))
        yield _of_differences(table, "column", what, free(), 2.0, residual=table.trainer, unit=unit)
    yield from _of_side(table, "engine", limit)
    yield from _of_side(table, "trainer", limit)


def _of_side(table: TokenTable, name: str, limit: float) -> Iterator[Hypothesis]:
    """One side has logarithms to another base, placeholders, a cut or a penalty."""
    sides = (table.engine, table.trainer, -1) if name == "engine" else (table.trainer, table.engine, 1)
    column, other, sign = sides
    for base, nats in BASES.items():
        what = f"the {name}'s values are logarithms {base}: times {nats:.4g} they equal the other side's"
        rest = sign * (nats * column - other)
        yield _of_differences(table, "column", what, rounding(limit, MISTAKES), 1.0, residual=rest)
    in_run = table.placeholder_runs(column) & (np.abs(table.difference) > FLAGGED_NATS)
    if in_run.any() and not in_run.all():
        yield _placeholders(table, name, column, in_run, limit)
    gaps = np.maximum(sign * table.difference, 0)
    what = (
        f"the {name}'s log-probability is the larger one where they differ, as after a cut that keeps "
        f"{np.exp(-gaps).mean():.1%} of the mass on average"
    )
    shapes = _shapes(table)
    for residual, unit in shapes[::2]:
        family = one_sided(limit, sign, 0.05, 1e-3)
        yield _of_differences(table, "truncation", what, family, 2.0, residual=residual, unit=unit)
    if sign * (_share_above(table, limit) - 0.5) > 0.5 - LEAST_RARE_SIGN:
        rest = sign * shapes[1][0]
        lowest = rest - sign * table.difference - limit * table.unit
        is_apart = np.abs(table.difference) > DISTINCT * np.hypot(limit * table.unit, table.rounding_error)
        both = (np.exp(column) + np.exp(other))[is_apart] > 1
        # Two tokens have 1 at most; after a cut, the likelier tokens have more than what the others leave.
        cause = "truncation" if both.mean() > MISTAKES else "column"
        what = what if cause == "truncation" else f"the {name}'s values may be those of the likeliest tokens"
        yield _of_differences(table, cause, what, free(), 2.0, residual=rest, lowest=lowest)
    for which, is_lower in (
        ("tokens that stand earlier in the prompt or response", table.is_seen),
        ("tokens that stand earlier in the response", table.is_repeated),
    ):
        if is_lower.any() and not is_lower.all():
            what = f"the {name}'s log-probabilities of {which} are lower, those of all others higher"
            rest = table.difference * np.where(is_lower, -1.0, 1.0)
            family = one_sided(limit, sign, 0.4, 0.1)
            yield _of_differences(table, "penalty", what, family, 2.0, residual=rest)


def _placeholders(
    table: TokenTable, name: str, column: Floats, in_run: np.ndarray, limit: float
) -> Hypothesis:
    """Runs of equal values are placeholders; the other tokens differ by rounding."""
    values, runs = np.unique(column[in_run]), int(np.sum(np.diff(np.r_[False, in_run].astype(int)) == 1))
    repetition = (16 if short_dtype(column) is None else 7) * math.log(2)
    kind = "of one token, as padding is" if np.ptp(table.token_id[in_run]) == 0 else "of different tokens"
    what = f"the {name}'s value is {values[0]:g} in {runs} runs of tokens ({in_run.sum()} tokens {kind})"
    penalty = 1.0 + 2.0 * min(len(values), 3) - repetition * (int(in_run.sum()) - runs)
    rest = np.where(in_run, np.nan, table.difference)
    return _of_differences(table, "mask", what, rounding(limit, MISTAKES), penalty, residual=rest)


FLAGGED_NATS = 1e-3
"""Difference from which a token in a run of equal values is taken for a placeholder."""


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
    costs = {
        offset: np.log1p(np.minimum(np.nan_to_num(np.abs(rest) / width, nan=3.6), 1e9) ** 2 / 2)
        for offset, rest in moved.items()
    }
    faulty, example = 0, 0
    starts = np.flatnonzero(np.diff(table.sequence, prepend=-1))
    for start, end in zip(starts, [*starts[1:], len(residual)], strict=True):
        before = costs[0][start:end].cumsum()
        best = (float(before[-1]) - 2 * math.log(6 * (end - start)), 0, 0)
        for offset in SHIFTS if end - start > 2 else ():
            # The token at which the shift begins is a value of its own.
            total = before[:-2] + costs[offset][start:end][::-1].cumsum()[::-1][2:]
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
    """The differences follow a curve of the log-probability, as between temperatures.

    log p at beta = 1/T is (beta - 1) (log p + H) more than at 1, with H the Renyi entropy of order beta at the
    position, whose mean among tokens of one probability is about a (1 - p)^power. The rest is the variation of H, of a
    size that beta - 1 determines.
    """
    above = _share_above(table, limit)
    if (
        not table.difference.any()
        or min(above, 1 - above) < LEAST_RARE_SIGN
        or not correlated(table) > LEAST_CORRELATION
        or table.decimals_error > 0.01
    ):
        return
    for name, column, sign in (("engine", table.engine, 1.0), ("trainer", table.trainer, -1.0)):
        values, column = sign * table.difference, np.minimum(column, 0.0)
        for power in ENTROPY_POWERS:
            curve = token_unit(column) ** power
            basis = np.stack([column, curve], axis=1)
            weight = 1 / np.hypot(curve, 0.01)
            usable = np.abs(values) < 10
            slope, height = np.linalg.lstsq(
                basis[usable] * weight[usable, None], values[usable] * weight[usable], rcond=None
            )[0]
            rest = values - basis @ np.array([slope, height])
            left = float(np.abs(rest[usable]).mean() / np.abs(values[usable]).mean())
            if (
                left > LARGEST_LEFT
                or abs(slope) < SMALLEST_SLOPE
                or slope < SMALLEST_RATIO - 1
                or not 0 < height / slope < 8
            ):
                continue
            ratio = min(1 + slope, 1 / (1 + slope))
            sharper = "trainer" if (slope > 0) == (name == "engine") else "engine"
            what = f"the {sharper} is the sharper one, as at about {ratio:.2f} times the other side's temperature"
            family = at_most(max(LARGEST_SPREAD * abs(slope), limit))
            for residual in (rest, values - sign * _bias(table, column)):
                yield _of_differences(table, "temperature", what, family, 2.0, residual=residual, unit=curve)


def _share_above(table: TokenTable, limit: float) -> float:
    """The share of the differences above rounding in which the trainer's value is the larger one."""
    is_visible = np.abs(table.difference) > np.hypot(limit * table.unit, table.rounding_error)
    return float(np.mean(table.difference[is_visible] > 0)) if is_visible.any() else 0.5


LEAST_RARE_SIGN = 0.03
"""Share of the visible differences with the rarer sign below which they are no temperature's: under one, log p plus an
entropy, of mean 0, is scaled. After a cut, all have one sign."""
LEAST_CORRELATION, LARGEST_CORRELATION = 0.6, 0.4
"""Correlation of the columns at two temperatures, at least; of columns of different tokens, at most."""
LARGEST_LEFT = 0.8
"""Share of the differences in the mean, that the curve of a temperature leaves at most."""
SMALLEST_SLOPE = 0.001
"""Difference of 1/T between the two sides from which temperatures are a hypothesis."""
SMALLEST_RATIO = 0.1
"""Ratio of the two temperatures from which they are a hypothesis."""
ENTROPY_POWERS = (1.0, 0.7, 0.5, 0.35)
"""Powers of 1 - p that the mean of H is proportional to."""
LARGEST_SPREAD = 2.0
"""Standard deviation of the entropy among positions at which the drawn token has one probability, in nats for each
1 - p, at most."""
