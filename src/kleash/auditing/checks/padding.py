"""Padding: what stands where the mask is false must not reach the value or the gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, isnan, nan
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.inputs import P_FIELDS, Q_FIELDS, AuditInputs
from kleash.auditing.toy_distributions import SEQUENCES, toy_distributions
from kleash.errors import KleashError
from kleash.store.audit import Finding, MaskRow

ROWS = [3, 14, 22]
"""The responses that are padded."""
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
"""Name -> the numbers written into the padding of p's tensors, and of q's."""
ORDINARY = ("equal numbers", "other numbers")
"""The fills that the padding of any batch may hold."""


class PaddingDefect(NamedTuple):
    """The report on a defect of the padding."""

    kind: str
    """Of the finding."""
    problem: str
    case: str
    """A fill with this defect in the finding's sentence, made of its row."""


DEFECTS: Mapping[str, PaddingDefect] = MappingProxyType(
    {
        "denominator": PaddingDefect(
            "padding_in_denominator", "the mean counts the padding in its denominator", "{0.case}"
        ),
        "nonfinite_value": PaddingDefect(
            "nan_from_padding", "the value becomes NaN or infinite", "{0.case} (value)"
        ),
        "nonfinite_gradient": PaddingDefect(
            "nan_from_padding", "the gradient becomes NaN or infinite", "{0.case} (gradient)"
        ),
        "value_change": PaddingDefect(
            "padding_counts", "the value changes by {value:.3g}", "{0.case} ({0.problem})"
        ),
        "gradient_change": PaddingDefect(
            "padding_counts", "the gradient changes by {gradient:.3g}", "{0.case} ({0.problem})"
        ),
        "error": PaddingDefect("cannot_be_called", "", "{0.case}: {0.problem}"),
    }
)
"""Defect of a fill -> its report; that of "error" is the message."""
SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "padding_in_denominator": "Its mean counts the masked positions in the denominator.",
        "nan_from_padding": "Masked positions make the result NaN or infinite if they hold: {cases}.",
        "padding_counts": "Masked positions change the result if they hold: {cases}.",
        "cannot_be_called": "It cannot be called with padding: {cases}.",
    }
)
"""Kind of finding -> its sentence."""


def padding_rows(audited: AuditedFunction) -> tuple[MaskRow, ...]:
    """The changes of value and gradient for each fill, against responses cut to their lengths; none without a mask."""
    if not audited.convention.takes_mask:
        return ()
    cut = [_of_cut_response(audited, i, length) for i, length in enumerate(LENGTHS)]
    return tuple(_padding_row(audited, name, cut) for name in FILLS)


def padding_findings(rows: Sequence[MaskRow]) -> list[Finding]:
    """Findings about the effect of masked positions on the result: one per kind.

    Wrong if ordinary padding changes the result, fragile if only unusual padding does.
    """
    findings: list[Finding] = []
    for kind, sentence in SENTENCES.items():
        bad = [row for row in rows if row.defect and DEFECTS[row.defect].kind == kind]
        if not bad:
            continue
        cases = ", ".join(DEFECTS[row.defect].case.format(row) for row in bad)
        is_wrong = kind != "nan_from_padding" and any(row.case in ORDINARY for row in bad)
        findings.append(
            Finding(
                kind=kind,
                severity="note" if kind == "cannot_be_called" else "wrong" if is_wrong else "fragile",
                sentence=sentence.format(cases=cases),
                where=cases,
            )
        )
    return findings


def batch_mean(audited: AuditedFunction) -> Literal["", "tokens", "responses", "neither"]:
    """What a masked mean over responses of unequal lengths is the mean over; "" for another function."""
    if audited.convention.gives != "mean" or not audited.convention.takes_mask:
        return ""
    inputs, lengths = padded_inputs("equal numbers"), torch.tensor(LENGTHS)
    totals = audited.values(inputs).detach().squeeze(-1)
    mean = audited.convention.sign * audited.call(inputs).detach()
    if torch.isclose(mean, (totals.sum() / lengths.sum()).to(mean.dtype), rtol=1e-4):
        return "tokens"
    is_of_means = torch.isclose(mean, (totals / lengths).mean().to(mean.dtype), rtol=1e-4)
    return "responses" if is_of_means else "neither"


def padded_inputs(fill: str | None) -> AuditInputs:
    """Responses of three lengths in float32; their padding holds a fill, or its original numbers if None."""
    toy = toy_distributions()[SEQUENCES]
    inputs = toy.inputs(toy.logits_p, "on-policy").select(ROWS).to(torch.float32)
    mask = torch.arange(3) < torch.tensor(LENGTHS).unsqueeze(-1)
    if fill is not None:
        numbers = {**dict.fromkeys(P_FIELDS, FILLS[fill][0]), **dict.fromkeys(Q_FIELDS, FILLS[fill][1])}
        tensors = {name: getattr(inputs, name) for name in numbers}
        inputs = replace(
            inputs,
            **{
                name: torch.where(mask if x.dim() == 2 else mask.unsqueeze(-1), x, numbers[name])
                for name, x in tensors.items()
            },
        )
    leaves = {name: getattr(inputs, name).detach().clone().requires_grad_() for name in P_FIELDS}
    return replace(inputs, mask=mask, **leaves)


Result = tuple[Tensor, list[Tensor]]
"""Values [sequences, parts], and the gradients of their unmasked sum in each of ``P_FIELDS``."""


def _result(audited: AuditedFunction, inputs: AuditInputs, leaves: AuditInputs) -> Result:
    """Values and gradients of one call, in the tensors of ``leaves``."""
    values, tensors = audited.values(inputs), [getattr(leaves, name) for name in P_FIELDS]
    unmasked = torch.where(inputs.mask, values, 0.0) if values.shape == inputs.mask.shape else values
    gradients = zip(tensors, audited.gradients(unmasked.sum(), tensors), strict=True)
    return values.detach(), [torch.zeros_like(x) if g is None else g for x, g in gradients]


def _of_cut_response(audited: AuditedFunction, i: int, length: int) -> Result:
    """The result for one response without its padding."""
    inputs = padded_inputs(None)
    values, gradients = _result(audited, inputs.select(slice(i, i + 1), slice(length)), inputs)
    return values[0], [g[i, :length] for g in gradients]


def _padding_row(audited: AuditedFunction, fill: str, cut: Sequence[Result]) -> MaskRow:
    """A padded call compared with those of the cut responses."""
    inputs = padded_inputs(fill)
    try:
        values, gradients = _result(audited, inputs, inputs)
    except KleashError as error:
        return MaskRow(case=fill, value_change=nan, gradient_change=nan, problem=str(error), defect="error")
    value_change, gradient_change = 0.0, 0.0
    counts_padding = audited.convention.gives == "mean"
    for i, (length, (expected, expected_gradients)) in enumerate(zip(LENGTHS, cut, strict=True)):
        row, parts = values[i], len(expected)
        value_change = _largest(value_change, row[:parts] - expected, row[parts:])
        counts_padding = counts_padding and torch.allclose(row * 3, expected * length, rtol=1e-4, atol=1e-7)
        for g, expected_g in zip(gradients, expected_gradients, strict=True):
            gradient_change = _largest(gradient_change, g[i, :length] - expected_g, g[i, length:])
    defect = (
        "denominator" if counts_padding and value_change > 1e-6 else _defect(value_change, gradient_change)
    )
    problem = DEFECTS[defect].problem if defect else ""
    return MaskRow(
        case=fill,
        value_change=value_change,
        gradient_change=gradient_change,
        problem=problem.format(value=value_change, gradient=gradient_change),
        defect=defect,
    )


def _largest(largest: float, *changes: Tensor) -> float:
    """The maximum of a number and of the absolute values of tensors; NaN if any is NaN."""
    maxima = [largest, *(change.abs().max().item() for change in changes if change.numel())]
    return nan if any(map(isnan, maxima)) else max(maxima)


def _defect(value_change: float, gradient_change: float) -> str:
    """A key of ``DEFECTS``, or ""."""
    for change, of in ((value_change, "value"), (gradient_change, "gradient")):
        if isnan(change) or change == inf:
            return f"nonfinite_{of}"
    if value_change > 1e-5:
        return "value_change"
    return "gradient_change" if gradient_change > 1e-5 else ""
