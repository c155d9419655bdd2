"""Several responses in one call: whether they affect each other, and which token each value belongs to."""

from dataclasses import fields, replace

import torch
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.checks.padding import LENGTHS, ROWS, batch_mean
from kleash.auditing.inputs import P_FIELDS, AuditInputs
from kleash.auditing.toy_distributions import SEQUENCES, toy_distributions
from kleash.errors import KleashError
from kleash.store.audit import Finding


def batch_findings(
    audited: AuditedFunction, *, ignores_padding: bool, is_right_between_tokens: bool
) -> list[Finding]:
    """A batch of three responses compared with each response alone.

    Args:
        audited: the function; none of its faults is reported if it refuses such a batch.
        ignores_padding: whether padding has no effect; only then is a mean over unequal lengths judged.
        is_right_between_tokens: whether values at the wrong tokens are no fault, such as a reward given late.
    """
    try:
        if audited.convention.gives == "mean":
            reduction = _wrong_reduction(audited, ignores_padding)
            return [_finding("wrong_reduction", f"It is not a mean: {reduction}.")] if reduction else []
        dependence, positions = _dependence(audited), _misplaced_values(audited)
    except KleashError:
        return []
    findings: list[Finding] = []
    if dependence:
        sentence = f"The result for a response depends on its batch: {dependence}."
        findings.append(_finding("batch_dependent", sentence))
    if positions:
        finding = _finding("wrong_credit", f"Values are at the wrong tokens: {positions}.")
        severity = "note" if is_right_between_tokens else "wrong"
        findings.append(replace(finding, severity=severity, where="sequences"))
    return findings


def _finding(kind: str, sentence: str) -> Finding:
    return Finding(kind=kind, severity="wrong", sentence=sentence, where="batch")


def _batch_inputs(rows: list[int] = ROWS) -> AuditInputs:
    toy = toy_distributions()[SEQUENCES]
    return toy.inputs(toy.logits_p.clone().requires_grad_(), "on-policy").select(rows)


def _wrong_reduction(audited: AuditedFunction, ignores_padding: bool) -> str:
    """The difference of a batch's mean from the mean of its responses, in words; "" if they agree."""
    inputs = _batch_inputs()
    means = torch.stack([audited.call(inputs.select(slice(i, i + 1))).detach() for i in range(len(ROWS))])
    result, mean = audited.call(inputs).detach(), means.mean()
    if torch.isclose(result, mean, rtol=1e-4):
        if not ignores_padding or batch_mean(audited) != "neither":
            return ""
        return (
            f"for responses of {', '.join(map(str, LENGTHS))} tokens it is neither the mean over all tokens nor the "
            "mean of the responses' means, so the weight of a response depends on the lengths of the others"
        )
    if torch.isclose(result, means.sum(), rtol=1e-4):
        return "for three responses of equal length it is the sum of their means, so it grows with the batch"
    factor = (result / mean).item()
    return f"for three responses of equal length it is {factor:.4g} times the mean of their means"


def _dependence(audited: AuditedFunction) -> str:
    """The dependence of a response's result on the rest of its batch, in words; "" if there is none."""
    for rows in (ROWS, ROWS[:2]):
        inputs = _batch_inputs(rows)
        batch = audited.parts(audited.call(inputs).double())
        for i, in_batch in enumerate(batch.detach()):
            alone = audited.parts(audited.call(inputs.select(slice(i, i + 1))).double())[0].detach()
            if not torch.allclose(in_batch, alone, rtol=1e-5, atol=1e-8, equal_nan=True):
                step = int((in_batch - alone).abs().nan_to_num(nan=torch.inf).argmax())
                return (
                    f"a value is {alone[step].item():.4g} for the response alone and {in_batch[step].item():.4g} in a "
                    f"batch of {len(rows)}"
                )
        leaves = [x for x in (getattr(inputs, name) for name in P_FIELDS) if x.requires_grad]
        gradients = audited.gradients(batch[0].sum(), leaves)
        if any(g is not None and bool((g[1:] != 0).any()) for g in gradients):
            return "its value is the same alone and in a batch, but its gradient reaches other responses"
    return ""


def _misplaced_values(audited: AuditedFunction) -> str:
    """The values that change with other tokens and not with the one at their position, in words; "" without any."""
    if audited.convention.gives == "sequence":
        return ""
    inputs, other = _batch_inputs(ROWS[:1]), _batch_inputs(ROWS[1:2])
    before = audited.parts(audited.call(inputs).double()).detach()[0]
    after = [audited.parts(audited.call(_with_step_of(inputs, other, step)).double())[0] for step in range(3)]
    changes = [~torch.isclose(before, row.detach(), rtol=1e-6, equal_nan=True) for row in after]
    return " and ".join(
        f"the value at token {at + 1} is that of token {[bool(row[at]) for row in changes].index(True) + 1}"
        for at in range(len(before))
        if not changes[at][at] and any(row[at] for row in changes)
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
