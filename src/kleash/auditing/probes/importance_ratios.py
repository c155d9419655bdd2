"""The function along the importance ratio p / behaviour, from e^-12 to e^12: where the ratio is truncated."""

from collections.abc import Callable

import torch
from jaxtyping import Float64
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.inputs import make_inputs
from kleash.auditing.probes.log_ratio_scan import Scan, ZoneSearch, find_zones, two_token_logp
from kleash.errors import KleashError
from kleash.store.audit import ZoneKind, ZoneRow

REACH = 12.0
LOG_RATIO = 0.7
"""log p - log q of the token, the same at every importance ratio."""


def truncated_ratio_zones(audited: AuditedFunction) -> tuple[ZoneRow, ...]:
    """The ranges of log p - log behaviour in which value or gradient do not change with it.

    None if neither changes with it anywhere: then it is not a truncation.
    """
    convention = audited.convention
    if not convention.takes_behaviour or convention.sees != "tokens":
        return ()
    spacing = 1.0 if convention.gives == "mean" else 0.25
    positive = (torch.arange(int(REACH / spacing), dtype=torch.float64) + 0.5) * spacing
    log_weights = torch.cat([-positive.flip(0), positive])
    try:
        zones = _value_zones(audited, log_weights)
        return zones or _gradient_zones(audited, log_weights)
    except KleashError:  # the function refuses such large ratios
        return ()


def _value_zones(audited: AuditedFunction, log_weights: Tensor) -> tuple[ZoneRow, ...]:
    def values(points: Tensor) -> Tensor:
        return _value_and_gradient(audited, points)[0]

    return _zones(audited, log_weights, "value along the importance ratio", values)


def _gradient_zones(audited: AuditedFunction, log_weights: Tensor) -> tuple[ZoneRow, ...]:
    def gradients(points: Tensor) -> Tensor:
        gradient = _value_and_gradient(audited, points)[1]
        return torch.full_like(points, torch.nan) if gradient is None else gradient

    return _zones(audited, log_weights, "gradient along the importance ratio", gradients)


def _zones(
    audited: AuditedFunction, log_weights: Tensor, kind: ZoneKind, function: Callable[[Tensor], Tensor]
) -> tuple[ZoneRow, ...]:
    """The ranges of the log importance ratio in which ``function`` is constant; none if it is constant everywhere."""

    def probe(points: Tensor) -> Scan:
        return Scan(log_ratios=points, values=function(points), gradients=None, claimed_gradients=None)

    def is_constant(scan: Scan) -> Tensor:
        farther = function(scan.log_ratios + 1e-2 * scan.log_ratios.sign())
        return (scan.values - farther).abs() <= 1e-4 * scan.values.abs()

    scan = probe(log_weights)
    if not bool(scan.values.isfinite().all()):
        return ()
    if not bool((_elasticity(scan.values, log_weights) > 0.1).any()):
        return ()
    search = ZoneSearch(
        probe=probe,
        condition=is_constant,
        kind=kind,
        both_signs=True,
        sections=2 if audited.convention.gives == "mean" else 16,
    )
    return find_zones(search, scan, is_constant(scan))


def _elasticity(values: Float64[Tensor, " points"], log_weights: Float64[Tensor, " points"]) -> Tensor:
    """d log |value| / d log ratio: 1 if the value is proportional to the ratio, 0 if it is constant."""
    return values.abs().clamp(min=1e-30).log().diff() / log_weights.diff()


def _value_and_gradient(audited: AuditedFunction, log_weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """Value and gradient of one token at each log importance ratio."""
    token_logp = log_weights.clamp(max=0) - 0.5
    logits_p = two_token_logp(token_logp).requires_grad_()
    inputs = make_inputs(
        logits_p,
        two_token_logp(token_logp - LOG_RATIO),
        torch.zeros(len(log_weights), 1, dtype=torch.int64),
        logits_behaviour=two_token_logp(token_logp - log_weights),
    )
    values = audited.values(inputs).sum(-1)
    gradient = None
    if audited.is_differentiated and values.requires_grad:
        (gradient,) = audited.gradients(values.sum(), (inputs.token_logp,), retain_graph=True)
    return values.detach().double(), None if gradient is None else gradient.detach().double().squeeze(-1)
