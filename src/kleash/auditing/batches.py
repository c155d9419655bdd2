"""Several responses at once: whether one changes another's result, and which token a value belongs to."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from kleash.auditing.masks import LENGTHS, ROWS, over_a_batch
from kleash.auditing.situations import Situation
from kleash.auditing.subject import Subject
from kleash.auditing.worlds import worlds
from kleash.errors import KleashError

NEITHER = "neither"


@dataclass(frozen=True, kw_only=True)
class Together:
    """What came of several responses in one call; each is "" where there is nothing to say."""

    dependence: str = ""
    """How a response's value or gradient in a batch differs from that of the response alone."""
    reduction: str = ""
    """What a mean over several responses is instead."""
    misplaced: str = ""
    """Which tokens' values do not depend on the token that they stand at."""


def together(subject: Subject, *, pads_rightly: bool) -> Together:
    """Compare a batch of three responses with the three alone; ``pads_rightly``: padding is no finding already."""
    try:
        if subject.convention.gives == "mean":
            return Together(reduction=_reduction(subject, pads_rightly))
        return Together(dependence=_dependence(subject), misplaced=_misplaced(subject))
    except KleashError:
        return Together()


def _situation(rows: tuple[int, ...] = ROWS) -> Situation:
    world = worlds()["sequences"]
    logits = world.logits_p.clone().requires_grad_()
    whole = world.situation(logits, "on-policy")
    chosen = {
        field.name: getattr(whole, field.name)[list(rows)]
        for field in fields(whole)
        if not field.name.startswith("head_")
    }
    return replace(whole, **chosen)


def _reduction(subject: Subject, pads_rightly: bool) -> str:
    """Whether the mean of a batch is the mean of its responses; "" if it is."""
    given = _situation()
    each = torch.stack([subject.raw(given.only(slice(i, i + 1))).detach() for i in range(len(ROWS))])
    found, mean = subject.raw(given).detach(), each.mean()
    if not torch.isclose(found, mean, rtol=1e-4):
        if torch.isclose(found, each.sum(), rtol=1e-4):
            return "of three responses of equal length it is the sum of their means: it grows with the batch"
        return f"of three responses of equal length it is {(found / mean).item():.4g} times the mean of their means"
    if pads_rightly and NEITHER in over_a_batch(subject):
        lengths = ", ".join(map(str, LENGTHS))
        return (
            f"of responses of {lengths} tokens it is neither the mean over all tokens nor the mean of the "
            "responses' means, so that their weight depends on the lengths of the others"
        )
    return ""


def _values(subject: Subject, given: Situation) -> Tensor:
    """[sequences, steps], or [sequences, 1]; gradients attached."""
    found = subject.raw(given).double()
    if subject.convention.gives == "vocabulary":
        return found.sum(-1)
    return found.unsqueeze(-1) if subject.convention.gives == "sequence" else found


def _dependence(subject: Subject) -> str:
    for rows in (ROWS, ROWS[:2]):
        given = _situation(rows)
        batch = _values(subject, given)
        for i in range(len(rows)):
            alone_given = given.only(slice(i, i + 1))
            alone = _values(subject, alone_given)
            if not torch.allclose(batch[i].detach(), alone[0].detach(), rtol=1e-5, atol=1e-8, equal_nan=True):
                return _compared(batch.detach(), alone.detach(), i, len(rows))
        if subject.differentiated and batch.requires_grad and _reaches_others(subject, given, batch):
            return "a response's value is the same alone and in a batch, its gradient reaches the others"
    return ""


def _compared(batch: Tensor, alone: Tensor, row: int, count: int) -> str:
    at = int((batch[row] - alone[0]).abs().nan_to_num(nan=torch.inf).argmax())
    found, right = batch[row, at].item(), alone[0, at].item()
    return f"a value is {right:.4g} in a response by itself, and {found:.4g} in a batch of {count}"


def _reaches_others(subject: Subject, given: Situation, batch: Tensor) -> bool:
    """Whether the first response's value has a gradient in the inputs of another."""
    leaves = [
        x
        for x in (given.token_logp, given.logp, given.logits_p, given.probs_p, given.hidden_p)
        if x.requires_grad
    ]
    found = subject.gradients(batch[0].sum(), leaves, again=True)
    return any(g is not None and bool((g[1:] != 0).any()) for g in found)


def _misplaced(subject: Subject) -> str:
    """Which values change with other tokens and not with their own."""
    if subject.convention.gives == "sequence":
        return ""
    given, other = _situation(ROWS[:1]), _situation(ROWS[1:2])
    before = _values(subject, given).detach()[0]
    changes: list[list[bool]] = []
    for step in range(len(before)):
        after = _values(subject, _with_step_of(given, other, step)).detach()[0]
        changes.append(
            [not torch.isclose(a, b, rtol=1e-6, equal_nan=True) for a, b in zip(before, after, strict=True)]
        )
    astray = [
        (at, next(step for step, row in enumerate(changes) if row[at]))
        for at in range(len(before))
        if not changes[at][at] and any(row[at] for row in changes)
    ]
    if not astray:
        return ""
    return " and ".join(f"that at token {at + 1} is token {source + 1}'s" for at, source in astray)


def _with_step_of(given: Situation, other: Situation, step: int) -> Situation:
    """Everything about one token replaced by that of another response, half a nat off."""
    changed: dict[str, Tensor] = {}
    for field in fields(Situation):
        x = getattr(given, field.name)
        if x.is_floating_point() and not field.name.startswith("head_"):
            x = x.detach().clone()
            theirs = getattr(other, field.name)[:, step].detach()
            shift = 0.3 if field.name in ("token_logq", "logits_q", "hidden_q") else 0.0
            x[:, step] = theirs - shift
            changed[field.name] = x
    return replace(given, **changed)
