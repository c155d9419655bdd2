"""Padding: what stands where the mask is false must reach neither the value nor the gradient."""

from collections.abc import Mapping
from dataclasses import fields, replace
from math import inf, isnan, nan
from types import MappingProxyType

import torch
from torch import Tensor

from kleash.auditing.situations import Situation
from kleash.auditing.subject import Subject
from kleash.auditing.worlds import worlds
from kleash.errors import KleashError
from kleash.records.audit import MaskRow

ROWS = (3, 14, 22)
LENGTHS = (3, 2, 1)

FILLS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "equal numbers": (-1.0, -1.0),
        "other numbers": (-3.0, -0.5),
        "p 200 nats below q": (-200.0, 0.0),
        "p 200 nats above q": (0.0, -200.0),
        "q is -inf": (0.0, -inf),
        "both are -inf": (-inf, -inf),
        "NaN": (nan, nan),
    }
)
"""What is written into the padding of p's and of q's tensors."""

ORDINARY_PADDING = ("equal numbers", "other numbers")
"""The fills that any padding may hold."""

DIVIDES = "the mean divides by the padding too"

OF_P = ("token_logp", "logp", "probs_p", "logits_p", "hidden_p")
OF_Q = ("token_logq", "behaviour_logp", "logq", "probs_q", "logits_q", "hidden_q")


def mask_rows(subject: Subject) -> tuple[MaskRow, ...]:
    """The changes of value and gradient for each kind of padding; none if the function takes no mask."""
    if not subject.convention.takes_mask:
        return ()
    right_values, right_gradients = _without_padding(subject)
    return tuple(_row(subject, case, fill, right_values, right_gradients) for case, fill in FILLS.items())


def over_a_batch(subject: Subject) -> str:
    """How a mean over the mask averages over responses of unequal lengths, in words."""
    if subject.convention.gives != "mean" or not subject.convention.takes_mask:
        return ""
    given = padded(FILLS["equal numbers"])
    lengths = torch.tensor(LENGTHS)
    totals = subject.parts(given).detach().squeeze(-1)
    found = subject.convention.sign * subject.raw(given).detach()
    for right, words in (
        (totals.sum() / lengths.sum(), "Over a batch it takes the mean over all tokens that count."),
        ((totals / lengths).mean(), "Over a batch it takes the mean of the responses' means."),
    ):
        if torch.isclose(found, right.to(found.dtype), rtol=1e-4):
            return words
    return "Over a batch it takes neither the mean over all tokens nor the mean of the responses' means."


def padded(fill: tuple[float, float] | None) -> Situation:
    """Responses of three lengths, in float32; ``fill`` in their padding, or what was there."""
    world = worlds()["sequences"]
    whole = world.situation(world.logits_p, "on-policy")
    chosen = {
        field.name: getattr(whole, field.name)[list(ROWS)]
        for field in fields(whole)
        if not field.name.startswith("head_")
    }
    mask = torch.arange(3) < torch.tensor(LENGTHS).unsqueeze(-1)
    chosen = {name: x.float() if x.is_floating_point() else x for name, x in chosen.items()} | {"mask": mask}
    for names, side in ((OF_P, 0), (OF_Q, 1)):
        for name in names:
            x = chosen[name]
            counts = mask if x.dim() == 2 else mask.unsqueeze(-1)
            chosen[name] = x if fill is None else torch.where(counts, x, fill[side])
    heads = {name: getattr(whole, name).float() for name in ("head_p", "head_q")}
    leaves = {name: chosen[name].detach().clone().requires_grad_() for name in OF_P}
    return replace(whole, **{**chosen, **heads, **leaves})


def _of(subject: Subject, given: Situation) -> tuple[Tensor, Tensor]:
    """The parts [sequences, parts], and what they add up to where the mask is true."""
    parts = subject.parts(given)
    counted = torch.where(given.mask, parts, 0.0) if parts.shape == given.mask.shape else parts
    return parts, counted.sum()


def _gradients(subject: Subject, total: Tensor, given: Situation) -> dict[str, Tensor]:
    if not subject.differentiated or not total.requires_grad:
        return {}
    leaves = [getattr(given, name) for name in OF_P]
    found = subject.gradients(total, leaves)
    return {name: g for name, g in zip(OF_P, found, strict=True) if g is not None}


def _without_padding(subject: Subject) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Each response by itself, cut to its length: values and gradients."""
    values: list[Tensor] = []
    gradients: list[dict[str, Tensor]] = []
    for i, length in enumerate(LENGTHS):
        whole = padded(None)
        cut = whole.only(slice(i, i + 1), slice(length))
        parts, total = _of(subject, cut)
        values.append(parts.detach()[0])
        gradients.append({n: g[i, :length] for n, g in _gradients(subject, total, whole).items()})
    return values, gradients


def _row(
    subject: Subject,
    case: str,
    fill: tuple[float, float],
    right_values: list[Tensor],
    right_gradients: list[dict[str, Tensor]],
) -> MaskRow:
    given = padded(fill)
    try:
        parts, total = _of(subject, given)
        found = _gradients(subject, total, given)
    except KleashError as error:
        return MaskRow(case=case, value_change=nan, gradient_change=nan, problem=str(error))
    value_change, gradient_change, shrunk = 0.0, 0.0, subject.convention.gives == "mean"
    for i, (right, length) in enumerate(zip(right_values, LENGTHS, strict=True)):
        here = parts.detach()[i]
        padding = here[len(right) :]
        value_change = _larger(value_change, (here[: len(right)] - right).abs(), padding.abs())
        shrunk = shrunk and torch.allclose(here * 3, right * length, rtol=1e-4, atol=1e-7)
        for name, g in right_gradients[i].items():
            change = found[name][i, :length] - g if name in found else g
            beyond = found[name][i, length:] if name in found else g.new_zeros(1)
            gradient_change = _larger(gradient_change, change.abs(), beyond.abs())
    problem = DIVIDES if shrunk and value_change > 1e-6 else _problem(value_change, gradient_change)
    return MaskRow(case=case, value_change=value_change, gradient_change=gradient_change, problem=problem)


def _larger(so_far: float, *changes: Tensor) -> float:
    for change in changes:
        if change.numel():
            most = change.max().item()
            so_far = nan if isnan(most) or isnan(so_far) else max(so_far, most)
    return so_far


def _problem(value_change: float, gradient_change: float) -> str:
    for change, what in ((value_change, "value"), (gradient_change, "gradient")):
        if isnan(change) or change == inf:
            return f"the {what} becomes NaN or infinite"
    for change, what in ((value_change, "value"), (gradient_change, "gradient")):
        if change > 1e-5:
            return f"the {what} changes by {change:.3g}"
    return ""
