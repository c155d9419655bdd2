"""Digits: the error against float64 on the same rounded inputs, in float32 and in bfloat16."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from kleash.auditing.scanning import pointwise
from kleash.auditing.situations import Situation, make_situation
from kleash.auditing.subject import Subject
from kleash.auditing.worlds import VOCAB, worlds
from kleash.divergences import divergence
from kleash.errors import KleashError
from kleash.estimators import ESTIMATORS
from kleash.records.audit import AccuracyRow

Formula: TypeAlias = Callable[[Situation], Tensor]

LOWER = (
    (torch.bfloat16, "near"),
    (torch.bfloat16, "far"),
    (torch.float16, "far"),
)
"""Where the function is compared with itself in float64, on the same rounded inputs."""
LEVELS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""KL(p || q), in nats."""


def estimator_of(subject: Subject) -> str:
    """The estimator that the function computes token by token, or ""."""
    if subject.convention.sees != "tokens":
        return ""
    points = torch.linspace(-2.3, 2.3, 24, dtype=torch.float64)
    found = pointwise(subject, points)
    for name, estimator in ESTIMATORS.items():
        if torch.allclose(found, estimator.of(points), rtol=1e-4, atol=1e-5):
            return name
    return ""


def accuracy_rows(subject: Subject, estimator: str, is_claimed: bool) -> tuple[AccuracyRow, ...]:
    """The relative error at each level of KL in float32, and on a near and a far pair in lower precision.

    In float32, what is right is the estimator, or the claimed divergence if it is that. In bfloat16, where a
    distribution loses its norm to rounding, it is what the function itself says of these inputs in float64.
    """
    known = _formula(subject, estimator, is_claimed)
    rows = [_row(subject, _near(level), torch.float32, known) for level in LEVELS]
    itself = _formula(subject, "", False)
    for dtype, name in LOWER:
        world = worlds()[name]
        try:
            rows.append(_row(subject, (world.logits_p, world.logits_q), dtype, itself))
        except KleashError:
            continue
    return tuple(rows)


def error_in_float32(subject: Subject) -> float:
    """The relative error in float32 on the far pair, where nothing cancels, beside itself in float64."""
    world = worlds()["far"]
    given = _situation((world.logits_p, world.logits_q), torch.float32)
    found = subject.parts(given).detach().double()
    return _relative(found, subject.parts(given.to(torch.float64)).detach().double())


def returned_dtype(subject: Subject) -> torch.dtype | None:
    """In what precision the function returns what it is given in bfloat16; None if it cannot be called so.

    A function that cannot is not at fault: it says so.
    """
    world = worlds()["far"]
    try:
        return subject.raw(_situation((world.logits_p, world.logits_q), torch.bfloat16)).dtype
    except KleashError:
        return None


@cache
def _near(level: float) -> tuple[Tensor, Tensor]:
    """A pair with this KL: a step from p along a fixed direction, as long as it takes."""
    draw = torch.Generator().manual_seed(7)
    p, direction = torch.randn(2, 1, VOCAB, generator=draw, dtype=torch.float64)
    step = 1.0
    for _ in range(6):
        apart = divergence("kl", p.log_softmax(-1), (p + step * direction).log_softmax(-1)).item()
        step *= (level / apart) ** 0.5
    return p, p + step * direction


def _situation(pair: tuple[Tensor, Tensor], dtype: torch.dtype) -> Situation:
    """Every token of the vocabulary once; p carries a gradient, since some functions insist on one."""
    p, q = (side.expand(VOCAB, VOCAB).unsqueeze(1) for side in pair)
    return make_situation(p.clone().requires_grad_(), q, torch.arange(VOCAB).unsqueeze(-1), dtype=dtype)


def _row(subject: Subject, pair: tuple[Tensor, Tensor], dtype: torch.dtype, formula: Formula) -> AccuracyRow:
    """The error beside that of the formula in float32, on the very same inputs."""
    given = _situation(pair, dtype)
    found = subject.parts(given).detach().double().sum(-1)
    right = formula(given.to(torch.float64)).detach()
    careful = formula(given.to(torch.float32)).detach().double()
    return AccuracyRow(
        dtype=str(dtype).removeprefix("torch."),
        kl=divergence("kl", *(side.log_softmax(-1) for side in pair)).item(),
        relative_error=_relative(found, right),
        forced=_relative(careful, right),
    )


def _formula(subject: Subject, estimator: str, is_claimed: bool) -> Formula:
    """The number for each sequence of one token, in the precision of the situation."""
    if not estimator and (not is_claimed or subject.convention.sees == "tokens"):
        return lambda s: subject.parts(s).sum(-1)
    fields = ("hidden_p", "logits_p", "probs_p", "logp")
    field = next((field for field in fields if reads(subject, field)), "token_logp")

    def of(s: Situation) -> Tensor:
        if field == "token_logp":
            return ESTIMATORS[estimator].of(s.token_logp - s.token_logq).squeeze(-1)
        p, q = _whole(s, field)
        if not estimator:
            return divergence(subject.convention.claims, p, q).squeeze(-1)
        return ESTIMATORS[estimator].of((p - q).gather(-1, s.tokens.unsqueeze(-1))).flatten()

    return of


def _whole(s: Situation, field: str) -> tuple[Tensor, Tensor]:
    """Both distributions as they follow from what the function reads."""
    if field == "hidden_p":
        return (s.hidden_p @ s.head_p.T).log_softmax(-1), (s.hidden_q @ s.head_q.T).log_softmax(-1)
    if field == "logits_p":
        return s.logits_p.log_softmax(-1), s.logits_q.log_softmax(-1)
    if field == "probs_p":
        return s.probs_p.log(), s.probs_q.log()
    return s.logp, s.logq


def reads(subject: Subject, field: str) -> bool:
    """Whether the result depends on this field of the situation: it changes when that does."""
    world = worlds()["near"]
    given = _situation((world.logits_p, world.logits_q), torch.float64)
    moved = replace(given, **{field: getattr(given, field).detach() * 0.9 - 0.05})
    return not torch.equal(subject.parts(given).detach(), subject.parts(moved).detach())


def _relative(found: Tensor, right: Tensor) -> float:
    """The root mean square of the error over that of what is right."""
    return ((found - right).norm() / right.norm()).item()
