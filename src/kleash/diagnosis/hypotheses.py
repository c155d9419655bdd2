"""Hypotheses about the differences between trainer and engine that need no model: likelihoods of the two columns."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kleash.diagnosis.causes import HEALTHY
from kleash.diagnosis.hypothesis import DISTINCT, SMALLEST_DIFFERENCE, UNEXPLAINED, Hypothesis, from_fit
from kleash.diagnosis.noise_models import (
    LARGEST_COARSE_SCALE,
    Floats,
    Residuals,
    coarse_rounding,
    equal_noise,
    few_tokens_far_out,
    log_t,
    other_model,
    rounding,
    rounding_by_sequence,
    some_tokens,
    token_unit,
)
from kleash.diagnosis.rollout_records import ROUNDING_NATS
from kleash.diagnosis.temperature_hypotheses import temperature_hypotheses
from kleash.diagnosis.token_table import TokenTable, decimals_error, short_dtype

SHIFTS = (1, -1, 2, -2, 3, -3)
"""Tokens by which a column may be shifted."""
DECAYS = (1.0, 3.0, 10.0, 30.0)
"""Response tokens over which the effect of another context halves."""


def hypotheses_without_models(table: TokenTable, largest_scale: float) -> list[Hypothesis]:
    """All hypotheses about the two columns that need no model, the healthy one first.

    Args:
        table: the tokens.
        largest_scale: the largest error of logits that rounding explains, in nats.
    """
    residuals = Residuals(table.difference, table.unit, table.rounding_error)
    fault_scale = max(SMALLEST_DIFFERENCE, DISTINCT * largest_scale)
    share_moved = float(np.mean(np.abs(residuals.values) > 0.05))
    typical = float(np.median(np.abs(residuals.values)))
    models = other_model(residuals, fault_scale)
    routed = some_tokens(residuals, largest_scale, fault_scale)
    few = few_tokens_far_out(residuals, largest_scale)
    is_far = np.abs(residuals.values) > DISTINCT * residuals.scale(largest_scale)
    far_responses = len(np.unique(table.sequence[is_far]))
    return [
        *healthy_hypotheses(table, residuals, largest_scale),
        from_fit(
            table,
            "weights",
            models,
            f"every token differs, by {typical:.2g} nats in the median; {share_moved:.0%} by more than 0.05",
        ),
        from_fit(
            table,
            "routing",
            routed,
            f"{routed.share:.0%} of the tokens have errors of logits of {routed.scale:.2g} nats, the others rounding",
        ),
        from_fit(
            table,
            "tensor_parallel",
            few,
            f"{is_far.sum()} of {len(residuals.values)} tokens, in {far_responses} of {len(np.unique(table.sequence))} "
            f"responses, differ by more than rounding, by up to {np.abs(residuals.values).max():.2g} nats",
        ),
        *coarse_hypotheses(table, residuals, largest_scale, fault_scale),
        *shift_hypotheses(table, largest_scale),
        *mask_hypotheses(table, largest_scale),
        *context_hypotheses(table, residuals, largest_scale, fault_scale),
        *truncation_hypotheses(table, residuals, largest_scale, fault_scale),
        *temperature_hypotheses(table, residuals, largest_scale),
        *logit_hypotheses(table),
    ]


def healthy_hypotheses(table: TokenTable, residuals: Residuals, largest_scale: float) -> Iterator[Hypothesis]:
    """Rounding whose size varies among tokens, among responses, or along the response."""
    position = table.position.astype(np.float64)
    fits = [
        rounding(residuals, largest_scale),
        rounding_by_sequence(residuals, largest_scale, table.sequence),
    ]
    for decay in DECAYS:
        size = 1 + position / decay
        fits += [
            rounding(residuals._replace(unit=residuals.unit * weight), largest_scale)
            for weight in (1 / size, size / size.max())
        ]
    for fit in fits:
        yield from_fit(table, HEALTHY, fit, f"errors of logits of {fit.scale:.2g} nats")


COARSE = 1.5
"""Coarse rounding is at least so many times as large as that of the networks."""
SMALLEST_EQUAL_NOISE = 3e-4
SMALLEST_EQUAL_SHARE = 0.03
"""Standard deviations, in nats and as a share of healthy errors of logits, from which errors of one size in all
log-probabilities are a hypothesis."""


def coarse_hypotheses(
    table: TokenTable, residuals: Residuals, largest_scale: float, fault_scale: float
) -> Iterator[Hypothesis]:
    """Every token differs as by errors of lower precision than that of the networks, in logits or log-probabilities."""
    least_visible = DISTINCT * table.decimals_error
    smallest = max(COARSE * largest_scale, least_visible, 1e-4)
    fit = coarse_rounding(residuals, smallest, max(LARGEST_COARSE_SCALE, fault_scale))
    if fit is not None and (np.abs(residuals.values) > residuals.scale(largest_scale)).any():
        evidence = f"errors of logits of {fit.scale:.2g} nats on all tokens, without a tail"
        yield replace(
            from_fit(table, "precision", fit, evidence), is_superseded=fit.scale <= LARGEST_COARSE_SCALE
        )
    smallest = max(SMALLEST_EQUAL_NOISE, SMALLEST_EQUAL_SHARE * largest_scale, least_visible)
    noise = equal_noise(residuals, largest_scale, smallest)
    if noise is not None:
        evidence = (
            f"errors of log-probabilities of {noise.scale:.2g} nats on all tokens, also on those that are nearly "
            "certain, which errors of logits leave unchanged"
        )
        yield from_fit(table, "precision", noise, evidence)


def shift_hypotheses(table: TokenTable, largest_scale: float) -> Iterator[Hypothesis]:
    """The trainer's column, moved by one or a few tokens, equals the engine's up to rounding."""
    for offset in SHIFTS:
        moved = table.neighbour(table.trainer, offset)
        known = np.isfinite(moved)
        if known.sum() < 2:
            continue
        rest = Residuals(moved[known] - table.engine[known], table.unit[known], table.rounding_error[known])
        fit = rounding(rest, largest_scale)
        log_likelihood = np.full(len(moved), UNEXPLAINED)
        log_likelihood[known] = fit.log_likelihood
        when = "next" if offset > 0 else "previous"
        tokens = "token" if abs(offset) == 1 else f"token but {abs(offset) - 1}"
        yield Hypothesis(
            cause="shift",
            log_likelihood=table.by_sequence(log_likelihood),
            parameters=2,
            evidence=f"the trainer's value of the {when} {tokens} equals the engine's of this one, up to rounding",
        )


def mask_hypotheses(table: TokenTable, largest_scale: float) -> Iterator[Hypothesis]:
    """Runs of equal values in a column are placeholders; the other tokens differ by rounding."""
    for name, column in (("engine", table.engine), ("trainer", table.trainer)):
        if decimals_error(column) > MOST_DECIMALS_ERROR:
            continue
        in_run = table.placeholder_runs(column) & (np.abs(table.difference) > FLAGGED_NATS)
        if not in_run.any() or in_run.all():
            continue
        rest = ~in_run
        unmasked = Residuals(table.difference[rest], table.unit[rest], table.rounding_error[rest])
        fit = rounding(unmasked, largest_scale)
        repetition = REPETITION_NATS if short_dtype(column) is None else SHORT_REPETITION_NATS
        log_likelihood = np.full(len(in_run), UNEXPLAINED + repetition)
        log_likelihood[rest] = fit.log_likelihood
        values = np.unique(column[in_run])
        repeated = table.token_id[in_run]
        kind = "of one token, as padding is" if len(np.unique(repeated)) == 1 else "of different tokens"
        runs = int(np.sum(np.diff(np.r_[False, in_run].astype(int)) == 1))
        yield Hypothesis(
            cause="mask",
            log_likelihood=table.by_sequence(log_likelihood),
            parameters=1 + min(len(values), 3),
            evidence=f"the {name}'s value is {values[0]:g} in {runs} runs of tokens ({in_run.sum()} tokens {kind})",
        )


MOST_DECIMALS_ERROR = 0.01
"""Rounding of a column, in nats, from which neighbours are often equal: with at most one decimal."""
FLAGGED_NATS = 1e-3
"""Difference from which a token in a run of equal values is taken for a placeholder."""
REPETITION_NATS = 16 * math.log(2)
SHORT_REPETITION_NATS = 7 * math.log(2)
"""A real log-probability equals that of its neighbour with a probability of about 2^-16; 2^-7 for 16-bit numbers."""


def context_hypotheses(
    table: TokenTable, residuals: Residuals, largest_scale: float, fault_scale: float
) -> Iterator[Hypothesis]:
    """Every token differs, and less so the later it is in the response, down to rounding."""
    for decay in DECAYS:
        weight = 1 / (1 + table.position / decay)
        fits = (other_model(residuals, fault_scale, weight, part * largest_scale) for part in (0.1, 0.3, 1.0))
        fit = max(fits, key=lambda fit: fit.total)
        yield from_fit(
            table,
            "context",
            fit,
            f"the differences shrink along the response, to a half after {decay:.0f} tokens, "
            f"from {fit.scale:.2g} nats at its beginning",
            more_parameters=2,
        )


def truncation_hypotheses(
    table: TokenTable, residuals: Residuals, largest_scale: float, fault_scale: float
) -> Iterator[Hypothesis]:
    """Hypotheses of one side cut and renormalised: it is above the other on every token, by -log of the mass kept.

    The kept mass is nearly 1 where the distribution is narrow, so the differences have the unit 1 - p, as those between
    two models have; but all are of one sign.
    """
    floor = residuals.scale(largest_scale)
    for side, sign, uncut in (("engine", -1.0, table.trainer), ("trainer", 1.0, table.engine)):
        gap = sign * residuals.values
        if not (gap > 0).any():
            continue
        one_sided = other_model(Residuals(np.abs(gap), residuals.unit, residuals.extra), fault_scale)
        shapes: list[tuple[Floats, int, tuple[float, ...]]]
        shapes = [(math.log(2) + one_sided.log_likelihood, one_sided.parameters, HIDDEN_SHARES[:1])]
        is_visible = np.abs(gap) > floor
        if (gap[is_visible] > 0).sum() >= ONE_SIDED * max(1, is_visible.sum()):
            shapes += ((shape, 2, HIDDEN_SHARES) for shape in _bounded_gaps(gap, uncut, floor))
            shapes += ((shape, 3, HIDDEN_SHARES) for shape in _gaps_by_probability(gap, uncut, floor))
            shapes += [(math.log(2) + one_sided.log_likelihood, one_sided.parameters, HIDDEN_SHARES)]
        hidden = -np.abs(gap) / floor - np.log(2 * floor)
        kept_mass = float(np.exp(-np.maximum(gap, 0)).mean())
        fits = [
            (
                np.logaddexp(
                    np.where(gap > 0, math.log1p(-share) + above, -np.inf), math.log(share) + hidden
                ),
                count,
            )
            for above, count, shares in shapes
            for share in shares
        ]
        log_likelihood, parameters = max(fits, key=lambda fit: float(fit[0].sum()))
        yield Hypothesis(
            cause="truncation",
            log_likelihood=table.by_sequence(log_likelihood),
            parameters=parameters + 1,
            evidence=f"the {side}'s log-probability is the larger one on {np.mean(gap > -floor):.1%} of the tokens, as "
            f"after a cut that keeps {kept_mass:.1%} of the mass on average",
        )


def _bounded_gaps(gap: Floats, uncut: Floats, floor: Floats) -> Iterator[Floats]:
    """Log-densities of -log of the kept mass, where it is above rounding.

    The token itself is kept, so that the gap is at most -log p of the token before the cut; and at most a largest one,
    which is -log(top_p) for top-p. Its share of that bound has a beta distribution (a, 1).
    """
    is_visible = gap > floor
    bound = np.maximum.reduce([np.minimum(gap.max(), -uncut), gap, floor])
    log_share = np.log(np.where(is_visible, gap, 1.0) / np.where(is_visible, bound, 1.0))
    for power in (0.25, 0.5, 1.0, 2.0, 4.0):
        yield np.where(is_visible, math.log(power) + (power - 1) * log_share - np.log(bound), -np.inf)


def _gaps_by_probability(gap: Floats, uncut: Floats, floor: Floats) -> Iterator[Floats]:
    """Log-densities of -log of the kept mass whose logarithm is a line in that of 1 - p, where it is above rounding."""
    is_visible = gap > floor
    if is_visible.sum() < 8:
        return
    log_gap = np.log(gap[is_visible])
    basis = np.stack([np.ones(len(log_gap)), np.log(np.maximum(token_unit(uncut[is_visible]), 1e-9))], axis=1)
    rest = log_gap - basis @ np.linalg.lstsq(basis, log_gap, rcond=None)[0]
    spread = float(rest.std())
    if not spread:
        return
    for freedom in (3.0, 30.0):
        for scale in (0.4 * spread, 0.7 * spread, spread):
            density = np.full(len(gap), -np.inf)
            density[is_visible] = log_t(rest, np.full(len(rest), scale), freedom) - log_gap
            yield density


HIDDEN_SHARES = (0.1, 0.3, 0.5)
"""Shares of the tokens of a truncated column whose difference rounding hides."""
ONE_SIDED = 0.9
"""Share of the visible differences of one sign from which more of them may be hidden than a tenth."""


IMPOSSIBLE = 100.0
"""Nats in favour of logits for each value above 0, which has no probability otherwise."""


def logit_hypotheses(table: TokenTable) -> Iterator[Hypothesis]:
    """A column has values above 0, which log-probabilities are not."""
    for name, column in (("engine", table.engine), ("trainer", table.trainer)):
        above = column > ROUNDING_NATS
        if above.any():
            yield Hypothesis(
                cause="processed",
                log_likelihood=table.by_sequence(np.where(above, IMPOSSIBLE, UNEXPLAINED)),
                parameters=0,
                evidence=f"{above.mean():.0%} of the {name}'s values are above 0, up to {column.max():.3g}: they are "
                "logits, not log-probabilities",
                is_unmistakable=True,
            )
