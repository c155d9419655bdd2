"""The importance ratio p / behaviour, from e^-12 to e^12: beyond which value does it no longer count in full?"""

import torch
from jaxtyping import Float64
from torch import Tensor

from kleash.auditing.scanning import Scan, Search, zones
from kleash.auditing.situations import make_situation
from kleash.auditing.subject import Subject
from kleash.errors import KleashError
from kleash.records.audit import ZoneRow

REACH = 12.0
LOG_RATIO = 0.7
"""log p - log q of the token, whatever its importance ratio."""

IN_VALUE = "value along the importance ratio"
IN_GRADIENT = "gradient along the importance ratio"


def ratio_zones(subject: Subject) -> tuple[ZoneRow, ...]:
    """The ranges of log p - log behaviour in which value or gradient no longer follow it; none if neither ever does."""
    convention = subject.convention
    if not convention.takes_behaviour or convention.sees != "tokens":
        return ()
    try:
        return tuple(_zones(subject))
    except KleashError:  # it refuses ratios as large as these, and says so
        return ()


def _zones(subject: Subject) -> list[ZoneRow]:
    convention = subject.convention
    spacing = 1.0 if convention.gives == "mean" else 0.25
    positive = (torch.arange(int(REACH / spacing), dtype=torch.float64) + 0.5) * spacing
    points = torch.cat([-positive.flip(0), positive])
    found: list[ZoneRow] = []
    for of, part in ((IN_VALUE, 0), (IN_GRADIENT, 1)):
        seen = _at(subject, points)[part]
        if (
            seen is None
            or not bool(seen.isfinite().all())
            or not bool((_steepness(seen, points) > 0.1).any())
        ):
            continue
        if len(found) and of == IN_GRADIENT:
            continue  # the value has said it

        def stands(scan: Scan, part: int = part) -> Tensor:
            here, farther = scan.values, _at(subject, scan.log_ratios + 1e-2 * scan.log_ratios.sign())[part]
            assert farther is not None
            return (here - farther).abs() <= 1e-4 * here.abs()

        search = Search(
            look=lambda u, part=part: _scan(subject, u, part),
            where=stands,
            of=of,
            both_signs=True,
            sections=2 if convention.gives == "mean" else 16,
        )
        scan = _scan(subject, points, part)
        found += zones(search, scan, stands(scan))
    return found


def _steepness(values: Float64[Tensor, " points"], points: Float64[Tensor, " points"]) -> Tensor:
    """How strongly the size follows the ratio: 1 where it is proportional to it, 0 where it stands still."""
    sizes = values.abs().clamp(min=1e-30).log()
    return sizes.diff() / points.diff()


def _scan(subject: Subject, points: Tensor, part: int) -> Scan:
    seen = _at(subject, points)[part]
    assert seen is not None
    return Scan(log_ratios=points, values=seen, gradients=None, slopes=None)


def _at(subject: Subject, points: Tensor) -> tuple[Tensor, Tensor | None]:
    """Value and gradient of one token at each log importance ratio."""

    def of_two(logp: Tensor) -> Tensor:
        return torch.stack([logp, torch.log1p(-logp.exp())], dim=-1).unsqueeze(1)

    token_logp = points.clamp(max=0) - 0.5
    p = of_two(token_logp).requires_grad_()
    q, behaviour = of_two(token_logp - LOG_RATIO), of_two(token_logp - points)
    tokens = torch.zeros(len(points), 1, dtype=torch.int64)
    given = make_situation(p, q, tokens, logits_behaviour=behaviour)
    values = subject.parts(given).sum(-1)
    gradient = None
    if subject.differentiated and values.requires_grad:
        (gradient,) = subject.gradients(values.sum(), (given.token_logp,), again=True)
    return values.detach().double(), None if gradient is None else gradient.detach().double().squeeze(-1)
