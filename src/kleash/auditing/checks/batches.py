"""Several responses in one call: whether they affect each other, and whether what is masked reaches the result."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf, isfinite, nan
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.checks.evidence import Matched
from kleash.auditing.toy_distributions import (
    HEADS,
    IGNORED,
    P_FIELDS,
    SEQUENCES,
    AuditInputs,
    leaf_inputs,
    make_inputs,
)
from kleash.errors import KleashError
from kleash.store.audit import Finding, MaskRow

ROWS = [3, 14, 22]
"""The responses of the batches."""
LENGTHS = (3, 2, 1)
"""Of the responses where they are padded."""
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
"""Name -> the logit of the padding's token under p, and under q, where the two other tokens have 0: a softmax does not
see a number that all share."""
SHIFTED = ("token_logq", "logits_q", "hidden_q")
"""Tensors of q that are shifted where a step is exchanged, so that its log ratio changes."""
ORDINARY = ("equal numbers", "other numbers")
"""The fills that the padding of any batch may hold."""
PADDING_SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "padding_in_denominator": "Its mean counts the masked positions in the denominator",
        "nan_from_padding": "Masked positions make the result NaN or infinite",
        "padding_counts": "Masked positions change the result",
        "cannot_be_called": "It cannot be called with padding",
    }
)
"""Kind of finding -> the beginning of its sentence."""


def batch_findings(audited: AuditedFunction, gradient: Matched, *, ignores_padding: bool) -> list[Finding]:
    """A batch of three responses compared with each response alone.

    Args:
        audited: the function; none of its faults is reported if it refuses such a batch.
        gradient: what its gradient is; a reward that is given late is no fault if its gradient is right.
        ignores_padding: whether padding has no effect; only then is a mean over unequal lengths judged.
    """
    convention = audited.convention
    try:
        faults = (
            [("wrong_reduction", "It is not a mean", _wrong_reduction(audited, ignores_padding))]
            if convention.gives == "mean"
            else [
                ("batch_dependent", "The result for a response depends on its batch", _dependence(audited)),
                ("wrong_credit", "Values are at the wrong tokens", _misplaced_values(audited)),
            ]
        )
    except KleashError:
        return []
    is_late = convention.place == "reward" and gradient.is_right and gradient.positions.level != "neither"
    return [
        Finding(
            kind=kind,
            severity="note" if kind == "wrong_credit" and is_late else "wrong",
            sentence=f"{statement}: {fault}.",
            where="sequences" if kind == "wrong_credit" else "batch",
        )
        for kind, statement, fault in faults
        if fault
    ]


def _batch_inputs(rows: list[int] = ROWS) -> AuditInputs:
    """The responses ``rows`` of the toy named ``SEQUENCES``, off-policy; p's tensors are leaves of the graph."""
    return leaf_inputs(SEQUENCES, "off-policy").select(rows)


def _wrong_reduction(audited: AuditedFunction, ignores_padding: bool) -> str:
    """The difference of a batch's mean from the mean of its responses, in words; "" if they agree."""
    inputs = _batch_inputs()
    means = torch.stack([audited.call(inputs.select(slice(i, i + 1))).detach() for i in range(len(ROWS))])
    factor = (audited.call(inputs).detach() / means.mean()).item()
    if abs(factor - 1) > 1e-4:
        return f"for {len(ROWS)} responses of equal length it is {factor:.4g} times the mean of their means"
    if not ignores_padding or batch_mean(audited) != "neither":
        return ""
    return (
        f"for responses of {', '.join(map(str, LENGTHS))} tokens it is neither the mean over all tokens nor the mean "
        "of the responses' means, so the weight of a response depends on the lengths of the others"
    )


def _dependence(audited: AuditedFunction) -> str:
    """The dependence of a response's result on the rest of its batch, in words; "" if there is none."""
    for rows in (ROWS, ROWS[:2]):
        inputs = _batch_inputs(rows)
        leaves = [getattr(inputs, name) for name in P_FIELDS]
        batch = audited.parts(audited.call(inputs).double())
        for i, in_batch in enumerate(batch):
            alone = audited.parts(audited.call(inputs.select(slice(i, i + 1))).double())[0]
            if not torch.allclose(in_batch, alone, rtol=1e-5, atol=1e-8, equal_nan=True):
                step = int((in_batch - alone).abs().nan_to_num(nan=torch.inf).argmax())
                return (
                    f"a value is {alone[step].item():.4g} for the response alone and {in_batch[step].item():.4g} in a "
                    f"batch of {len(rows)}"
                )
            gradients = audited.gradients((in_batch - alone).sum(), leaves)
            if any(g is not None and bool((g.abs() > 1e-6).any()) for g in gradients):  # NaN is no dependence
                return "its value is the same alone and in a batch, but its gradient is not"
    return ""


def _misplaced_values(audited: AuditedFunction) -> str:
    """The values that change with other tokens and not with the one at their position, in words; "" without any."""
    if audited.convention.gives == "sequence":
        return ""
    inputs, other = _batch_inputs(ROWS[:1]), _batch_inputs(ROWS[1:2])
    before = audited.parts(audited.call(inputs).double()).detach()[0]
    after = [audited.parts(audited.call(_with_step_of(inputs, other, step)).double())[0] for step in range(3)]
    # changes[step][position]: whether the value at position changes with the token at step; responses have 3 tokens
    changes = [~torch.isclose(before, row.detach(), rtol=1e-6, equal_nan=True) for row in after]
    return " and ".join(
        f"the value at token {at + 1} is that of token {[bool(row[at]) for row in changes].index(True) + 1}"
        for at in range(len(before))
        if not changes[at][at] and any(row[at] for row in changes)
    )


def _with_step_of(inputs: AuditInputs, other: AuditInputs, step: int) -> AuditInputs:
    """All tensors at one step replaced by those of another response, q's shifted by 0.3 nats."""

    def changed(name: str, x: Tensor) -> Tensor:
        if name in HEADS or not x.is_floating_point():
            return x
        x = x.detach().clone()
        x[:, step] = getattr(other, name)[:, step].detach() - 0.3 * (name in SHIFTED)
        return x

    return inputs.mapped(changed)


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


def padded_inputs(fill: str | None, lengths: tuple[int, int, int] = LENGTHS) -> AuditInputs:
    """Responses of three lengths in float32; their padding holds a fill, or its original numbers if None."""
    inputs = _batch_inputs().to(torch.float32)
    mask = torch.arange(3) < torch.tensor(lengths).unsqueeze(-1)
    if fill is not None:
        p, q = (torch.tensor([[[logit, 0.0, 0.0]]], dtype=torch.float64) for logit in FILLS[fill])
        padding = make_inputs(p, q, torch.tensor([[0]]), logits_behaviour=q, dtype=torch.float32)
        inputs = inputs.mapped(
            lambda name, x: (
                x
                if name in HEADS
                else torch.where(mask if x.dim() == 2 else mask.unsqueeze(-1), x, getattr(padding, name))
            )
        )
    return replace(inputs, mask=mask, labels=torch.where(mask, inputs.tokens, IGNORED)).as_leaves()


def check_padding(audited: AuditedFunction) -> tuple[tuple[MaskRow, ...], list[Finding]]:
    """The changes of value and gradient for each fill, against responses cut to their lengths; none without a mask.

    A finding is wrong if ordinary padding changes the result, fragile if only unusual padding does.
    """
    if not audited.convention.takes_mask:
        return (), []
    expected = _expected_with_padding(audited)
    if not all(bool(part.isfinite().all()) for part in expected):  # without any padding
        return (), []
    rows = [_padding_row(audited, fill, expected) for fill in FILLS]
    findings: list[Finding] = []
    for kind, statement in PADDING_SENTENCES.items():
        bad = [row for kind_of_row, row in rows if kind_of_row == kind]
        cases = ", ".join(f"{row.case} ({row.problem})" for row in bad)
        is_wrong = any(row.case in ORDINARY for row in bad)
        severity = "note" if kind == "cannot_be_called" else "wrong" if is_wrong else "fragile"
        if bad:
            end = "" if kind == "padding_in_denominator" else f" if they hold: {cases}"
            findings.append(Finding(kind=kind, severity=severity, sentence=f"{statement}{end}.", where=cases))
    return tuple(row for _, row in rows), [*findings, *_empty_response_findings(audited)]


def _empty_response_findings(audited: AuditedFunction) -> Iterator[Finding]:
    """Yield a finding if a response without unmasked tokens makes a mean, or the sum of each response, NaN."""
    inputs = padded_inputs(ORDINARY[0], lengths=(3, 2, 0))
    if audited.convention.gives in ("mean", "sequence"):
        with suppress(KleashError):  # the function refuses such a batch
            result = audited.call(inputs)
            gradients = audited.gradients(result.sum(), [getattr(inputs, name) for name in P_FIELDS])
            if not all(x is None or bool(x.isfinite().all()) for x in (result, *gradients)):
                yield Finding(
                    kind="nan_from_empty_response",
                    severity="fragile",
                    sentence="A response without unmasked tokens makes the result NaN or infinite.",
                    where="batch",
                )


def _expected_with_padding(audited: AuditedFunction) -> tuple[Tensor, Tensor]:
    """Values and gradients of the responses cut to their lengths, with zeros in the padding.

    If the result for a response depends on its batch, of the batch whose padding holds equal numbers.
    """
    if audited.convention.gives != "mean" and _dependence(audited):
        inputs = padded_inputs(ORDINARY[0])
        return audited.values_and_gradients(inputs, inputs)
    inputs = padded_inputs(None)
    values, gradients = zip(
        *(
            audited.values_and_gradients(inputs.select(slice(i, i + 1), slice(length)), inputs)
            for i, length in enumerate(LENGTHS)
        ),
        strict=True,
    )
    return pad_sequence([of_one[0] for of_one in values], batch_first=True), torch.stack(gradients).sum(0)


def _padding_row(audited: AuditedFunction, fill: str, expected: tuple[Tensor, Tensor]) -> tuple[str, MaskRow]:
    """The kind of finding, or "", and the row of a padded call compared with those of the cut responses."""
    inputs = padded_inputs(fill)
    try:
        results = audited.values_and_gradients(inputs, inputs)
    except KleashError as error:
        return "cannot_be_called", MaskRow(
            case=fill, value_change=nan, gradient_change=nan, problem=str(error)
        )
    changes = {
        of: (after - before).abs().max().item()  # NaN if any is
        for of, after, before in zip(("value", "gradient"), results, expected, strict=True)
    }
    over_padding = expected[0] * torch.tensor(LENGTHS).unsqueeze(-1) / max(LENGTHS)
    is_over_padding = audited.convention.gives == "mean" and torch.allclose(
        results[0], over_padding, 1e-4, 1e-7
    )
    faults = (
        *([("padding_in_denominator", "value")] if is_over_padding and changes["value"] > 1e-6 else []),
        *(("nan_from_padding", of) for of, change in changes.items() if not isfinite(change)),
        *(
            ("padding_counts", f"{of} changes by {change:.3g}")
            for of, change in changes.items()
            if change > 1e-5
        ),
    )
    kind, problem = next(iter(faults), ("", ""))
    return kind, MaskRow(
        case=fill, value_change=changes["value"], gradient_change=changes["gradient"], problem=problem
    )
