"""A scan of the function along the log ratio from -100 to 100 nats: clamped, dead and NaN ranges, and its curve."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.inputs import make_inputs
from kleash.auditing.quantities import divergence_label
from kleash.divergences import divergence
from kleash.estimators import ESTIMATORS
from kleash.store.audit import CurveRow, ZoneKind, ZoneRow

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan:
    """Value and gradient at some log ratios."""

    log_ratios: Float64[Tensor, " points"]
    values: Float64[Tensor, " points"]
    gradients: Float64[Tensor, " points"] | None
    """In the policy's log-probability of the token, or in its first logit; None for a value only."""
    claimed_gradients: Float64[Tensor, " points"] | None
    """The same of the claimed divergence, for whole distributions; None for sampled tokens."""


Probe = Callable[[Tensor], Scan]
"""Evaluates the function at some log ratios."""


def log_ratio_probe(audited: AuditedFunction, dtype: torch.dtype = torch.float32) -> Probe:
    """A probe of the function at given log ratios."""
    if audited.convention.sees == "tokens":
        return lambda log_ratios: _scan_tokens(audited, log_ratios, dtype)
    return lambda log_ratios: _scan_distributions(audited, log_ratios, dtype)


def log_ratio_grid(audited: AuditedFunction) -> Float64[Tensor, " points"]:
    """Log ratios half a nat apart, without 0; two nats apart for a mean, which needs a call for each.

    For whole distributions only positive ones, since each pair has both signs.
    """
    spacing = 4 * SPACING if audited.convention.gives == "mean" else SPACING
    positive = (torch.arange(int(REACH / spacing), dtype=torch.float64) + 0.5) * spacing
    return torch.cat([-positive.flip(0), positive]) if audited.convention.sees == "tokens" else positive


def curve_grid(audited: AuditedFunction) -> Float64[Tensor, " points"]:
    """Log ratios of the curve, with 0 and all whole nats among them; positive ones for whole distributions."""
    fine = torch.arange(1, FINE_REACH * FINE_POINTS + 1, dtype=torch.float64) / FINE_POINTS
    coarse = FINE_REACH + torch.arange(1, 2 * (CURVE_REACH - FINE_REACH) + 1, dtype=torch.float64) / 2
    positive = torch.cat([fine, coarse])
    zero = positive.new_zeros(1)
    sides = [-positive.flip(0), zero, positive] if audited.convention.sees == "tokens" else [zero, positive]
    return torch.cat(sides)


def two_token_logp(token_logp: Tensor) -> Tensor:
    """[points, 1, 2]: distributions over two tokens, the first with these log-probabilities."""
    return torch.stack([token_logp, torch.log1p(-token_logp.exp())], dim=-1).unsqueeze(1)


def _scan_tokens(audited: AuditedFunction, log_ratios: Tensor, dtype: torch.dtype) -> Scan:
    """One sampled token for each log ratio; its log-probabilities are as close to 0 as the ratio allows."""
    logits_p = two_token_logp(log_ratios.clamp(max=0) - 0.5).requires_grad_()
    logits_q = two_token_logp(-log_ratios.clamp(min=0) - 0.5)
    tokens = torch.zeros(len(logits_p), 1, dtype=torch.int64)
    inputs = make_inputs(logits_p, logits_q, tokens, dtype=dtype)
    values = audited.values(inputs).sum(-1)
    gradients = _gradient(audited, values, inputs.token_logp, lambda g: g.squeeze(-1))
    if gradients is None:  # the function computes the log-probability itself, from the logits
        second_token = logits_p.detach()[:, 0, 1].exp()
        gradients = _gradient(audited, values, logits_p, lambda g: g[:, 0, 0] / second_token)
    return Scan(
        log_ratios=log_ratios,
        values=values.detach().double(),
        gradients=gradients,
        claimed_gradients=None,
    )


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
    claimed = divergence(claims, logits_p.log_softmax(-1), logits_q.log_softmax(-1)).sum()
    (claimed_gradients,) = torch.autograd.grad(claimed, logits_p, retain_graph=True)
    return Scan(
        log_ratios=log_odds,
        values=values.detach().double(),
        gradients=_gradient(audited, values, logits_p, lambda g: g.squeeze(1)[:, 0]),
        claimed_gradients=claimed_gradients.squeeze(1)[:, 0],
    )


def _gradient(
    audited: AuditedFunction, values: Tensor, leaf: Tensor, select_entry: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The selected entries of the gradient of the values' sum in a leaf; None if the values do not depend on it."""
    if not audited.is_differentiated or not values.requires_grad:
        return None
    (gradient,) = audited.gradients(values.sum(), leaf, retain_graph=True)
    return None if gradient is None else select_entry(gradient).double()


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


def rounded_away_zones(scan: Scan) -> tuple[ZoneRow, ...]:
    """The range in which a gradient that is a difference of large numbers is zero in float32."""
    if scan.gradients is None or scan.claimed_gradients is not None:
        return ()
    points = scan.log_ratios[(scan.gradients == 0) & _is_rounded_away(scan)]
    if len(points) < 2:
        return ()
    value = scan.values[scan.log_ratios == points[0]].item()
    low, high = points.min().item(), points.max().item()
    return (ZoneRow(kind="gradient is rounded away", low=low, high=high, value=value),)


def has_nan_gradient(scan: Scan) -> Bool[Tensor, " points"]:
    """Whether the gradient is NaN at each point."""
    return (
        torch.zeros_like(scan.values, dtype=torch.bool) if scan.gradients is None else scan.gradients.isnan()
    )


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
    return values.isfinite() & (
        (values - expected).abs() <= 8 * torch.finfo(torch.float32).eps * values.abs()
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ZoneSearch:
    """A condition on log ratios, and the parameters of the search for the ranges in which it is true."""

    probe: Probe
    condition: Callable[[Scan], Tensor]
    kind: ZoneKind
    both_signs: bool
    sections: int
    """Number of parts into which each step of the search for an end divides the interval."""


def find_zones(search: ZoneSearch, scan: Scan, is_inside: Bool[Tensor, " points"]) -> tuple[ZoneRow, ...]:
    """The ranges of at least two grid points that are inside; their ends are located by bisection."""
    zones: list[ZoneRow] = []
    start: int | None = None
    for i in range(len(is_inside) + 1):
        inside = i < len(is_inside) and bool(is_inside[i])
        if inside and start is None:
            start = i
        elif not inside and start is not None:
            if i - start > 1:
                zones.append(_zone(search, scan, start, i - 1))
            start = None
    return tuple(zones)


def _zone(search: ZoneSearch, scan: Scan, first: int, last: int) -> ZoneRow:
    """The zone that contains the grid points from ``first`` to ``last``."""
    u = scan.log_ratios.tolist()

    def boundary(inside: int, outside: int) -> float:
        low, high = u[inside], u[outside]
        while abs(high - low) > BOUNDARY_PRECISION:
            points = torch.linspace(low, high, search.sections + 1, dtype=torch.float64)
            is_inside = [True, *search.condition(search.probe(points[1:-1])).tolist(), False]
            last_inside = is_inside.index(False) - 1
            low, high = points[last_inside].item(), points[last_inside + 1].item()
        return (low + high) / 2

    return ZoneRow(
        kind=search.kind,
        low=boundary(first, first - 1) if first else (-torch.inf if search.both_signs else 0.0),
        high=boundary(last, last + 1) if last + 1 < len(u) else torch.inf,
        value=scan.values[(first + last) // 2].item(),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ScanResult:
    """The scan on the grid, that of the curve, and the zones by their kind."""

    scan: Scan
    curve: Scan
    dead: tuple[ZoneRow, ...]
    rounded_away: tuple[ZoneRow, ...]
    flat: tuple[ZoneRow, ...]
    nan: tuple[ZoneRow, ...]

    @property
    def zones(self) -> tuple[ZoneRow, ...]:
        """All zones."""
        return self.dead + self.rounded_away + self.flat + self.nan


def scan_log_ratios(audited: AuditedFunction) -> ScanResult:
    """Scan the function along the log ratio and find its zones."""
    probe = log_ratio_probe(audited)
    scan = probe(log_ratio_grid(audited))

    def zones(condition: Callable[[Scan], Tensor], kind: ZoneKind, is_inside: Tensor) -> tuple[ZoneRow, ...]:
        search = ZoneSearch(
            probe=probe,
            condition=condition,
            kind=kind,
            both_signs=audited.convention.sees == "tokens",
            sections=2 if audited.convention.gives == "mean" else 16,
        )
        return find_zones(search, scan, is_inside)

    return ScanResult(
        scan=scan,
        curve=probe(curve_grid(audited)),
        dead=zones(is_dead, "gradient", is_dead(scan)),
        rounded_away=rounded_away_zones(scan),
        flat=zones(lambda part: is_flat(part, probe), "value", is_flat_on_grid(scan)),
        nan=zones(has_nan_gradient, "gradient is NaN", has_nan_gradient(scan)),
    )


def float64_values(
    audited: AuditedFunction, log_ratios: Float[Tensor, " points"]
) -> Float64[Tensor, " points"]:
    """The function's values at some log ratios in float64."""
    return log_ratio_probe(audited, torch.float64)(log_ratios).values


def curve_rows(audited: AuditedFunction, scan: Scan, estimator: str) -> tuple[tuple[CurveRow, ...], str]:
    """Value and gradient against the log ratio with the correct ones, and the name of the correct value.

    The correct value is the divergence of the pair, or for sampled tokens an estimator. The correct gradient in a
    sampled token's log-probability is the log ratio, up to a constant, which does not change the expectation. For
    sampled tokens there are rows only if KL(p || q) is claimed.
    """
    convention = audited.convention
    u, values = scan.log_ratios, scan.values
    nans = torch.full_like(u, torch.nan)
    gradients = nans if scan.gradients is None else scan.gradients
    if convention.sees != "tokens":
        claimed_gradients = None if scan.gradients is None else scan.claimed_gradients
        right_gradients = nans if claimed_gradients is None else claimed_gradients
        p, q = (side.log_softmax(-1) for side in _uniform_and_skewed(u, convention.claims))
        right_values = divergence(convention.claims, p, q)
        rows = _curve_rows(u, values, right_values, gradients, right_gradients)
        return rows, divergence_label(convention.claims)
    if convention.claims != "kl":
        return (), ""
    right_estimator = estimator or ("k1" if convention.place == "reward" else "k3")
    right_values = ESTIMATORS[right_estimator].of(u)
    right_gradients = nans if scan.gradients is None else u
    return _curve_rows(u, values, right_values, gradients, right_gradients), right_estimator


def _curve_rows(*columns: Tensor) -> tuple[CurveRow, ...]:
    """Rows from the columns log ratio, value, right value, gradient and right gradient."""
    return tuple(
        CurveRow(
            log_ratio=u, value=value, right_value=right, gradient=gradient, right_gradient=right_gradient
        )
        for u, value, right, gradient, right_gradient in zip(*(x.tolist() for x in columns), strict=True)
    )
