"""Findings about extremes: where it stands still, and where it breaks."""

from math import inf, isinf

import torch

from kleash.auditing.edges import NAN_FOR_INFINITY
from kleash.auditing.evidence import Evidence
from kleash.auditing.masks import DIVIDES
from kleash.records.audit import Finding, Severity, ZoneRow

UNBOUNDED = ("kl", "reverse_kl", "jeffreys", "chi_squared")
"""Those whose gradient has no reason to vanish far out."""

OVERFLOWS = 80.0
"""Log ratios beyond which exp, times the log ratio, leaves float32."""


def edge_findings(evidence: Evidence) -> list[Finding]:
    """Dead zones, NaN and infinity."""
    return [*_zones(evidence), *_infinities(evidence), *_extremes(evidence)]


def _zones(evidence: Evidence) -> list[Finding]:
    found: list[Finding] = []
    course, convention = evidence.course, evidence.subject.convention
    tokens = convention.sees == "tokens"
    if not tokens and not evidence.is_about_the_claimed:
        return found
    severity: Severity = "fault" if convention.claims in UNBOUNDED else "note"
    dead = _partial(course.dead)
    if dead:
        sentence = f"Its gradient is exactly zero {_ranges(dead, tokens)}."
        found.append(Finding(kind="dead_gradient", severity=severity, sentence=sentence, where="float32"))
    flat = _partial(course.flat)
    if flat:
        sentence = f"Its value does not change {_ranges(flat, tokens)}, where it is {_values(flat)}."
        only_logged = tokens and convention.place == "loss" and evidence.gradient_is_right
        softened: Severity = "note" if dead or only_logged else severity
        found.append(Finding(kind="flat_value", severity=softened, sentence=sentence, where="float32"))
    if course.lost:
        sentence = f"In float32 its gradient is rounded to zero {_ranges(course.lost, tokens)}."
        found.append(Finding(kind="cancellation", severity="note", sentence=sentence, where="float32"))
    if course.nan:
        sentence = f"Its gradient is NaN {_ranges(course.nan, tokens)}."
        found.append(Finding(kind="nan_gradient", severity="fault", sentence=sentence, where="float32"))
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
            sentence = (
                f"{what} at log ratios such as {where[where.abs().argmin()].item():.3g} nats, "
                "where the divergence has a finite one."
            )
            found.append(Finding(kind=kind, severity="fault", sentence=sentence, where="float32"))
    return found


PROBLEMS: dict[str, tuple[str, str, Severity]] = {
    "value is NaN": ("nan_value", "Its value is NaN", "fault"),
    NAN_FOR_INFINITY: ("nan_value", "Its value is NaN, and the divergence infinite,", "note"),
    "value is infinite where the divergence is finite": ("infinite_value", "Its value is infinite", "fault"),
    "value is finite where the divergence is infinite": (
        "infinite_missed",
        "Its value stays finite, though the divergence is infinite,",
        "note",
    ),
    "gradient is NaN": ("nan_gradient", "Its gradient is NaN", "fault"),
    "gradient is infinite": ("nan_gradient", "Its gradient is infinite", "fault"),
}


def _extremes(evidence: Evidence) -> list[Finding]:
    """What went wrong on the extreme inputs, one finding for each problem."""
    found: list[Finding] = []
    for problem, (kind, what, severity) in PROBLEMS.items():
        cases = [row.case for row in evidence.edges if row.problem == problem]
        if cases and (evidence.is_about_the_claimed or "infinite" not in kind):
            where = "; ".join(cases)
            sentence = f"{what} where {' and where '.join(cases)}."
            found.append(Finding(kind=kind, severity=severity, sentence=sentence, where=where))
    others = [row for row in evidence.edges if row.problem and row.problem not in PROBLEMS]
    for row in others:
        if row.problem.startswith("value is "):
            if evidence.is_about_the_claimed:
                sentence = f"Its {row.problem}, where {row.case}."
                found.append(
                    Finding(kind="biased_value", severity="fault", sentence=sentence, where=row.case)
                )
        else:
            sentence = f"It cannot be called where {row.case}: {row.problem}."
            found.append(Finding(kind="cannot_be_called", severity="note", sentence=sentence, where=row.case))
    return found


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
            severity="note" if kind == "cannot_be_called" else "fault",
            sentence=what[kind].format(cases=", ".join(cases)),
            where=", ".join(cases),
        )
        for kind, cases in kinds.items()
    ]
