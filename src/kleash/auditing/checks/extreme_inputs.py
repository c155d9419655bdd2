"""Extreme inputs in float32 and partly in bfloat16, and a NaN at an unmasked token."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite, isnan, nan
from types import MappingProxyType
from typing import NamedTuple

import torch

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.checks.log_ratios import two_token_logp
from kleash.auditing.inputs import P_FIELDS, Q_FIELDS, AuditInputs, make_inputs
from kleash.auditing.toy_distributions import SEQUENCES, toy_distributions
from kleash.divergences import divergence
from kleash.errors import KleashError
from kleash.store.audit import EdgeRow, Finding, Severity


class ExtremeCase(NamedTuple):
    """One sampled token by its log-probability, or logits over a vocabulary of four tokens; under p and under q."""

    name: str
    p: tuple[float, ...]
    q: tuple[float, ...]
    dtype: torch.dtype = torch.float32


TOKEN_CASES = (
    ExtremeCase("p and q agree", (-1.0,), (-1.0,)),
    ExtremeCase("both are certain of the token", (0.0,), (0.0,)),
    ExtremeCase("q almost rules out the token (80 nats)", (-0.5,), (-80.5,)),
    ExtremeCase("p almost rules out the token (80 nats)", (-80.5,), (-0.5,)),
    ExtremeCase("q rules out the token", (-0.5,), (-inf,)),
    ExtremeCase("in bfloat16, q is 30 nats below p", (-0.5,), (-30.5,), torch.bfloat16),
    ExtremeCase("in bfloat16, p is 30 nats below q", (-30.5,), (-0.5,), torch.bfloat16),
)
_UNIFORM = (0.0, 0.0, 0.0, 0.0)
LOGITS_CASES = (
    ExtremeCase("p and q agree", (0.3, 1.0, -2.0, 0.5), (0.3, 1.0, -2.0, 0.5)),
    ExtremeCase("p is almost certain (80 nats)", (80.0, 0.0, 0.0, 0.0), _UNIFORM),
    ExtremeCase("q is almost certain (80 nats)", _UNIFORM, (80.0, 0.0, 0.0, 0.0)),
    ExtremeCase("p rules out a token", (0.3, 1.0, -inf, 0.5), (0.1, 0.2, 0.5, 0.3)),
    ExtremeCase("q rules out a token", (0.1, 0.2, 0.5, 0.3), (0.3, 1.0, -inf, 0.5)),
    ExtremeCase(
        "in bfloat16, they are 30 nats apart", (30.0, 0.0, 0.0, 0.0), (0.0, 30.0, 0.0, 0.0), torch.bfloat16
    ),
    ExtremeCase("both rule out a token", (0.3, 1.0, -inf, 0.5), (0.1, 0.2, -inf, 0.3)),
)
ORDINARY = ("p and q agree", "both are certain of the token")
"""Cases that any training run meets."""


class ExtremeDefect(NamedTuple):
    """The report on a defect that one finding names for all inputs that show it."""

    problem: str
    kind: str
    statement: str
    severity: Severity
    """If no ordinary input shows it."""
    concerns_infinity: bool = False
    """Whether it is reported only for a function that computes the claimed divergence."""


DEFECTS: Mapping[str, ExtremeDefect] = MappingProxyType(
    {
        "nan_value": ExtremeDefect("value is NaN", "nan_value", "Its value is NaN", "fragile"),
        "nan_for_infinity": ExtremeDefect(
            "value is NaN where the divergence is infinite",
            "nan_value",
            "Its value is NaN, and the divergence infinite,",
            "note",
        ),
        "infinite_value": ExtremeDefect(
            "value is infinite where the divergence is finite",
            "infinite_value",
            "Its value is infinite",
            "fragile",
            concerns_infinity=True,
        ),
        "finite_for_infinity": ExtremeDefect(
            "value is finite where the divergence is infinite",
            "infinite_missed",
            "Its value is finite, though the divergence is infinite,",
            "note",
            concerns_infinity=True,
        ),
        "nan_gradient": ExtremeDefect("gradient is NaN", "nan_gradient", "Its gradient is NaN", "fragile"),
        "infinite_gradient": ExtremeDefect(
            "gradient is infinite", "nan_gradient", "Its gradient is infinite", "fragile"
        ),
    }
)
"""Defect -> its report. "inexact_value" and "error" are reported for each input."""


def extreme_rows(audited: AuditedFunction) -> list[EdgeRow]:
    """Value and gradient on each extreme input."""
    sees = audited.convention.sees
    cases = TOKEN_CASES if sees == "tokens" else LOGITS_CASES
    if sees == "hidden":  # a product of finite matrices has no -inf
        cases = [case for case in cases if -inf not in (*case.p, *case.q)]
    return [_row(audited, case) for case in cases]


def extreme_findings(rows: Sequence[EdgeRow], *, is_claimed: bool, is_random: bool) -> list[Finding]:
    """Findings on the extreme inputs: one per defect, or per input for wrong values and errors.

    Args:
        rows: of ``extreme_rows``.
        is_claimed: whether the value is the claimed divergence where no log ratio is large.
        is_random: whether it is a mean over random values, which is never exact.
    """
    findings: list[Finding] = []
    for name, defect in DEFECTS.items():
        cases = [row.case for row in rows if row.defect == name]
        if cases and (is_claimed or not defect.concerns_infinity):
            is_wrong = defect.severity == "fragile" and any(case in ORDINARY for case in cases)
            findings.append(
                Finding(
                    kind=defect.kind,
                    severity="wrong" if is_wrong else defect.severity,
                    sentence=f"{defect.statement} where {' and where '.join(cases)}.",
                    where="; ".join(cases),
                )
            )
    for row in rows:
        if row.defect == "inexact_value" and is_claimed and not is_random:
            severity: Severity = "wrong" if row.case in ORDINARY else "fragile"
            sentence = f"Its {row.problem}, where {row.case}."
            findings.append(
                Finding(kind="biased_value", severity=severity, sentence=sentence, where=row.case)
            )
        elif row.defect == "error":
            sentence = f"It cannot be called where {row.case}: {row.problem}."
            findings.append(
                Finding(kind="cannot_be_called", severity="note", sentence=sentence, where=row.case)
            )
    return findings


def _row(audited: AuditedFunction, case: ExtremeCase) -> EdgeRow:
    """Value and largest gradient entry: in the token's log-probability if the function reads it, else in the logits."""
    p, q = (torch.tensor(side).double() for side in (case.p, case.q))
    # A single token determines the divergence only where it is infinite.
    if audited.convention.sees == "tokens":
        p, q = two_token_logp(p), two_token_logp(q)
        exact = inf if -inf in case.q and audited.convention.claims == "kl" else nan
    else:
        p, q = p.reshape(1, 1, -1), q.reshape(1, 1, -1)
        exact = divergence(audited.convention.claims, p.log_softmax(-1), q.log_softmax(-1)).item()
    logits_p = p.requires_grad_()
    inputs = make_inputs(logits_p, q, torch.zeros(1, 1, dtype=torch.int64), dtype=case.dtype)
    try:
        result = audited.values(inputs).sum()
    except KleashError as error:
        return EdgeRow(
            case=case.name, exact=exact, value=nan, gradient=nan, problem=str(error), defect="error"
        )
    in_token, in_logits = audited.gradients(result, (inputs.token_logp, logits_p))
    entries = in_logits[logits_p.isfinite()] if in_token is None and in_logits is not None else in_token
    value, gradient = result.item(), nan
    if entries is not None:
        entries = entries.flatten()
        gradient = entries[entries.abs().nan_to_num(nan=inf).argmax()].item()
    defect = _defect(value, gradient, exact, has_gradient=entries is not None)
    problem = DEFECTS[defect].problem if defect in DEFECTS else ""
    if defect == "inexact_value":
        problem = f"value is {value:.4g} where the divergence is {exact:.4g}"
    return EdgeRow(
        case=case.name, exact=exact, value=value, gradient=gradient, problem=problem, defect=defect
    )


def _defect(value: float, gradient: float, exact: float, *, has_gradient: bool) -> str:
    """A key of ``DEFECTS``, "inexact_value", or ""."""
    if isnan(value):
        return "nan_for_infinity" if exact == inf else "nan_value"
    if exact == inf:
        return "" if value == inf else "finite_for_infinity"
    if not isfinite(value):
        return "infinite_value"
    if has_gradient and not isfinite(gradient):
        return "nan_gradient" if isnan(gradient) else "infinite_gradient"
    return "inexact_value" if abs(value - exact) > 1e-3 + 1e-2 * abs(exact) else ""


HIDDEN_NAN = " is NaN at an unmasked token"
"""After the field in the case of a row of ``nan_input_rows``."""


def nan_input_rows(audited: AuditedFunction) -> list[EdgeRow]:
    """For each input that the result depends on, the value when it is NaN at one token."""
    rows: list[EdgeRow] = []
    for field in (*P_FIELDS, *Q_FIELDS):
        inputs = _two_responses()
        is_per_token = getattr(inputs, field).dim() == 2
        if is_per_token and audited.convention.sees != "tokens" and field != "token_logp":
            continue
        try:
            before = audited.values(inputs).detach()
            after = audited.values(_with_second_token(inputs, field, None)).detach()
            if torch.equal(before, after):
                continue  # the function does not read this input
            value = audited.values(_with_second_token(inputs, field, nan)).detach()[0].sum().item()
        except KleashError:
            continue  # the function refuses NaN
        rows.append(
            EdgeRow(
                case=field + HIDDEN_NAN,
                exact=nan,
                value=value,
                gradient=nan,
                problem="" if isnan(value) else "a NaN in the input becomes a number",
                defect="" if isnan(value) else "hidden_nan",
            )
        )
    return rows


def nan_input_findings(rows: Sequence[EdgeRow]) -> list[Finding]:
    """A finding if a NaN at an unmasked token becomes a number."""
    fields = ", ".join(row.case.removesuffix(HIDDEN_NAN) for row in rows if row.defect)
    sentence = f"It hides NaN: a NaN in {fields} at an unmasked token becomes a number."
    finding = Finding(kind="hides_nan", severity="fragile", sentence=sentence, where=fields)
    return [finding] if fields else []


def _two_responses() -> AuditInputs:
    """Two responses of three tokens, in float32."""
    toy = toy_distributions()[SEQUENCES]
    logits = toy.logits_p.clone().requires_grad_()
    return toy.inputs(logits, "on-policy").select(slice(3, 5)).to(torch.float32)


def _with_second_token(inputs: AuditInputs, field: str, number: float | None) -> AuditInputs:
    """The field set to ``number`` at the second token of the first response; slightly changed if None."""
    tensor = getattr(inputs, field)
    changed = tensor.clone()
    changed[0, 1] = tensor[0, 1] * 0.9 - 0.05 if number is None else number
    return replace(inputs, **{field: changed})
