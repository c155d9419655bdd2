"""The function along the log ratio, from −100 to 100 nats, in float32: where does it stand still or break?"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from kleash.auditing.situations import make_situation
from kleash.auditing.subject import Subject
from kleash.divergences import divergence
from kleash.records.audit import ZoneRow

REACH = 100.0
SPACING = 0.5
FINENESS = 1e-5
"""How well the end of a zone is found, in nats."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan:
    """Value and gradient at some log ratios."""

    log_ratios: Float64[Tensor, " points"]
    values: Float64[Tensor, " points"]
    gradients: Float64[Tensor, " points"] | None
    """In the policy's log-probability of the token, or the larger entry in its logits; None for a value only."""
    slopes: Float64[Tensor, " points"] | None
    """The same of the claimed divergence, for whole distributions; None for sampled tokens."""


Look = Callable[[Tensor], Scan]


def looker(subject: Subject, dtype: torch.dtype = torch.float32) -> Look:
    """What asks the function at given log ratios."""
    if subject.convention.sees == "tokens":
        return lambda log_ratios: _at_tokens(subject, log_ratios, dtype)
    return lambda log_ratios: _at_distributions(subject, log_ratios, dtype)


def grid(subject: Subject) -> Float64[Tensor, " points"]:
    """Log ratios half a nat apart, none of them 0; two for a mean, which is called for each by itself.

    With whole distributions both signs come at once, so that one side is enough.
    """
    spacing = 4 * SPACING if subject.convention.gives == "mean" else SPACING
    positive = (torch.arange(int(REACH / spacing), dtype=torch.float64) + 0.5) * spacing
    return torch.cat([-positive.flip(0), positive]) if subject.convention.sees == "tokens" else positive


def _at_tokens(subject: Subject, log_ratios: Tensor, dtype: torch.dtype) -> Scan:
    """One sampled token for each log ratio; log-probabilities as near to 0 as that allows."""

    def of_two(logp: Tensor) -> Tensor:
        return torch.stack([logp, torch.log1p(-logp.exp())], dim=-1).unsqueeze(1)

    p = of_two(log_ratios.clamp(max=0) - 0.5).requires_grad_()
    q = of_two(-log_ratios.clamp(min=0) - 0.5)
    situation = make_situation(p, q, torch.zeros(len(p), 1, dtype=torch.int64), dtype=dtype)
    values = subject.parts(situation).sum(-1)
    gradients = _gradient(subject, values, situation.token_logp, lambda g: g.squeeze(-1))
    if gradients is None:  # it computes the log-probability itself
        other = p.detach()[:, 0, 1].exp()
        gradients = _gradient(subject, values, p, lambda g: g[:, 0, 0] / other)
    return Scan(log_ratios=log_ratios, values=values.detach().double(), gradients=gradients, slopes=None)


def _at_distributions(subject: Subject, log_ratios: Tensor, dtype: torch.dtype) -> Scan:
    """A fair coin under the side that is averaged over, a loaded one under the other."""
    loaded = torch.stack([log_ratios / 2, -log_ratios / 2], dim=-1).unsqueeze(1)
    fair = torch.zeros_like(loaded)
    claims = subject.convention.claims
    p, q = (loaded, fair) if claims == "reverse_kl" else (fair, loaded)
    p = p.clone().requires_grad_()
    situation = make_situation(p, q, torch.zeros(len(p), 1, dtype=torch.int64), dtype=dtype)
    values = subject.parts(situation).sum(-1)
    right = divergence(claims, p.log_softmax(-1), q.log_softmax(-1)).sum()
    (slopes,) = torch.autograd.grad(right, p, retain_graph=True)
    return Scan(
        log_ratios=log_ratios,
        values=values.detach().double(),
        gradients=_gradient(subject, values, p, lambda g: g.squeeze(1)[:, 0]),
        slopes=slopes.squeeze(1)[:, 0],
    )


def _gradient(
    subject: Subject, values: Tensor, given: Tensor, entry: Callable[[Tensor], Tensor]
) -> Tensor | None:
    if not subject.differentiated or not values.requires_grad:
        return None
    (found,) = subject.gradients(values.sum(), given, again=True)
    return None if found is None else entry(found).double()


def dead(scan: Scan) -> Bool[Tensor, " points"]:
    """Where the gradient is zero, and that of the claimed divergence, if it is known, is not."""
    if scan.gradients is None:
        return torch.zeros_like(scan.values, dtype=torch.bool)
    if scan.slopes is None:
        return (scan.gradients == 0) & ~_rounds_away(scan)
    return (scan.gradients.abs() < 1e-3 * scan.slopes.abs()) & (scan.slopes.abs() > 1e-6)


def _rounds_away(scan: Scan) -> Bool[Tensor, " points"]:
    """Where the value is so large that a gradient of the log ratio's size is less than its rounding."""
    return scan.values.abs() * 2.0**-24 > scan.log_ratios.abs() / 20


def lost(scan: Scan) -> tuple[ZoneRow, ...]:
    """Where a gradient that is a difference of large numbers comes out as zero in float32."""
    if scan.gradients is None or scan.slopes is not None:
        return ()
    gone = scan.log_ratios[(scan.gradients == 0) & _rounds_away(scan)]
    if len(gone) < 2:
        return ()
    value = scan.values[scan.log_ratios == gone[0]].item()
    return (
        ZoneRow(of="gradient is rounded away", low=gone.min().item(), high=gone.max().item(), value=value),
    )


def broken(scan: Scan) -> Bool[Tensor, " points"]:
    """Where the gradient is NaN."""
    return (
        torch.zeros_like(scan.values, dtype=torch.bool) if scan.gradients is None else scan.gradients.isnan()
    )


def flat(scan: Scan, look: Look) -> Bool[Tensor, " points"]:
    """Where the value is what it is a hundredth of a nat farther out."""
    farther = look(scan.log_ratios * (1 + 1e-2 / scan.log_ratios.abs()))
    return _alike(scan.values, farther.values)


def _alike(one: Tensor, other: Tensor) -> Bool[Tensor, " points"]:
    """Finite, and the same but for the last bits."""
    return one.isfinite() & ((one - other).abs() <= 8 * torch.finfo(torch.float32).eps * one.abs())


@dataclass(frozen=True, kw_only=True, eq=False)
class Search:
    """How to look for the ranges in which something holds."""

    look: Look
    where: Callable[[Scan], Tensor]
    of: str
    """What holds, as the rows say it."""
    both_signs: bool
    sections: int
    """Into how many parts to cut where a range ends, at each step."""


def standing(scan: Scan) -> Bool[Tensor, " points"]:
    """Where the value is that of a neighbour on the grid, on the same side of 0."""
    u, values = scan.log_ratios, scan.values
    same = _alike(values[1:], values[:-1]) & (u[1:] * u[:-1] > 0)
    nowhere = same.new_zeros(1)
    return torch.cat([same, nowhere]) | torch.cat([nowhere, same])


def zones(search: Search, scan: Scan, held: Bool[Tensor, " points"]) -> tuple[ZoneRow, ...]:
    """The ranges of the log ratio that hold on the grid, their ends found by cutting them ever finer."""
    found: list[ZoneRow] = []
    start: int | None = None
    for i in range(len(held) + 1):
        inside = i < len(held) and bool(held[i])
        if inside and start is None:
            start = i
        elif not inside and start is not None:
            if i - start > 1:
                found.append(_zone(search, scan, start, i - 1))
            start = None
    return tuple(found)


def _zone(search: Search, scan: Scan, first: int, last: int) -> ZoneRow:
    u = scan.log_ratios.tolist()

    def edge(inside: int, outside: int) -> float:
        low, high = u[inside], u[outside]
        while abs(high - low) > FINENESS:
            between = torch.linspace(low, high, search.sections + 1, dtype=torch.float64)
            held = [True, *search.where(search.look(between[1:-1])).tolist(), False]
            last_held = held.index(False) - 1
            low, high = between[last_held].item(), between[last_held + 1].item()
        return (low + high) / 2

    return ZoneRow(
        of=search.of,
        low=edge(first, first - 1) if first else (-torch.inf if search.both_signs else 0.0),
        high=edge(last, last + 1) if last + 1 < len(u) else torch.inf,
        value=scan.values[(first + last) // 2].item(),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Course:
    """What a scan came to."""

    scan: Scan
    dead: tuple[ZoneRow, ...]
    lost: tuple[ZoneRow, ...]
    flat: tuple[ZoneRow, ...]
    nan: tuple[ZoneRow, ...]

    @property
    def rows(self) -> tuple[ZoneRow, ...]:
        """All zones."""
        return self.dead + self.lost + self.flat + self.nan


def course(subject: Subject) -> Course:
    """The zones of the function."""
    look = looker(subject)
    scan = look(grid(subject))

    def search(where: Callable[[Scan], Tensor], of: str, held: Tensor) -> tuple[ZoneRow, ...]:
        wanted = Search(
            look=look,
            where=where,
            of=of,
            both_signs=subject.convention.sees == "tokens",
            sections=2 if subject.convention.gives == "mean" else 16,
        )
        return zones(wanted, scan, held)

    return Course(
        scan=scan,
        dead=search(dead, "gradient", dead(scan)),
        lost=lost(scan),
        flat=search(lambda part: flat(part, look), "value", standing(scan)),
        nan=search(broken, "gradient is NaN", broken(scan)),
    )


def pointwise(subject: Subject, points: Float[Tensor, " points"]) -> Float64[Tensor, " points"]:
    """The function's values at some log ratios in float64."""
    return looker(subject, torch.float64)(points).values
