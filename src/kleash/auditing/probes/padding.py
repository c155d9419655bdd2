"""Padding: what stands where the mask is false must not reach the value or the gradient."""

from dataclasses import dataclass, replace
from math import inf, isnan, nan
from typing import Literal

import torch
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.inputs import P_FIELDS, Q_FIELDS, AuditInputs
from kleash.auditing.toy_distributions import SEQUENCES, toy_distributions
from kleash.errors import KleashError

ROWS = [3, 14, 22]
"""The responses that are padded."""
LENGTHS = (3, 2, 1)

PaddingDefect = Literal[
    "denominator", "nonfinite_value", "nonfinite_gradient", "value_change", "gradient_change", "error"
]
BatchMean = Literal["tokens", "responses", "neither"]
"""The mean over all tokens, the mean of the responses' means, or neither."""


@dataclass(frozen=True, kw_only=True)
class PaddingFill:
    """The number written into the padding of p's tensors, and of q's."""

    name: str
    p: float
    q: float
    is_ordinary: bool = False
    """Whether the padding of any batch may hold it."""


FILLS = (
    PaddingFill(name="equal numbers", p=-1.0, q=-1.0, is_ordinary=True),
    PaddingFill(name="other numbers", p=-3.0, q=-0.5, is_ordinary=True),
    PaddingFill(name="p 200 nats below q", p=-200.0, q=0.0),
    PaddingFill(name="p 200 nats above q", p=0.0, q=-200.0),
    PaddingFill(name="q is -inf", p=0.0, q=-inf),
    PaddingFill(name="both are -inf", p=-inf, q=-inf),
    PaddingFill(name="NaN", p=nan, q=nan),
)


@dataclass(frozen=True, kw_only=True)
class PaddingResult:
    """The difference of the result from that of the same responses without padding."""

    fill: PaddingFill
    value_change: float
    gradient_change: float
    defect: PaddingDefect | None
    error: str = ""
    """The message, for the defect "error"."""


def probe_padding(audited: AuditedFunction) -> tuple[PaddingResult, ...]:
    """The changes of value and gradient for each fill of the padding; none if the function takes no mask."""
    if not audited.convention.takes_mask:
        return ()
    unpadded = _unpadded_results(audited)
    return tuple(_padding_result(audited, fill, *unpadded) for fill in FILLS)


def probe_batch_mean(audited: AuditedFunction) -> BatchMean | None:
    """The weights of a masked mean for responses of unequal lengths; None if the function is not a masked mean."""
    if audited.convention.gives != "mean" or not audited.convention.takes_mask:
        return None
    inputs = padded_inputs(FILLS[0])
    lengths = torch.tensor(LENGTHS)
    totals = audited.values(inputs).detach().squeeze(-1)
    mean = audited.convention.sign * audited.call(inputs).detach()
    means: tuple[tuple[BatchMean, Tensor], ...] = (
        ("tokens", totals.sum() / lengths.sum()),
        ("responses", (totals / lengths).mean()),
    )
    for kind, expected in means:
        if torch.isclose(mean, expected.to(mean.dtype), rtol=1e-4):
            return kind
    return "neither"


def padded_inputs(fill: PaddingFill | None) -> AuditInputs:
    """Responses of three lengths in float32; their padding holds ``fill``, or its original numbers if None."""
    toy = toy_distributions()[SEQUENCES]
    inputs = toy.inputs(toy.logits_p, "on-policy").select(ROWS).to(torch.float32)
    mask = torch.arange(3) < torch.tensor(LENGTHS).unsqueeze(-1)
    if fill is not None:
        changes: dict[str, Tensor] = {}
        for names, number in ((P_FIELDS, fill.p), (Q_FIELDS, fill.q)):
            for name in names:
                tensor = getattr(inputs, name)
                changes[name] = torch.where(mask if tensor.dim() == 2 else mask.unsqueeze(-1), tensor, number)
        inputs = replace(inputs, **changes)
    leaves = {name: getattr(inputs, name).detach().clone().requires_grad_() for name in P_FIELDS}
    return replace(inputs, mask=mask, **leaves)


def _values_and_total(audited: AuditedFunction, inputs: AuditInputs) -> tuple[Tensor, Tensor]:
    """The values [sequences, parts], and their sum over the unmasked positions."""
    values = audited.values(inputs)
    unmasked = torch.where(inputs.mask, values, 0.0) if values.shape == inputs.mask.shape else values
    return values, unmasked.sum()


def _gradients(audited: AuditedFunction, total: Tensor, inputs: AuditInputs) -> dict[str, Tensor]:
    if not audited.is_differentiated or not total.requires_grad:
        return {}
    gradients = audited.gradients(total, [getattr(inputs, name) for name in P_FIELDS])
    return {name: g for name, g in zip(P_FIELDS, gradients, strict=True) if g is not None}


def _unpadded_results(audited: AuditedFunction) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Values and gradients of each response alone, cut to its length."""
    values: list[Tensor] = []
    gradients: list[dict[str, Tensor]] = []
    for i, length in enumerate(LENGTHS):
        inputs = padded_inputs(None)
        row_values, total = _values_and_total(audited, inputs.select(slice(i, i + 1), slice(length)))
        values.append(row_values.detach()[0])
        row_gradients = _gradients(audited, total, inputs)
        gradients.append({name: g[i, :length] for name, g in row_gradients.items()})
    return values, gradients


def _padding_result(
    audited: AuditedFunction,
    fill: PaddingFill,
    unpadded_values: list[Tensor],
    unpadded_gradients: list[dict[str, Tensor]],
) -> PaddingResult:
    """Compare a padded call with the call without padding."""
    inputs = padded_inputs(fill)
    try:
        values, total = _values_and_total(audited, inputs)
        gradients = _gradients(audited, total, inputs)
    except KleashError as error:
        return PaddingResult(
            fill=fill, value_change=nan, gradient_change=nan, defect="error", error=str(error)
        )
    value_change, gradient_change = 0.0, 0.0
    counts_padding = audited.convention.gives == "mean"
    for i, (expected, length) in enumerate(zip(unpadded_values, LENGTHS, strict=True)):
        row = values.detach()[i]
        padding = row[len(expected) :]
        value_change = _largest(value_change, (row[: len(expected)] - expected).abs(), padding.abs())
        counts_padding = counts_padding and torch.allclose(row * 3, expected * length, rtol=1e-4, atol=1e-7)
        for name, g in unpadded_gradients[i].items():
            change = gradients[name][i, :length] - g if name in gradients else g
            in_padding = gradients[name][i, length:] if name in gradients else g.new_zeros(1)
            gradient_change = _largest(gradient_change, change.abs(), in_padding.abs())
    return PaddingResult(
        fill=fill,
        value_change=value_change,
        gradient_change=gradient_change,
        defect="denominator"
        if counts_padding and value_change > 1e-6
        else _defect(value_change, gradient_change),
    )


def _largest(largest: float, *changes: Tensor) -> float:
    """The maximum of a number and of tensors; NaN if any is NaN."""
    for change in changes:
        if change.numel():
            maximum = change.max().item()
            largest = nan if isnan(maximum) or isnan(largest) else max(largest, maximum)
    return largest


def _defect(value_change: float, gradient_change: float) -> PaddingDefect | None:
    if isnan(value_change) or value_change == inf:
        return "nonfinite_value"
    if isnan(gradient_change) or gradient_change == inf:
        return "nonfinite_gradient"
    if value_change > 1e-5:
        return "value_change"
    return "gradient_change" if gradient_change > 1e-5 else None
