"""Several responses in one call: whether they affect each other, and which token each value belongs to."""

from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.inputs import P_FIELDS, AuditInputs
from kleash.auditing.probes.padding import ROWS, probe_batch_mean
from kleash.auditing.toy_distributions import SEQUENCES, toy_distributions
from kleash.errors import KleashError


@dataclass(frozen=True, kw_only=True)
class BatchDependence:
    """The dependence of the result for a response on the rest of its batch."""

    kind: Literal["value", "gradient"]
    alone: float = float("nan")
    in_batch: float = float("nan")
    batch_size: int = 0


@dataclass(frozen=True, kw_only=True)
class WrongReduction:
    """The difference of a mean over several responses from the correct one."""

    kind: Literal["sum", "multiple", "unequal_lengths"]
    factor: float = float("nan")
    """For "multiple": the result over the mean of the responses' means."""


@dataclass(frozen=True, kw_only=True)
class MisplacedValue:
    """A value that depends on another token than the one at its position."""

    position: int
    source: int
    """The first position whose token it depends on."""


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """The results of calls with several responses."""

    dependence: BatchDependence | None = None
    reduction: WrongReduction | None = None
    misplaced: tuple[MisplacedValue, ...] = ()


def probe_batches(audited: AuditedFunction, *, ignores_padding: bool) -> BatchResult:
    """Compare a batch of three responses with each response alone.

    Args:
        audited: the function.
        ignores_padding: whether padding has no effect; only then is a mean over unequal lengths judged.
    """
    try:
        if audited.convention.gives == "mean":
            return BatchResult(reduction=_wrong_reduction(audited, ignores_padding))
        return BatchResult(dependence=_dependence(audited), misplaced=_misplaced_values(audited))
    except KleashError:
        return BatchResult()


def _batch_inputs(rows: list[int] = ROWS) -> AuditInputs:
    toy = toy_distributions()[SEQUENCES]
    return toy.inputs(toy.logits_p.clone().requires_grad_(), "on-policy").select(rows)


def _wrong_reduction(audited: AuditedFunction, ignores_padding: bool) -> WrongReduction | None:
    """The difference of a batch's mean from the mean of its responses; None if they agree."""
    inputs = _batch_inputs()
    means = torch.stack([audited.call(inputs.select(slice(i, i + 1))).detach() for i in range(len(ROWS))])
    result, mean = audited.call(inputs).detach(), means.mean()
    if not torch.isclose(result, mean, rtol=1e-4):
        if torch.isclose(result, means.sum(), rtol=1e-4):
            return WrongReduction(kind="sum")
        return WrongReduction(kind="multiple", factor=(result / mean).item())
    if ignores_padding and probe_batch_mean(audited) == "neither":
        return WrongReduction(kind="unequal_lengths")
    return None


def _values(audited: AuditedFunction, inputs: AuditInputs) -> Tensor:
    """[sequences, steps], or [sequences, 1]; with gradients."""
    result = audited.call(inputs).double()
    if audited.convention.gives == "vocabulary":
        return result.sum(-1)
    return result.unsqueeze(-1) if audited.convention.gives == "sequence" else result


def _dependence(audited: AuditedFunction) -> BatchDependence | None:
    """The dependence of a response's result on its batch; None if there is none."""
    for rows in (ROWS, ROWS[:2]):
        inputs = _batch_inputs(rows)
        batch = _values(audited, inputs)
        for i in range(len(rows)):
            alone = _values(audited, inputs.select(slice(i, i + 1)))[0].detach()
            in_batch = batch[i].detach()
            if not torch.allclose(in_batch, alone, rtol=1e-5, atol=1e-8, equal_nan=True):
                step = int((in_batch - alone).abs().nan_to_num(nan=torch.inf).argmax())
                return BatchDependence(
                    kind="value",
                    alone=alone[step].item(),
                    in_batch=in_batch[step].item(),
                    batch_size=len(rows),
                )
        if (
            audited.is_differentiated
            and batch.requires_grad
            and _gradient_reaches_others(audited, inputs, batch)
        ):
            return BatchDependence(kind="gradient")
    return None


def _gradient_reaches_others(audited: AuditedFunction, inputs: AuditInputs, batch: Tensor) -> bool:
    """Whether the first response's value has a gradient in the inputs of another response."""
    leaves = [x for x in (getattr(inputs, name) for name in P_FIELDS) if x.requires_grad]
    gradients = audited.gradients(batch[0].sum(), leaves, retain_graph=True)
    return any(g is not None and bool((g[1:] != 0).any()) for g in gradients)


def _misplaced_values(audited: AuditedFunction) -> tuple[MisplacedValue, ...]:
    """The values that change with other tokens and not with the one at their position."""
    if audited.convention.gives == "sequence":
        return ()
    inputs, other = _batch_inputs(ROWS[:1]), _batch_inputs(ROWS[1:2])
    before = _values(audited, inputs).detach()[0]
    changes: list[list[bool]] = []
    """changes[step][position]: whether the value at ``position`` changes with the token at ``step``."""
    for step in range(len(before)):
        after = _values(audited, _with_step_of(inputs, other, step)).detach()[0]
        changes.append(
            [not torch.isclose(a, b, rtol=1e-6, equal_nan=True) for a, b in zip(before, after, strict=True)]
        )
    return tuple(
        MisplacedValue(
            position=position, source=next(step for step, row in enumerate(changes) if row[position])
        )
        for position in range(len(before))
        if not changes[position][position] and any(row[position] for row in changes)
    )


def _with_step_of(inputs: AuditInputs, other: AuditInputs, step: int) -> AuditInputs:
    """All tensors at one step replaced by those of another response, q's shifted by 0.3 nats."""
    changed: dict[str, Tensor] = {}
    for field in fields(AuditInputs):
        tensor = getattr(inputs, field.name)
        if tensor.is_floating_point() and not field.name.startswith("head_"):
            tensor = tensor.detach().clone()
            shift = 0.3 if field.name in ("token_logq", "logits_q", "hidden_q") else 0.0
            tensor[:, step] = getattr(other, field.name)[:, step].detach() - shift
            changed[field.name] = tensor
    return replace(inputs, **changed)
