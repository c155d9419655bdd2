"""Findings about extremes: where it stands still, and where it breaks."""

from math import exp, inf, isinf, log

import torch

from kleash.auditing.edges import NAN_FOR_INFINITY
from kleash.auditing.evidence import Evidence
from kleash.auditing.masks import DIVIDES, ORDINARY_PADDING
from kleash.records.audit import Finding, Severity, ZoneRow

UNBOUNDED = ("kl", "reverse_kl", "jeffreys", "chi_squared")
"""Those whose gradient has no reason to vanish far out."""

ORDINARY = 8.0
"""Log ratios, in nats, that tokens of a policy in training reach: a factor of 3 000. What only happens farther out
is fragile, not wrong."""

ORDINARY_CASES = ("p and q agree", "both are certain of the token")
"""Edge cases that any run meets."""

HALF = log(2)
"""A ratio within a factor of two of 1 is met by every off-policy batch."""

OVERFLOWS = 80.0
"""Log ratios beyond which exp, times the log ratio, leaves float32."""


def edge_findings(evidence: Evidence) -> list[Finding]:
    """Dead zones, NaN and infinity."""
    return [*_zones(evidence), *_infinities(evidence), *_extremes(evidence), *_ratios(evidence)]


def validity(evidence: Evidence, what: str) -> str:
    """Between which log ratios the value, or the gradient, is not clamped, in words; "" if it is nowhere."""
    if evidence.subject.convention.claims not in UNBOUNDED:
        return ""
    tokens = evidence.subject.convention.sees == "tokens"
    differentiated = evidence.subject.convention.place == "loss" and what == "gradient"
    zones = _partial(evidence.course.dead if differentiated else evidence.course.flat)
    inner = [zone for zone in zones if zone.low >= 0 or zone.high <= 0]
    if not inner or len(inner) < len(zones):
        return ""
    low = max((zone.high for zone in inner if zone.high <= 0), default=-inf)
    high = min((zone.low for zone in inner if zone.low >= 0), default=inf)
    name = "log p - log q" if tokens else "the difference of two tokens' log-odds"
    if isinf(low):
        return f"as long as {name} is below {high:.3g}"
    if isinf(high):
        return f"as long as {name} is above {low:.3g}"
    return f"as long as {name} lies between {low:.3g} and {high:.3g}"


def _severity(zones: tuple[ZoneRow, ...]) -> Severity:
    """Wrong where ordinary log ratios are among them, fragile otherwise."""
    nearest = min(0.0 if zone.low < 0 < zone.high else min(abs(zone.low), abs(zone.high)) for zone in zones)
    return "wrong" if nearest < ORDINARY else "fragile"


def _ratios(evidence: Evidence) -> list[Finding]:
    """Where the importance ratio no longer counts in full."""
    if not evidence.ratios:
        return []
    said: list[str] = []
    for zone in evidence.ratios:
        above = isinf(zone.high) or zone.low >= 0
        beyond = f"above {exp(zone.low):.3g}" if above else f"below {exp(zone.high):.3g}"
        said.append(beyond if isinf(zone.low) or isinf(zone.high) else f"{beyond} for a while")
    inside = any(abs(edge) < HALF for zone in evidence.ratios for edge in (zone.low, zone.high))
    sentence = (
        f"Its importance ratio p / behaviour is truncated: {' and '.join(dict.fromkeys(said))} it no longer counts "
        "in full, which off-policy leaves a bias."
    )
    severity: Severity = "wrong" if inside else "fragile"
    return [Finding(kind="truncated_ratio", severity=severity, sentence=sentence, where="off-policy")]


def _zones(evidence: Evidence) -> list[Finding]:
    found: list[Finding] = []
    course, convention = evidence.course, evidence.subject.convention
    tokens = convention.sees == "tokens"
    if not tokens and not evidence.is_about_the_claimed:
        return found
    matters = convention.claims in UNBOUNDED
    dead = _partial(course.dead)
    if dead:
        sentence = f"Its gradient is exactly zero {_ranges(dead, tokens)}."
        severity: Severity = _severity(dead) if matters else "note"
        found.append(Finding(kind="dead_gradient", severity=severity, sentence=sentence, where="float32"))
    flat = _partial(course.flat)
    if flat:
        sentence = f"Its value does not change {_ranges(flat, tokens)}, where it is {_values(flat)}."
        only_logged = tokens and convention.place == "loss" and evidence.gradient_is_right
        softened: Severity = "note" if dead or only_logged or not matters else _severity(flat)
        found.append(Finding(kind="flat_value", severity=softened, sentence=sentence, where="float32"))
    if course.lost:
        sentence = f"In float32 its gradient is rounded to zero {_ranges(course.lost, tokens)}."
        found.append(Finding(kind="cancellation", severity="note", sentence=sentence, where="float32"))
    if course.nan:
        sentence = f"Its gradient is NaN {_ranges(course.nan, tokens)}."
        found.append(
            Finding(kind="nan_gradient", severity=_severity(course.nan), sentence=sentence, where="float32")
        )
    return found


def _partial(zones: tuple[ZoneRow, ...]) -> tuple[ZoneRow, ...]:
    """Without a zone that is everything, a constant with its own finding, and what float32 forces far out."""
    return tuple(
        zone
        for zone in zones
        if not (zone.low in (-inf, 0.0) and zone.high == inf)
        and not (zone.low > OVERFLOWS or zone.high < -OVERFLOWS)
    )


def _ranges(zones: tuple[ZoneRow, ...], tokens: bool) -> str:
    return " and ".join(_range(zone, tokens) for zone in zones)


def _range(zone: ZoneRow, tokens: bool) -> str:
    """A range of log p − log q, in words."""
    if not tokens:
        if isinf(zone.high):
            return f"once the log-odds of two tokens differ by more than {zone.low:.3g} nats"
        return f"while the log-odds of two tokens differ by {zone.low:.3g} to {zone.high:.3g} nats"
    ahead, behind = "p's log-probability exceeds q's", "q's log-probability exceeds p's"
    if isinf(zone.low) and isinf(zone.high):
        return "at every log ratio"
    if isinf(zone.low):
        return f"once {behind} by {-zone.high:.3g} nats"
    if isinf(zone.high):
        return f"once {ahead} by {zone.low:.3g} nats"
    if zone.high <= 0:
        return f"while {behind} by {-zone.high:.3g} to {-zone.low:.3g} nats"
    if zone.low >= 0:
        return f"while {ahead} by {zone.low:.3g} to {zone.high:.3g} nats"
    return f"while log p - log q lies between {zone.low:.3g} and {zone.high:.3g} nats"


def _values(zones: tuple[ZoneRow, ...]) -> str:
    return " and ".join(dict.fromkeys(f"{zone.value:.4g}" for zone in zones))


def _infinities(evidence: Evidence) -> list[Finding]:
    """Infinity and NaN along the log ratio, where float32 does not force them."""
    scan = evidence.course.scan
    inside = scan.log_ratios.abs() < OVERFLOWS
    found: list[Finding] = []
    for kind, bad, what in (
        ("nan_value", scan.values.isnan(), "Its value is NaN"),
        ("infinite_value", scan.values.isinf() & inside, "Its value is infinite"),
        (
            "nan_gradient",
            torch.zeros_like(inside) if scan.gradients is None else scan.gradients.isinf() & inside,
            "Its gradient is infinite",
        ),
    ):
        if bool(bad.any()):
            where = scan.log_ratios[bad]
            severity: Severity = "wrong" if where.abs().min().item() < ORDINARY else "fragile"
            sentence = (
                f"{what} at log ratios such as {where[where.abs().argmin()].item():.3g} nats, "
                "where the divergence has a finite one."
            )
            found.append(Finding(kind=kind, severity=severity, sentence=sentence, where="float32"))
    return found


PROBLEMS: dict[str, tuple[str, str, Severity]] = {
    "value is NaN": ("nan_value", "Its value is NaN", "fragile"),
    NAN_FOR_INFINITY: ("nan_value", "Its value is NaN, and the divergence infinite,", "note"),
    "value is infinite where the divergence is finite": (
        "infinite_value",
        "Its value is infinite",
        "fragile",
    ),
    "value is finite where the divergence is infinite": (
        "infinite_missed",
        "Its value stays finite, though the divergence is infinite,",
        "note",
    ),
    "gradient is NaN": ("nan_gradient", "Its gradient is NaN", "fragile"),
    "gradient is infinite": ("nan_gradient", "Its gradient is infinite", "fragile"),
}


def _extremes(evidence: Evidence) -> list[Finding]:
    """What went wrong on the extreme inputs, one finding for each problem."""
    found: list[Finding] = []
    for problem, (kind, what, severity) in PROBLEMS.items():
        cases = [row.case for row in evidence.edges if row.problem == problem]
        if cases and (evidence.is_about_the_claimed or "infinite" not in kind):
            where = "; ".join(cases)
            if severity == "fragile" and any(case in ORDINARY_CASES for case in cases):
                severity = "wrong"
            sentence = f"{what} where {' and where '.join(cases)}."
            found.append(Finding(kind=kind, severity=severity, sentence=sentence, where=where))
    others = [row for row in evidence.edges if row.problem and row.problem not in PROBLEMS]
    for row in others:
        if row.problem.startswith("value is "):
            if evidence.is_about_the_claimed and not evidence.is_random:
                sentence = f"Its {row.problem}, where {row.case}."
                found.append(
                    Finding(
                        kind="biased_value",
                        severity="wrong" if row.case in ORDINARY_CASES else "fragile",
                        sentence=sentence,
                        where=row.case,
                    )
                )
        else:
            sentence = f"It cannot be called where {row.case}: {row.problem}."
            found.append(Finding(kind="cannot_be_called", severity="note", sentence=sentence, where=row.case))
    return found


def _of_padding(kind: str, cases: list[str]) -> Severity:
    """Wrong where any padding does it; fragile where only what no trainer should leave there does."""
    if kind == "cannot_be_called":
        return "note"
    ordinary = any(case.startswith(ORDINARY_PADDING) for case in cases)
    return "wrong" if kind != "nan_from_padding" and ordinary else "fragile"


def mask_findings(evidence: Evidence) -> list[Finding]:
    """What reaches the result from under the mask."""
    kinds: dict[str, list[str]] = {}
    for row in evidence.masks:
        if row.problem == DIVIDES:
            kinds.setdefault("padding_in_denominator", []).append(row.case)
        elif row.problem.endswith("NaN or infinite"):
            kinds.setdefault("nan_from_padding", []).append(f"{row.case} ({row.problem.split()[1]})")
        elif " changes by " in row.problem:
            kinds.setdefault("padding_counts", []).append(f"{row.case} ({row.problem})")
        elif row.problem:
            kinds.setdefault("cannot_be_called", []).append(f"{row.case}: {row.problem}")
    what = {
        "padding_in_denominator": "Its mean divides by the masked positions too.",
        "nan_from_padding": "What is masked makes the result NaN or infinite, when in the padding: {cases}.",
        "padding_counts": "What is masked changes the result, when in the padding: {cases}.",
        "cannot_be_called": "It cannot be called with padding: {cases}.",
    }
    return [
        Finding(
            kind=kind,
            severity=_of_padding(kind, cases),
            sentence=what[kind].format(cases=", ".join(cases)),
            where=", ".join(cases),
        )
        for kind, cases in kinds.items()
    ]
