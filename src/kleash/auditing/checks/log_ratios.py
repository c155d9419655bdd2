"""The function along the log ratio from -100 to 100 nats: clamped, dead and NaN ranges, its curve, its estimator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf, isinf
from typing import Literal

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.conventions import Convention
from kleash.auditing.inputs import make_inputs
from kleash.auditing.quantities import UNBOUNDED, divergence_label
from kleash.divergences import divergence
from kleash.estimators import ESTIMATORS
from kleash.store.audit import CurveRow, Finding, Severity, ZoneKind, ZoneRow

REACH = 100.0
"""Largest absolute log ratio of the scan, in nats."""
SPACING = 0.5
"""Distance between the log ratios of the scan, in nats."""
CURVE_REACH, FINE_REACH = 30, 8
"""Nats on either side of the curve, and of the part in which its points are close enough to be drawn without kinks."""
FINE_POINTS = 10
"""Points of a nat of the curve's fine part; elsewhere there are two."""
BOUNDARY_PRECISION = 1e-5
"""Nats to which the end of a zone is located."""
ORDINARY_LOG_RATIO = 8.0
"""Nats that log ratios reach in training, a factor of 3 000. A fault that occurs only beyond is fragile, not wrong."""
OVERFLOW = 80.0
"""Log ratio in nats beyond which the log ratio times its exponential overflows float32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan:
    """Value and gradient at some log ratios."""

    log_ratios: Float64[Tensor, " points"]
    values: Float64[Tensor, " points"]
    gradients: Float64[Tensor, " points"] | None
    """In the policy's log-probability of the token, or in its first logit; None for a value only."""
    claimed_gradients: Float64[Tensor, " points"] | None = None
    """The same of the claimed divergence, for whole distributions; None for sampled tokens."""


Probe = Callable[[Tensor], Scan]
"""Evaluates the function at some log ratios."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LogRatios:
    """The function along the log ratio."""

    convention: Convention
    estimator: str
    """The estimator that it computes for each sampled token, or ""."""
    scan: Scan
    zones: tuple[ZoneRow, ...]
    """The ranges in which value or gradient do not follow the log ratio."""
    curve: tuple[CurveRow, ...]
    right_value_is: str
    """The estimator or divergence that ``right_value`` of the curve is."""

    def reportable_zones(self, kind: ZoneKind) -> list[ZoneRow]:
        """Without zones that cover everything (a constant has its own finding) and those that overflow causes."""
        return [
            zone
            for zone in self.zones
            if zone.kind == kind
            and not (zone.low in (-inf, 0.0) and zone.high == inf)
            and not (zone.low > OVERFLOW or zone.high < -OVERFLOW)
        ]

    def unclamped_range(self, of: Literal["value", "gradient"]) -> str:
        """The range of log ratios in which the value, or the gradient, is not clamped; "" if it never is."""
        zones = self.reportable_zones(of if self.convention.place == "loss" else "value")
        if self.convention.claims not in UNBOUNDED or any(zone.low < 0 < zone.high for zone in zones):
            return ""
        low = max((zone.high for zone in zones if zone.high <= 0), default=-inf)
        high = min((zone.low for zone in zones if zone.low >= 0), default=inf)
        sees_tokens = self.convention.sees == "tokens"
        name = "log p - log q" if sees_tokens else "the difference of two tokens' log-odds"
        if isinf(low):
            return "" if isinf(high) else f"as long as {name} is below {high:.3g}"
        if isinf(high):
            return f"as long as {name} is above {low:.3g}"
        return f"as long as {name} lies between {low:.3g} and {high:.3g}"


def scan_log_ratios(audited: AuditedFunction) -> LogRatios:
    """The function along the log ratio, in float32."""
    probe, estimator = log_ratio_probe(audited), matching_estimator(audited)
    scan = probe(log_ratio_grid(audited))

    def zones(
        kind: ZoneKind, is_inside: Callable[[Scan], Tensor], on_grid: Tensor | None = None
    ) -> list[ZoneRow]:
        inside = is_inside(scan) if on_grid is None else on_grid
        u, values = scan.log_ratios, scan.values
        return find_zones(audited, kind, u, values, inside, lambda points: is_inside(probe(points)))

    curve, right_value_is = _curve(audited, probe, estimator)
    return LogRatios(
        convention=audited.convention,
        estimator=estimator,
        scan=scan,
        zones=(
            *zones("gradient", is_dead),
            *_rounded_away_zones(scan),
            *zones("value", lambda part: is_flat(part, probe), is_flat_on_grid(scan)),
            *zones("gradient is NaN", has_nan_gradient),
        ),
        curve=curve,
        right_value_is=right_value_is,
    )


def matching_estimator(audited: AuditedFunction) -> str:
    """The name of the estimator that the function computes for each sampled token, or ""."""
    if audited.convention.sees != "tokens":
        return ""
    log_ratios = torch.linspace(-2.3, 2.3, 24, dtype=torch.float64)
    values = log_ratio_probe(audited, torch.float64)(log_ratios).values
    for name, estimator in ESTIMATORS.items():
        if torch.allclose(values, estimator.of(log_ratios), rtol=1e-4, atol=1e-5):
            return name
    return ""


def log_ratio_probe(audited: AuditedFunction, dtype: torch.dtype = torch.float32) -> Probe:
    """A probe of the function at given log ratios."""
    scan = _scan_tokens if audited.convention.sees == "tokens" else _scan_distributions
    return lambda log_ratios: scan(audited, log_ratios, dtype)


def log_ratio_grid(audited: AuditedFunction) -> Float64[Tensor, " points"]:
    """Log ratios half a nat apart, without 0; two nats apart for a mean, which needs a call for each.

    For whole distributions only positive ones, since each pair has both signs.
    """
    spacing = 4 * SPACING if audited.convention.gives == "mean" else SPACING
    positive = (torch.arange(int(REACH / spacing), dtype=torch.float64) + 0.5) * spacing
    return torch.cat([-positive.flip(0), positive]) if audited.convention.sees == "tokens" else positive


def curve_grid(audited: AuditedFunction) -> Float64[Tensor, " points"]:
    """Log ratios of the curve, with 0 and all whole nats among them; positive ones for whole distributions."""
    fine = torch.arange(FINE_REACH * FINE_POINTS + 1, dtype=torch.float64) / FINE_POINTS
    coarse = FINE_REACH + torch.arange(1, 2 * (CURVE_REACH - FINE_REACH) + 1, dtype=torch.float64) / 2
    positive = torch.cat([fine, coarse])
    return torch.cat([-positive.flip(0)[:-1], positive]) if audited.convention.sees == "tokens" else positive


def two_token_logp(token_logp: Tensor) -> Tensor:
    """[points, 1, 2]: distributions over two tokens, the first with these log-probabilities."""
    return torch.stack([token_logp, torch.log1p(-token_logp.exp())], dim=-1).unsqueeze(1)


def of_one_token(
    audited: AuditedFunction, dtype: torch.dtype, *token_logps: Float64[Tensor, " points"]
) -> tuple[Tensor, Tensor | None]:
    """Values, and gradients in the token's log-probability, for its log-probabilities under p, q and the behaviour."""
    logits_p, logits_q, *behaviour = map(two_token_logp, token_logps)
    inputs = make_inputs(
        logits_p.requires_grad_(),
        logits_q,
        torch.zeros(len(logits_p), 1, dtype=torch.int64),
        logits_behaviour=behaviour[0] if behaviour else None,
        dtype=dtype,
    )
    values = audited.values(inputs).sum(-1)
    in_token, in_logits = audited.gradients(values.sum(), (inputs.token_logp, logits_p))
    gradients = None if in_token is None else in_token.squeeze(-1).double()
    if gradients is None and in_logits is not None:  # it computes the log-probability itself, from the logits
        gradients = in_logits[:, 0, 0] / logits_p.detach()[:, 0, 1].exp()
    return values.detach().double(), gradients


def _scan_tokens(audited: AuditedFunction, log_ratios: Tensor, dtype: torch.dtype) -> Scan:
    """One sampled token for each log ratio; its log-probabilities are as close to 0 as the ratio allows."""
    p, q = log_ratios.clamp(max=0) - 0.5, -log_ratios.clamp(min=0) - 0.5
    values, gradients = of_one_token(audited, dtype, p, q)
    return Scan(log_ratios=log_ratios, values=values, gradients=gradients)


def _uniform_and_skewed(log_odds: Tensor, claims: str) -> tuple[Tensor, Tensor]:
    """Logits [points, 2] of p and q: uniform on the side that is averaged over, skewed on the other."""
    skewed_logits = torch.stack([log_odds / 2, -log_odds / 2], dim=-1)
    uniform_logits = torch.zeros_like(skewed_logits)
    return (skewed_logits, uniform_logits) if claims == "reverse_kl" else (uniform_logits, skewed_logits)


def _scan_distributions(audited: AuditedFunction, log_odds: Tensor, dtype: torch.dtype) -> Scan:
    """A uniform distribution over two tokens against one with these log-odds."""
    claims = audited.convention.claims
    logits_p, logits_q = (side.unsqueeze(1) for side in _uniform_and_skewed(log_odds, claims))
    logits_p = logits_p.clone().requires_grad_()
    tokens = torch.zeros(len(logits_p), 1, dtype=torch.int64)
    values = audited.values(make_inputs(logits_p, logits_q, tokens, dtype=dtype)).sum(-1)
    (gradients,) = audited.gradients(values.sum(), (logits_p,))
    claimed = divergence(claims, logits_p.log_softmax(-1), logits_q.log_softmax(-1)).sum()
    (claimed_gradients,) = torch.autograd.grad(claimed, logits_p)
    return Scan(
        log_ratios=log_odds,
        values=values.detach().double(),
        gradients=None if gradients is None else gradients[:, 0, 0],
        claimed_gradients=claimed_gradients[:, 0, 0],
    )


def is_dead(scan: Scan) -> Bool[Tensor, " points"]:
    """Whether the gradient is zero at each point and that of the claimed divergence, if known, is not."""
    if scan.gradients is None:
        return torch.zeros_like(scan.values, dtype=torch.bool)
    if scan.claimed_gradients is None:
        return (scan.gradients == 0) & ~_is_rounded_away(scan)
    claimed = scan.claimed_gradients.abs()
    return (scan.gradients.abs() < 1e-3 * claimed) & (claimed > 1e-6)


def _is_rounded_away(scan: Scan) -> Bool[Tensor, " points"]:
    """Whether the value at each point is so large that a gradient of the log ratio's size is lost in its rounding."""
    return scan.values.abs() * 2.0**-24 > scan.log_ratios.abs() / 20


def _rounded_away_zones(scan: Scan) -> list[ZoneRow]:
    """The range in which a gradient that is a difference of large numbers is zero in float32."""
    if scan.gradients is None or scan.claimed_gradients is not None:
        return []
    is_inside = (scan.gradients == 0) & _is_rounded_away(scan)
    points = scan.log_ratios[is_inside].tolist()
    if len(points) < 2:
        return []
    value = scan.values[is_inside][0].item()
    return [ZoneRow(kind="gradient is rounded away", low=min(points), high=max(points), value=value)]


def has_nan_gradient(scan: Scan) -> Bool[Tensor, " points"]:
    """Whether the gradient is NaN at each point."""
    return (torch.zeros_like(scan.values) if scan.gradients is None else scan.gradients).isnan()


def is_flat(scan: Scan, probe: Probe) -> Bool[Tensor, " points"]:
    """Whether the value at each point is equal to the value a hundredth of a nat farther from 0."""
    farther = probe(scan.log_ratios * (1 + 1e-2 / scan.log_ratios.abs()))
    return _equal_up_to_rounding(scan.values, farther.values)


def is_flat_on_grid(scan: Scan) -> Bool[Tensor, " points"]:
    """Whether the value at each point is equal to that of a neighbour on the grid, on the same side of 0."""
    u, values = scan.log_ratios, scan.values
    same = _equal_up_to_rounding(values[1:], values[:-1]) & (u[1:] * u[:-1] > 0)
    false = same.new_zeros(1)
    return torch.cat([same, false]) | torch.cat([false, same])


def _equal_up_to_rounding(values: Tensor, expected: Tensor) -> Bool[Tensor, " points"]:
    """Finite, and equal up to the last bits of float32."""
    rounding = 8 * torch.finfo(torch.float32).eps * values.abs()
    return values.isfinite() & ((values - expected).abs() <= rounding)


def find_zones(
    audited: AuditedFunction,
    kind: ZoneKind,
    points: Float64[Tensor, " points"],
    values: Float64[Tensor, " points"],
    is_inside: Bool[Tensor, " points"],
    condition: Callable[[Tensor], Tensor],
) -> list[ZoneRow]:
    """The ranges of at least two points that are inside; ``condition`` at other points locates their ends."""
    sections = 2 if audited.convention.gives == "mean" else 16  # a mean needs a call for each point
    u = points.tolist()

    def boundary(inside: int, outside: int) -> float:
        low, high = u[inside], u[outside]
        while abs(high - low) > BOUNDARY_PRECISION:
            between = torch.linspace(low, high, sections + 1, dtype=torch.float64)
            last_inside = [True, *condition(between[1:-1]).tolist(), False].index(False) - 1
            low, high = between[last_inside].item(), between[last_inside + 1].item()
        return (low + high) / 2

    zones: list[ZoneRow] = []
    for inside, group in groupby(range(len(u)), key=is_inside.tolist().__getitem__):
        indices = list(group)
        if inside and len(indices) > 1:
            first, last = indices[0], indices[-1]
            zones.append(
                ZoneRow(
                    kind=kind,
                    low=boundary(first, first - 1) if first else (-inf if u[0] < 0 else 0.0),
                    high=boundary(last, last + 1) if last + 1 < len(u) else inf,
                    value=values[(first + last) // 2].item(),
                )
            )
    return zones


def _curve(audited: AuditedFunction, probe: Probe, estimator: str) -> tuple[tuple[CurveRow, ...], str]:
    """Value and gradient against the log ratio with the correct ones, and the name of the correct value.

    The correct value is the divergence of the pair, or for sampled tokens an estimator. The correct gradient in a
    sampled token's log-probability is the log ratio, up to a constant, which does not change the expectation. For
    sampled tokens there are rows only if KL(p || q) is claimed.
    """
    convention = audited.convention
    if convention.sees == "tokens" and convention.claims != "kl":
        return (), ""
    scan = probe(curve_grid(audited))
    u, nans = scan.log_ratios, torch.full_like(scan.values, torch.nan)
    if convention.sees == "tokens":
        name = estimator or ("k1" if convention.place == "reward" else "k3")
        right_values = ESTIMATORS[name].of(u)
    else:
        name = divergence_label(convention.claims)
        p, q = (side.log_softmax(-1) for side in _uniform_and_skewed(u, convention.claims))
        right_values = divergence(convention.claims, p, q)
    gradients, right_gradients = nans, nans
    if scan.gradients is not None:
        gradients = scan.gradients
        right_gradients = u if scan.claimed_gradients is None else scan.claimed_gradients
    columns = (x.tolist() for x in (u, scan.values, right_values, gradients, right_gradients))
    rows = tuple(
        CurveRow(
            log_ratio=at, value=value, right_value=right, gradient=gradient, right_gradient=right_gradient
        )
        for at, value, right, gradient, right_gradient in zip(*columns, strict=True)
    )
    return rows, name


def log_ratio_findings(log_ratios: LogRatios, is_claimed: bool, gradient_is_right: bool) -> list[Finding]:
    """Dead gradients, flat values, NaN and infinity along the log ratio.

    Args:
        log_ratios: the function along the log ratio.
        is_claimed: whether its value is the claimed divergence where no log ratio is large.
        gradient_is_right: whether its expected gradient is that of the claimed divergence.
    """
    sees_tokens = log_ratios.convention.sees == "tokens"
    if not sees_tokens and not is_claimed:
        return _nonfinite_findings(log_ratios.scan)
    findings: list[Finding] = []

    def add(kind: str, zones: Sequence[ZoneRow], statement: str, is_note: bool, end: str = "") -> None:
        if zones:
            where = " and ".join(_describe_zone(zone, sees_tokens) for zone in zones)
            severity: Severity = "note" if is_note else severity_beyond(_nearest(zones))
            sentence = f"{statement} {where}{end}."
            findings.append(Finding(kind=kind, severity=severity, sentence=sentence, where="float32"))

    is_bounded = log_ratios.convention.claims not in UNBOUNDED
    dead, flat = log_ratios.reportable_zones("gradient"), log_ratios.reportable_zones("value")
    add("dead_gradient", dead, "Its gradient is exactly zero", is_bounded)
    is_only_logged = sees_tokens and log_ratios.convention.place == "loss" and gradient_is_right
    values = " and ".join(dict.fromkeys(f"{zone.value:.4g}" for zone in flat))
    is_note = bool(dead) or is_only_logged or is_bounded
    add("flat_value", flat, "Its value does not change", is_note, f", where it is {values}")
    rounded_away = [zone for zone in log_ratios.zones if zone.kind == "gradient is rounded away"]
    add("cancellation", rounded_away, "In float32 its gradient is rounded to zero", True)
    nan = [zone for zone in log_ratios.zones if zone.kind == "gradient is NaN"]
    add("nan_gradient", nan, "Its gradient is NaN", False)
    return [*findings, *_nonfinite_findings(log_ratios.scan)]


def severity_beyond(log_ratio: float) -> Severity:
    """Of a fault that begins at this log ratio: wrong if it occurs in training, fragile otherwise."""
    return "wrong" if abs(log_ratio) < ORDINARY_LOG_RATIO else "fragile"


def _nearest(zones: Sequence[ZoneRow]) -> float:
    """The smallest absolute log ratio in any of the zones."""
    return min(0.0 if zone.low < 0 < zone.high else min(abs(zone.low), abs(zone.high)) for zone in zones)


def _describe_zone(zone: ZoneRow, sees_tokens: bool) -> str:
    """A range of log p - log q, in words."""
    if not sees_tokens:
        if isinf(zone.high):
            return f"once the log-odds of two tokens differ by more than {zone.low:.3g} nats"
        return f"while the log-odds of two tokens differ by {zone.low:.3g} to {zone.high:.3g} nats"
    p_above, q_above = "p's log-probability exceeds q's", "q's log-probability exceeds p's"
    if isinf(zone.low) and isinf(zone.high):
        return "at every log ratio"
    if isinf(zone.low):
        return f"once {q_above} by {-zone.high:.3g} nats"
    if isinf(zone.high):
        return f"once {p_above} by {zone.low:.3g} nats"
    if zone.high <= 0:
        return f"while {q_above} by {-zone.high:.3g} to {-zone.low:.3g} nats"
    if zone.low >= 0:
        return f"while {p_above} by {zone.low:.3g} to {zone.high:.3g} nats"
    return f"while log p - log q lies between {zone.low:.3g} and {zone.high:.3g} nats"


def _nonfinite_findings(scan: Scan) -> list[Finding]:
    """Infinity and NaN along the log ratio, except where float32 overflows."""
    is_representable = scan.log_ratios.abs() < OVERFLOW
    gradients = torch.zeros_like(scan.values) if scan.gradients is None else scan.gradients
    findings: list[Finding] = []
    for kind, is_bad, statement in (
        ("nan_value", scan.values.isnan(), "Its value is NaN"),
        ("infinite_value", scan.values.isinf() & is_representable, "Its value is infinite"),
        ("nan_gradient", gradients.isinf() & is_representable, "Its gradient is infinite"),
    ):
        if bool(is_bad.any()):
            nearest = min(scan.log_ratios[is_bad].tolist(), key=abs)
            sentence = f"{statement} at log ratios such as {nearest:.3g} nats, where that of the divergence is finite."
            severity = severity_beyond(nearest)
            findings.append(Finding(kind=kind, severity=severity, sentence=sentence, where="float32"))
    return findings
