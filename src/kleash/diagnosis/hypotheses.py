"""Hypotheses about the differences between trainer and engine that need no model: likelihoods of the two columns."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kleash.diagnosis.causes import HEALTHY
from kleash.diagnosis.noise_models import (
    LARGEST_COARSE_SCALE,
    Floats,
    NoiseFit,
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
from kleash.diagnosis.token_table import TokenTable, decimals_error, short_dtype

DISTINCT = 3.0
"""A fault's errors are at least so many times as large as those that rounding explains."""
SMALLEST_DIFFERENCE = 3e-3
"""Errors of logits, in nats, from which another model, context or routing is a hypothesis."""
UNEXPLAINED = math.log(1 / 60)
"""Log-density of a token about which a hypothesis says nothing: uniform over 60 nats."""
SHIFTS = (1, -1, 2, -2, 3, -3)
"""Tokens by which a column may be shifted."""
DECAYS = (1.0, 3.0, 10.0, 30.0)
"""Response tokens over which the effect of another context halves."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Hypothesis:
    """A cause with its log-likelihood of the columns, and what supports it."""

    cause: str
    log_likelihood: Floats
    """Of each response."""
    parameters: int
    """Number of fitted parameters."""
    evidence: str
    is_unmistakable: bool = False
    """Whether the evidence excludes the causes that are otherwise alike."""
    second_cause: str | None = None
    """A second cause, if both are needed."""
    is_superseded: bool = False
    """Whether it is left out where the models are at hand, which test what it stands for one by one."""

    @property
    def score(self) -> float:
        """The log-likelihood with a penalty for the parameters (BIC / -2)."""
        return float(self.log_likelihood.sum()) - self.penalty

    @property
    def penalty(self) -> float:
        """Half the number of parameters times the log of the number of responses."""
        return 0.5 * self.parameters * math.log(max(2, len(self.log_likelihood)))


def from_fit(
    table: TokenTable, cause: str, fit: NoiseFit, evidence: str, more_parameters: int = 0
) -> Hypothesis:
    """The hypothesis of a noise model."""
    return Hypothesis(
        cause=cause,
        log_likelihood=table.by_sequence(fit.log_likelihood),
        parameters=fit.parameters + more_parameters,
        evidence=evidence,
    )


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
    far = int(np.sum(np.abs(residuals.values) > 1))
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
            f"{far} of {len(residuals.values)} tokens differ by more than a nat, the others by rounding",
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
    sharper = "trainer" if slope > 0 else "engine"
    yield Hypothesis(
        cause="temperature",
        log_likelihood=table.by_sequence(fit.log_likelihood),
        parameters=5,
        evidence=f"the trainer's log-probability changes by about {1 + slope:.2f} nats for each nat of the engine's: "
        f"the {sharper} is the sharper one",
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
