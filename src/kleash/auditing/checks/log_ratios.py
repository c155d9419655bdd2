"""The function along the log ratio and the importance ratio: its estimator, its curve, and where it is clamped."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import exp, inf, isinf, log
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.conventions import Convention
from kleash.auditing.quantities import is_unbounded, label_of
from kleash.auditing.toy_distributions import make_inputs
from kleash.divergences import divergence
from kleash.errors import KleashError
from kleash.estimators import ESTIMATORS
from kleash.store.audit import CurveRow, Finding, Severity, ZoneKind, ZoneRow

FINE_REACH, CURVE_REACH, REACH = 8, 30, 100
"""Nats on either side of 0: ten points a nat up to the first, two up to the others, the curve up to the second."""
SAMPLED_REACH = 2.3
"""Nats in which values are compared with the estimators."""
BOUNDARY_PRECISION = 1e-5
"""Nats to which the end of a zone is located."""
ORDINARY_LOG_RATIO = 8.0
"""Nats that log ratios reach in training, a factor of 3 000. A fault that occurs only beyond is fragile, not wrong."""
ORDINARY_LOG_WEIGHT = log(2)
"""Every off-policy batch has importance ratios within a factor of two of 1."""
WEIGHT_REACH = 12
"""Nats of log p - log behaviour on either side of 0."""
LOG_RATIO = 0.7
"""log p - log q of the token, the same at every importance ratio."""
OVERFLOW = 80.0
"""Log ratio in nats beyond which the log ratio times its exponential overflows float32."""


class Scan(NamedTuple):
    """Value and gradient at some log ratios."""

    log_ratios: Float64[Tensor, " points"]
    values: Float64[Tensor, " points"]
    gradients: Float64[Tensor, " points"] | None
    """In the policy's log-probability of the token, or in its first logit; None for a value only."""
    claimed_values: Float64[Tensor, " points"] | None = None
    """The claimed divergence, for whole distributions; None for sampled tokens."""
    claimed_gradients: Float64[Tensor, " points"] | None = None
    """Of the claimed divergence in the policy's first logit."""


Probe = Callable[[Tensor], Scan]
"""Evaluates the function at some log ratios."""
Condition = Callable[[Scan], Tensor]
"""Whether each point of a scan is in a zone."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LogRatios:
    """The function along the log ratio."""

    convention: Convention
    estimator: str
    """The estimator that it computes for each sampled token, or ""."""
    zones: tuple[ZoneRow, ...]
    """The ranges in which value or gradient do not follow the log ratio."""
    curve: tuple[CurveRow, ...]
    right_value_is: str
    """The estimator or divergence that ``right_value`` of the curve is."""

    @property
    def name(self) -> str:
        """The log ratio in words."""
        return (
            "log p - log q" if self.convention.sees == "tokens" else "the difference of two tokens' log-odds"
        )

    def reportable_zones(self, kind: ZoneKind) -> list[ZoneRow]:
        """Without zones that cover everything (a constant has its own finding) and those that overflow causes.

        A zone from 0 on in which the value is another number is of a function that reads only one of p and q.
        """
        lowest = -REACH if self.convention.sees == "tokens" else 0.01  # equal distributions have no gradient
        return [
            zone
            for zone in self.zones
            if zone.kind == kind
            and not (zone.low <= lowest and zone.high == inf)
            and not (zone.low > OVERFLOW or zone.high < -OVERFLOW)
            and not (zone.value != 0 and min(abs(zone.low), abs(zone.high)) < 2 * BOUNDARY_PRECISION)
        ]

    def unclamped_range(self, of: Literal["value", "gradient"]) -> str:
        """The clause "as long as log p - log q is between …" for the range in which value or gradient is not clamped.

        "" if it never is.
        """
        # only a loss has a gradient of its own
        zones = self.reportable_zones(of if self.convention.place == "loss" else "value")
        if not is_unbounded(self.convention.claims) or any(zone.low < 0 < zone.high for zone in zones):
            return ""
        low = max((zone.high for zone in zones if zone.high <= 0), default=-inf)
        high = min((zone.low for zone in zones if zone.low >= 0), default=inf)
        if isinf(low) and isinf(high):
            return ""
        return f"as long as {self.name} is {ZoneRow(kind='value', low=low, high=high, value=0.0).span}"


def scan_log_ratios(audited: AuditedFunction) -> LogRatios:
    """Evaluate the function on a grid of log ratios in float32.

    Returns:
        The estimator that it matches, its clamped zones, and its curve.
    """
    sees_tokens = audited.convention.sees == "tokens"

    probe = partial(_scan_tokens if sees_tokens else _scan_distributions, audited)
    scan = probe(_grid(audited, FINE_REACH, CURVE_REACH, REACH))
    estimator = _matching_estimator(scan) if sees_tokens else ""

    zones = partial(_zones, audited, probe, scan)
    curve, right_value_is = _curve(audited.convention, scan, estimator)
    return LogRatios(
        convention=audited.convention,
        estimator=estimator,
        zones=(
            *zones("gradient", _is_dead),
            *(
                zones(
                    "value",
                    lambda part: _equal_up_to_rounding(part.values, _farther(part, probe).values),
                    on_grid=_is_flat_on_grid(scan),
                )
                # a divergence of two distributions is bounded on one side
                if estimator or not audited.reads_tokens
                else ()
            ),
            *zones("gradient is NaN", lambda part: _gradients(part).isnan()),
        ),
        curve=curve,
        right_value_is=right_value_is,
    )


def _grid(audited: AuditedFunction, fine: float, coarse: float, end: float) -> Float64[Tensor, " points"]:
    """Log ratios a tenth of a nat apart, then half a nat; at the end two for a mean, which needs a call for each.

    For whole distributions only positive ones, since each pair has both signs.
    """
    rate = 0.5 if audited.convention.gives == "mean" else 2.0  # points a nat
    parts = ((0.0, fine, 10.0), (fine, coarse, 2.0), (coarse, end + 1 / rate, rate))
    steps = [(low, rate, torch.arange(round((high - low) * rate))) for low, high, rate in parts]
    positive = torch.cat([low + step.double() / rate for low, rate, step in steps])
    return torch.cat([-positive.flip(0)[:-1], positive]) if audited.convention.sees == "tokens" else positive


def _matching_estimator(scan: Scan) -> str:
    """The name of the estimator that the function computes for each sampled token, or ""."""
    is_chosen = scan.log_ratios.abs() < SAMPLED_REACH
    log_ratios, values = scan.log_ratios[is_chosen], scan.values[is_chosen]
    matching = (
        name
        for name, estimator in ESTIMATORS.items()
        if torch.allclose(values, estimator.of(log_ratios), rtol=1e-4, atol=1e-5)
    )
    return next(matching, "")


def two_token_logp(token_logp: Tensor) -> Tensor:
    """[points, 1, 2]: distributions over two tokens, the first with these log-probabilities.

    The logit of the other is finite where the first is certain, as it is in training.
    """
    return torch.stack([token_logp, torch.log1p(-token_logp.exp()).clamp(min=-200)], dim=-1).unsqueeze(1)


def of_first_token(
    audited: AuditedFunction, dtype: torch.dtype, *logits: Float64[Tensor, "points 1 vocab"]
) -> tuple[
    Float64[Tensor, " points"], Float64[Tensor, " points"] | None, Float64[Tensor, "points vocab"] | None
]:
    """The value of the first token for each pair of logits, and its gradients in log p of the token and in p's logits.

    Args:
        audited: the function.
        dtype: of its inputs.
        logits: p's, q's, and those of the behaviour if it is another than p.
    """
    logits_p, logits_q, *behaviour = logits
    logits_p = logits_p.clone().requires_grad_()
    inputs = make_inputs(
        logits_p,
        logits_q,
        torch.zeros(len(logits_p), 1, dtype=torch.int64),
        logits_behaviour=behaviour[0] if behaviour else None,
        dtype=dtype,
    )
    values = audited.values(inputs).sum(-1)
    in_token, in_logits = audited.gradients(values.sum(), (inputs.token_logp, logits_p))
    return (
        values.detach().double(),
        None if in_token is None else in_token.squeeze(-1).double(),
        None if in_logits is None else in_logits.squeeze(1),
    )


def _of_one_token(
    audited: AuditedFunction, dtype: torch.dtype, *token_logps: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Values, and gradients in the token's log-probability, for its log-probabilities under p, q and the behaviour."""
    logits = [two_token_logp(logp) for logp in token_logps]
    values, in_token, in_logits = of_first_token(audited, dtype, *logits)
    if in_token is None and in_logits is not None:  # it computes the log-probability itself, from the logits
        in_token = in_logits[:, 0] / logits[0][:, 0, 1].exp()
    return values, in_token


def _scan_tokens(audited: AuditedFunction, log_ratios: Tensor) -> Scan:
    """One sampled token for each log ratio; its log-probabilities are as close to 0 as the ratio allows."""
    p, q = log_ratios.clamp(max=0) - 0.5, -log_ratios.clamp(min=0) - 0.5
    return Scan(log_ratios, *_of_one_token(audited, torch.float32, p, q))


def _scan_distributions(audited: AuditedFunction, log_odds: Tensor) -> Scan:
    """A distribution over two tokens with these log-odds against a uniform one, over which the average is taken."""
    claims = audited.convention.claims
    skewed = torch.stack([log_odds / 2, -log_odds / 2], dim=-1).unsqueeze(1)
    uniform = torch.zeros_like(skewed)
    logits_p, logits_q = (skewed, uniform) if claims == "reverse_kl" else (uniform, skewed)
    values, _, gradients = of_first_token(audited, torch.float32, logits_p, logits_q)
    logits_p.requires_grad_()
    claimed = divergence(claims, logits_p.log_softmax(-1), logits_q.log_softmax(-1)).squeeze(-1)
    (claimed_gradients,) = torch.autograd.grad(claimed.sum(), logits_p)
    return Scan(
        log_odds,
        values,
        None if gradients is None else gradients[:, 0],
        claimed.detach(),
        claimed_gradients[:, 0, 0],
    )


def _gradients(scan: Scan) -> Float64[Tensor, " points"]:
    """The gradients; infinite without any, which no condition takes for a fault."""
    return torch.full_like(scan.values, inf) if scan.gradients is None else scan.gradients


def _is_dead(scan: Scan) -> Bool[Tensor, " points"]:
    """Whether the gradient is zero at each point and that of the claimed divergence, if known, is not.

    A sampled token's gradient of the size of the log ratio is not dead where float32 rounds it away beside the value.
    """
    gradients = _gradients(scan).abs()
    if scan.claimed_gradients is None:
        return (gradients == 0) & (scan.values.abs() * 2.0**-24 <= scan.log_ratios.abs() / 20)
    claimed = scan.claimed_gradients.abs()
    return (gradients < 1e-3 * claimed) & (claimed > 1e-6)


def _farther(scan: Scan, probe: Probe) -> Scan:
    """The scan a hundredth of a nat farther from 0 at each point."""
    return probe(scan.log_ratios + torch.where(scan.log_ratios < 0, -1e-2, 1e-2))


def _is_flat_on_grid(scan: Scan) -> Bool[Tensor, " points"]:
    """Whether the value at each point is equal to that of a neighbour on the grid, on the same side of 0."""
    u, values = scan.log_ratios, scan.values
    same = _equal_up_to_rounding(values[1:], values[:-1]) & (u[1:] * u[:-1] >= 0)
    false = same.new_zeros(1)
    return torch.cat([same, false]) | torch.cat([false, same])


def _equal_up_to_rounding(values: Tensor, expected: Tensor) -> Bool[Tensor, " points"]:
    """Finite, and equal up to the last bits of float32."""
    rounding = 8 * torch.finfo(torch.float32).eps * values.abs()
    return values.isfinite() & ((values - expected).abs() <= rounding)


def _zones(
    audited: AuditedFunction,
    probe: Probe,
    scan: Scan,
    kind: ZoneKind,
    is_inside: Condition,
    *,
    on_grid: Bool[Tensor, " points"] | None = None,
) -> list[ZoneRow]:
    """The ranges of at least two points that are inside; ``is_inside`` at other points locates their ends.

    ``on_grid`` says which points of the scan are inside, if neighbours tell it more coarsely.
    """
    on_grid = is_inside(scan) if on_grid is None else on_grid
    sections = 2 if audited.convention.gives == "mean" else 16  # a mean needs a call for each point
    u = scan.log_ratios

    def boundaries(ends: Sequence[tuple[int, int]]) -> list[float]:
        """Between a point inside and one outside, for each pair; all pairs share the calls."""
        low, high = u[torch.tensor(ends, dtype=torch.int64).reshape(-1, 2)].unsqueeze(-1).unbind(1)
        while ((high - low).abs() > BOUNDARY_PRECISION).any():
            between = low + (high - low) * torch.linspace(0, 1, sections + 1, dtype=torch.float64)
            are_inside = is_inside(probe(between[:, 1:-1].flatten())).view(len(ends), -1)
            # after between[:, 0], which is inside, the points are inside up to the first that is not
            last_inside = are_inside.long().cumprod(-1).sum(-1, keepdim=True)
            low, high = between.gather(1, last_inside), between.gather(1, last_inside + 1)
        return ((low + high) / 2).flatten().tolist()

    groups = [list(group) for _, group in groupby(range(len(u)), key=on_grid.tolist().__getitem__)]
    ranges = [(group[0], group[-1]) for group in groups if on_grid[group[0]] and len(group) > 1]
    ends = [
        (inside, inside + step)
        for first_and_last in ranges
        for inside, step in zip(first_and_last, (-1, 1), strict=True)
        if 0 <= inside + step < len(u)
    ]
    boundary = dict(zip(ends, boundaries(ends), strict=True))
    return [
        ZoneRow(
            kind=kind,
            low=boundary.get((first, first - 1), -inf if u[0] < 0 else 0.0),
            high=boundary.get((last, last + 1), inf),
            value=scan.values[(first + last) // 2].item(),
        )
        for first, last in ranges
    ]


def _curve(convention: Convention, scan: Scan, estimator: str) -> tuple[tuple[CurveRow, ...], str]:
    """Value and gradient against the log ratio with the correct ones, and the name of the correct value.

    The correct value is the divergence of the pair, or for sampled tokens an estimator. The correct gradient in a
    sampled token's log-probability is the log ratio, up to a constant, which does not change the expectation. For
    sampled tokens there are rows only if KL(p || q) is claimed.
    """
    u, right_values, right_gradients = scan.log_ratios, scan.claimed_values, scan.claimed_gradients
    name = label_of(convention.claims)
    if right_values is None or right_gradients is None:
        if convention.claims != "kl":
            return (), ""
        name = estimator or ("k1" if convention.place == "reward" else "k3")
        right_values, right_gradients = ESTIMATORS[name].of(u), u
    gradients = scan.gradients
    if gradients is None:
        gradients = right_gradients = torch.full_like(u, torch.nan)
    columns = torch.stack([u, scan.values, right_values, gradients, right_gradients], dim=-1)
    names = ("log_ratio", "value", "right_value", "gradient", "right_gradient")
    rows = columns[u.abs() <= CURVE_REACH].tolist()
    return tuple(CurveRow(**dict(zip(names, row, strict=True))) for row in rows), name


def log_ratio_findings(log_ratios: LogRatios, is_claimed: bool, gradient_is_right: bool) -> list[Finding]:
    """Dead and NaN gradients and flat values along the log ratio.

    Args:
        log_ratios: the function along the log ratio.
        is_claimed: whether its value is the claimed divergence where no log ratio is large.
        gradient_is_right: whether its expected gradient is that of the claimed divergence.
    """
    convention, sees_tokens = log_ratios.convention, log_ratios.convention.sees == "tokens"
    if not sees_tokens and not is_claimed:
        return []
    dead, flat = log_ratios.reportable_zones("gradient"), log_ratios.reportable_zones("value")
    nan = [zone for zone in log_ratios.zones if zone.kind == "gradient is NaN"]
    values = " and ".join(dict.fromkeys(f"{zone.value:.4g}" for zone in flat))
    is_bounded = not is_unbounded(convention.claims)
    is_only_logged = sees_tokens and convention.place == "loss" and gradient_is_right
    return [
        Finding(
            kind=kind,
            severity="note" if is_note else _severity(zones, ORDINARY_LOG_RATIO),
            sentence=f"{statement} where {log_ratios.name} is {' or '.join(zone.span for zone in zones)}.",
            where="float32",
            remedy="leave it: the divergence itself is bounded"
            if is_bounded and kind != "nan_gradient"
            else "",
        )
        for kind, zones, statement, is_note in (
            ("dead_gradient", dead, "Its gradient is exactly zero", is_bounded),
            ("flat_value", flat, f"Its value stays at {values}", bool(dead) or is_only_logged or is_bounded),
            ("nan_gradient", nan, "Its gradient is NaN", False),
        )
        if zones
    ]


def _severity(zones: Sequence[ZoneRow], ordinary: float) -> Severity:
    """Of a fault in these zones: "wrong" if the smallest absolute log ratio in any of them is below ``ordinary``."""
    nearest = (0.0 if zone.low < 0 < zone.high else min(abs(zone.low), abs(zone.high)) for zone in zones)
    return "wrong" if min(nearest) < ordinary else "fragile"


def truncated_ratio_zones(audited: AuditedFunction) -> list[ZoneRow]:
    """The ranges of log p - log behaviour in which the value, or else the gradient, does not change with it.

    None if neither changes with it anywhere: then it is not a truncation.
    """
    convention = audited.convention
    if not convention.takes_behaviour or convention.sees != "tokens":
        return []

    def probe(log_weights: Tensor) -> Scan:
        token_logp = log_weights.clamp(max=0) - 0.5
        logps = (token_logp, token_logp - LOG_RATIO, token_logp - log_weights)
        return Scan(log_weights, *_of_one_token(audited, torch.float64, *logps))

    def is_constant(of: Callable[[Scan], Tensor], scan: Scan) -> Tensor:
        return (of(scan) - of(_farther(scan, probe))).abs() <= 1e-4 * of(scan).abs()

    kinds: dict[ZoneKind, Callable[[Scan], Tensor]] = {
        "value along the importance ratio": lambda part: part.values,
        "gradient along the importance ratio": _gradients,
    }
    try:
        scan = probe(_grid(audited, 0, WEIGHT_REACH, WEIGHT_REACH))
        zones = [
            zone
            for kind, of in kinds.items()
            for zone in _zones(audited, probe, scan, kind, partial(is_constant, of))
            if not (isinf(zone.low) and isinf(zone.high))
        ]
    except KleashError:  # the function refuses such large ratios
        return []
    return [zone for zone in zones if zone.kind == zones[0].kind]


def truncated_ratio_findings(zones: Sequence[ZoneRow]) -> list[Finding]:
    """Importance ratios that are truncated."""
    if not zones:
        return []
    ratios = [
        replace(zone, low=-inf if isinf(zone.low) else exp(zone.low), high=exp(zone.high)) for zone in zones
    ]
    return [
        Finding(
            kind="truncated_ratio",
            severity=_severity(zones, ORDINARY_LOG_WEIGHT),
            sentence="Its importance ratio p / behaviour is truncated: "
            f"{' and '.join(zone.span for zone in ratios)} it no longer counts in full, which biases off-policy "
            "estimates.",
            where="off-policy",
        )
    ]
