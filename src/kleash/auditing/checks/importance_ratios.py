"""The function along the importance ratio p / behaviour, from e^-12 to e^12: where the ratio is truncated."""

from collections.abc import Sequence
from math import exp, isinf, log
from typing import Literal

import torch
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.checks.log_ratios import find_zones, of_one_token
from kleash.errors import KleashError
from kleash.store.audit import Finding, ZoneKind, ZoneRow

REACH = 12.0
LOG_RATIO = 0.7
"""log p - log q of the token, the same at every importance ratio."""
ORDINARY_LOG_WEIGHT = log(2)
"""Every off-policy batch has importance ratios within a factor of two of 1."""


def truncated_ratio_zones(audited: AuditedFunction) -> tuple[ZoneRow, ...]:
    """The ranges of log p - log behaviour in which the value, or else the gradient, does not change with it.

    None if neither changes with it anywhere: then it is not a truncation.
    """
    convention = audited.convention
    if not convention.takes_behaviour or convention.sees != "tokens":
        return ()
    spacing = 1.0 if convention.gives == "mean" else 0.25
    positive = (torch.arange(int(REACH / spacing), dtype=torch.float64) + 0.5) * spacing
    log_weights = torch.cat([-positive.flip(0), positive])
    try:
        zones = _zones(audited, "value along the importance ratio", log_weights, 0)
        return zones or _zones(audited, "gradient along the importance ratio", log_weights, 1)
    except KleashError:  # the function refuses such large ratios
        return ()


def truncated_ratio_findings(zones: Sequence[ZoneRow]) -> list[Finding]:
    """Importance ratios that are truncated."""
    if not zones:
        return []
    ranges: list[str] = []
    for zone in zones:
        is_upper = isinf(zone.high) or zone.low >= 0
        bound = f"above {exp(zone.low):.3g}" if is_upper else f"below {exp(zone.high):.3g}"
        ranges.append(bound if isinf(zone.low) or isinf(zone.high) else f"{bound} for a range")
    nearest = min(abs(edge) for zone in zones for edge in (zone.low, zone.high))
    sentence = (
        f"Its importance ratio p / behaviour is truncated: {' and '.join(dict.fromkeys(ranges))} it no longer counts "
        "in full, which biases off-policy estimates."
    )
    severity = "wrong" if nearest < ORDINARY_LOG_WEIGHT else "fragile"
    return [Finding(kind="truncated_ratio", severity=severity, sentence=sentence, where="off-policy")]


def _zones(
    audited: AuditedFunction, kind: ZoneKind, log_weights: Tensor, of: Literal[0, 1]
) -> tuple[ZoneRow, ...]:
    """The ranges in which the value (0) or the gradient (1) is constant; none if it is constant everywhere."""

    def at(points: Tensor) -> Tensor:
        token_logp = points.clamp(max=0) - 0.5
        logps = (token_logp, token_logp - LOG_RATIO, token_logp - points)
        result = of_one_token(audited, torch.float64, *logps)[of]
        return torch.full_like(points, torch.nan) if result is None else result

    def is_constant(points: Tensor) -> Tensor:
        values = at(points)
        return (values - at(points + 1e-2 * points.sign())).abs() <= 1e-4 * values.abs()

    values = at(log_weights)
    elasticities = (
        values.abs().clamp(min=1e-30).log().diff() / log_weights.diff()
    )  # 1: as the ratio, 0: constant
    if not bool(values.isfinite().all()) or not bool((elasticities > 0.1).any()):
        return ()
    return tuple(find_zones(audited, kind, log_weights, values, is_constant(log_weights), is_constant))
