"""NaN in what counts: does it show in the result, or is it turned into a number?"""

from dataclasses import replace

import torch

from kleash.auditing.masks import OF_P, OF_Q
from kleash.auditing.situations import Situation
from kleash.auditing.subject import Subject
from kleash.auditing.worlds import worlds
from kleash.errors import KleashError
from kleash.records.audit import EdgeRow

CASE = "{} is NaN at a token that counts"
PROBLEM = "a NaN in the input becomes a number"


def nan_rows(subject: Subject) -> tuple[EdgeRow, ...]:
    """For each input that the result depends on, what becomes of a NaN in it."""
    found: list[EdgeRow] = []
    for field in (*OF_P, *OF_Q):
        given = _situation()
        if getattr(given, field).dim() == 2 and subject.convention.sees != "tokens" and field != "token_logp":
            continue
        try:
            plain = subject.parts(given).detach()
            moved = subject.parts(_spoilt(given, field, None)).detach()
            if torch.equal(plain, moved):
                continue  # it does not read this
            value = subject.parts(_spoilt(given, field, torch.nan)).detach()[0].sum().item()
        except KleashError:
            continue  # it refuses NaN, and says so
        hidden = value == value
        found.append(
            EdgeRow(
                case=CASE.format(field),
                exact=torch.nan,
                value=value,
                gradient=torch.nan,
                problem=PROBLEM if hidden else "",
            )
        )
    return tuple(found)


def _situation() -> Situation:
    """Two responses of three tokens, in float32."""
    world = worlds()["sequences"]
    logits = world.logits_p.clone().requires_grad_()
    return world.situation(logits, "on-policy").only(slice(3, 5)).to(torch.float32)


def _spoilt(given: Situation, field: str, number: float | None) -> Situation:
    """The second token of the first response with this number in the field; without one, with other numbers."""
    before = getattr(given, field)
    changed = before.clone()
    changed[0, 1] = before[0, 1] * 0.9 - 0.05 if number is None else number
    return replace(given, **{field: changed})
