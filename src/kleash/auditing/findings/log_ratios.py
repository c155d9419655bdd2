"""Findings along the log ratio and the importance ratio: clamps, dead gradients, NaN and infinity."""

from collections.abc import Sequence
from math import exp, inf, isinf, log
from typing import Literal

import torch

from kleash.auditing.probes.evidence import Evidence
from kleash.auditing.quantities import UNBOUNDED
from kleash.store.audit import Finding, Severity, ZoneRow

ORDINARY_LOG_RATIO = 8.0
"""Nats that log ratios reach in training, a factor of 3 000. A fault that occurs only beyond is fragile, not wrong."""

ORDINARY_LOG_WEIGHT = log(2)
"""Every off-policy batch has importance ratios within a factor of two of 1."""

OVERFLOW = 80.0
"""Log ratio in nats beyond which the log ratio times its exponential overflows float32."""


def log_ratio_findings(evidence: Evidence) -> list[Finding]:
    """Dead gradients, flat values, NaN and infinity along the log ratio."""
    return [*_zone_findings(evidence), *_nonfinite_findings(evidence)]


def unclamped_range(evidence: Evidence, of: Literal["value", "gradient"]) -> str:
    """The range of log ratios in which the value, or the gradient, is not clamped; "" if it never is."""
    if evidence.audited.convention.claims not in UNBOUNDED:
        return ""
    is_backpropagated = evidence.audited.convention.place == "loss" and of == "gradient"
    zones = _reportable(evidence.scan.dead if is_backpropagated else evidence.scan.flat)
    one_sided = [zone for zone in zones if zone.low >= 0 or zone.high <= 0]
    if not one_sided or len(one_sided) < len(zones):
        return ""
    low = max((zone.high for zone in one_sided if zone.high <= 0), default=-inf)
    high = min((zone.low for zone in one_sided if zone.low >= 0), default=inf)
    sees_tokens = evidence.audited.convention.sees == "tokens"
    name = "log p - log q" if sees_tokens else "the difference of two tokens' log-odds"
    if isinf(low):
        return f"as long as {name} is below {high:.3g}"
    if isinf(high):
        return f"as long as {name} is above {low:.3g}"
    return f"as long as {name} lies between {low:.3g} and {high:.3g}"


def truncated_ratio_findings(evidence: Evidence) -> list[Finding]:
    """Importance ratios that are truncated."""
    if not evidence.truncated_ratios:
        return []
    ranges: list[str] = []
    for zone in evidence.truncated_ratios:
        is_upper = isinf(zone.high) or zone.low >= 0
        bound = f"above {exp(zone.low):.3g}" if is_upper else f"below {exp(zone.high):.3g}"
        ranges.append(bound if isinf(zone.low) or isinf(zone.high) else f"{bound} for a range")
    is_ordinary = any(
        abs(edge) < ORDINARY_LOG_WEIGHT
        for zone in evidence.truncated_ratios
        for edge in (zone.low, zone.high)
    )
    sentence = (
        f"Its importance ratio p / behaviour is truncated: {' and '.join(dict.fromkeys(ranges))} it no longer counts "
        "in full, which biases off-policy estimates."
    )
    severity: Severity = "wrong" if is_ordinary else "fragile"
    return [Finding(kind="truncated_ratio", severity=severity, sentence=sentence, where="off-policy")]


def _zone_severity(zones: Sequence[ZoneRow]) -> Severity:
    """Wrong if a zone contains log ratios that occur in training, fragile otherwise."""
    nearest = min(0.0 if zone.low < 0 < zone.high else min(abs(zone.low), abs(zone.high)) for zone in zones)
    return "wrong" if nearest < ORDINARY_LOG_RATIO else "fragile"


def _zone_findings(evidence: Evidence) -> list[Finding]:
    """Findings about ranges with a constant value or a zero or NaN gradient."""
    findings: list[Finding] = []
    scan, convention = evidence.scan, evidence.audited.convention
    sees_tokens = convention.sees == "tokens"
    if not sees_tokens and not evidence.is_claimed_at_moderate_ratios:
        return findings

    def add(kind: str, severity: Severity, sentence: str) -> None:
        findings.append(Finding(kind=kind, severity=severity, sentence=sentence, where="float32"))

    is_unbounded = convention.claims in UNBOUNDED
    dead, flat = _reportable(scan.dead), _reportable(scan.flat)
    if dead:
        severity: Severity = _zone_severity(dead) if is_unbounded else "note"
        add("dead_gradient", severity, f"Its gradient is exactly zero {_describe_zones(dead, sees_tokens)}.")
    if flat:
        is_only_logged = sees_tokens and convention.place == "loss" and evidence.gradient_is_right
        is_note = bool(dead) or is_only_logged or not is_unbounded
        values = " and ".join(dict.fromkeys(f"{zone.value:.4g}" for zone in flat))
        add(
            "flat_value",
            "note" if is_note else _zone_severity(flat),
            f"Its value does not change {_describe_zones(flat, sees_tokens)}, where it is {values}.",
        )
    if scan.rounded_away:
        zones = _describe_zones(scan.rounded_away, sees_tokens)
        add("cancellation", "note", f"In float32 its gradient is rounded to zero {zones}.")
    if scan.nan:
        zones = _describe_zones(scan.nan, sees_tokens)
        add("nan_gradient", _zone_severity(scan.nan), f"Its gradient is NaN {zones}.")
    return findings


def _reportable(zones: Sequence[ZoneRow]) -> tuple[ZoneRow, ...]:
    """Without zones that cover everything (a constant has its own finding) and those that float32 overflow causes."""
    return tuple(
        zone
        for zone in zones
        if not (zone.low in (-inf, 0.0) and zone.high == inf)
        and not (zone.low > OVERFLOW or zone.high < -OVERFLOW)
    )


def _describe_zones(zones: Sequence[ZoneRow], sees_tokens: bool) -> str:
    return " and ".join(_describe_zone(zone, sees_tokens) for zone in zones)


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


def _nonfinite_findings(evidence: Evidence) -> list[Finding]:
    """Infinity and NaN along the log ratio, except where float32 overflows."""
    scan = evidence.scan.scan
    is_representable = scan.log_ratios.abs() < OVERFLOW
    has_infinite_gradient = (
        torch.zeros_like(is_representable)
        if scan.gradients is None
        else scan.gradients.isinf() & is_representable
    )
    findings: list[Finding] = []
    for kind, is_bad, statement in (
        ("nan_value", scan.values.isnan(), "Its value is NaN"),
        ("infinite_value", scan.values.isinf() & is_representable, "Its value is infinite"),
        ("nan_gradient", has_infinite_gradient, "Its gradient is infinite"),
    ):
        if bool(is_bad.any()):
            log_ratios = scan.log_ratios[is_bad]
            nearest = log_ratios[log_ratios.abs().argmin()].item()
            severity: Severity = "wrong" if abs(nearest) < ORDINARY_LOG_RATIO else "fragile"
            sentence = f"{statement} at log ratios such as {nearest:.3g} nats, where that of the divergence is finite."
            findings.append(Finding(kind=kind, severity=severity, sentence=sentence, where="float32"))
    return findings
