"""Extreme inputs in float32 and partly in bfloat16, and a NaN at an unmasked token."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import cos, inf, isfinite, isnan, nan, sin
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.checks.log_ratios import of_first_token, two_token_logp
from kleash.auditing.toy_distributions import (
    P_FIELDS,
    Q_FIELDS,
    SEQUENCES,
    leaf_inputs,
)
from kleash.divergences import divergence
from kleash.errors import KleashError
from kleash.store.audit import EdgeRow, Finding, Severity


class ExtremeCase(NamedTuple):
    """One sampled token by its log-probability, or the logits of all tokens; under p and under q."""

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
    # a list of the 20 likeliest tokens has all of a smaller vocabulary
    ExtremeCase(
        "there are 256 tokens", tuple(2 * sin(i) for i in range(256)), tuple(2 * cos(i) for i in range(256))
    ),
)
ORDINARY = ("p and q agree", "both are certain of the token", "there are 256 tokens")
"""Cases that any training run meets."""


class ExtremeProblem(NamedTuple):
    """The report on a problem that one finding names for all inputs that show it."""

    kind: str
    statement: str
    severity: Severity
    """If no ordinary input shows it."""
    concerns_infinity: bool = False
    """Whether it is reported only for a function that computes the claimed divergence."""


PROBLEMS: Mapping[str, ExtremeProblem] = MappingProxyType(
    {
        "value is NaN": ExtremeProblem("nan_value", "Its value is NaN", "fragile"),
        "value is NaN where the divergence is infinite": ExtremeProblem(
            "nan_value", "Its value is NaN, and the divergence infinite,", "note"
        ),
        "value is infinite where the divergence is finite": ExtremeProblem(
            "infinite_value", "Its value is infinite", "fragile", concerns_infinity=True
        ),
        "value is finite where the divergence is infinite": ExtremeProblem(
            "infinite_missed", "Its value is finite, though the divergence is infinite,", "note", True
        ),
        "gradient is NaN": ExtremeProblem("nan_gradient", "Its gradient is NaN", "fragile"),
        "gradient is infinite": ExtremeProblem("nan_gradient", "Its gradient is infinite", "fragile"),
    }
)
"""Problem -> its report. Inexact values and errors are reported for each input."""


def check_extreme_inputs(
    audited: AuditedFunction, *, is_claimed: bool, is_random: bool
) -> tuple[tuple[EdgeRow, ...], list[Finding]]:
    """Value and gradient on each extreme input, and a finding for each problem, inexact value or error.

    Args:
        audited: the function.
        is_claimed: whether the value is the claimed divergence where no log ratio is large.
        is_random: whether it is a mean over random values, which is never exact.
    """
    sees = audited.convention.sees
    cases = TOKEN_CASES if sees == "tokens" else LOGITS_CASES
    if sees == "hidden":  # a product of finite matrices has no -inf
        cases = tuple(case for case in cases if -inf not in (*case.p, *case.q))
    rows, of_each = list[EdgeRow](), list[Finding]()
    for case in cases:
        try:
            row = _row(audited, case)
        except KleashError as error:
            row = EdgeRow(case=case.name, exact=nan, value=nan, gradient=nan, problem=str(error))
            of_each.append(
                Finding(
                    kind="cannot_be_called",
                    severity="note",
                    sentence=f"It cannot be called where {case.name}: {error}.",
                    where=case.name,
                )
            )
        else:
            if row.problem and row.problem not in PROBLEMS and is_claimed and not is_random:
                of_each.append(
                    Finding(
                        kind="biased_value",
                        severity="wrong" if case.name in ORDINARY else "fragile",
                        sentence=f"Its {row.problem}, where {case.name}.",
                        where=case.name,
                    )
                )
        rows.append(row)
    return tuple(rows), [*_problem_findings(rows, is_claimed), *of_each]


def _problem_findings(rows: list[EdgeRow], is_claimed: bool) -> Iterator[Finding]:
    """Yield a finding for each of ``PROBLEMS`` that a row has."""
    for name, problem in PROBLEMS.items():
        cases = [row.case for row in rows if row.problem == name]
        if cases and (is_claimed or not problem.concerns_infinity):
            is_wrong = problem.severity == "fragile" and any(case in ORDINARY for case in cases)
            yield Finding(
                kind=problem.kind,
                severity="wrong" if is_wrong else problem.severity,
                sentence=f"{problem.statement} where {' and where '.join(cases)}.",
                where="; ".join(cases),
            )


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
    values, in_token, in_logits = of_first_token(audited, case.dtype, p, q)
    entries = in_logits[p.squeeze(1).isfinite()] if in_token is None and in_logits is not None else in_token
    gradient = nan if entries is None else entries[entries.abs().nan_to_num(nan=inf).argmax()].item()
    return EdgeRow(
        case=case.name,
        exact=exact,
        value=values.item(),
        gradient=gradient,
        problem=_problem(values.item(), 0.0 if entries is None else gradient, exact),
    )


def _problem(value: float, gradient: float, exact: float) -> str:
    """What is wrong with a value and its gradient where ``exact`` is the divergence; "" if nothing is.

    That is a key of ``PROBLEMS``, or a sentence with the numbers of an inexact value.
    """
    if isnan(value):
        return "value is NaN where the divergence is infinite" if exact == inf else "value is NaN"
    if exact == inf:
        return "" if value == inf else "value is finite where the divergence is infinite"
    if not isfinite(value):
        return "value is infinite where the divergence is finite"
    if not isfinite(gradient):
        return f"gradient is {'NaN' if isnan(gradient) else 'infinite'}"
    is_inexact = abs(value - exact) > 1e-3 + 1e-2 * abs(exact)
    return f"value is {value:.4g} where the divergence is {exact:.4g}" if is_inexact else ""


def nan_input_findings(audited: AuditedFunction) -> Iterator[Finding]:
    """Yield a finding if a NaN at an unmasked token, in an input that the result depends on, becomes a number."""
    hidden: list[str] = []
    inputs = leaf_inputs(SEQUENCES).select(slice(3, 5)).to(torch.float32)

    def values_with(field: str, factor: float) -> Tensor:
        """The values with the field multiplied at the second token of the first response."""
        changed = getattr(inputs, field).clone()
        changed[0, 1] *= factor
        return audited.values(replace(inputs, **{field: changed})).detach()

    for field in (*P_FIELDS, *Q_FIELDS):
        with suppress(KleashError):  # the function refuses NaN
            before, after, of_nan = (values_with(field, factor) for factor in (1.0, 0.9, nan))
            if not torch.equal(before, after) and not isnan(of_nan[0].sum().item()):
                hidden.append(field)
    if hidden:
        fields = ", ".join(hidden)
        yield Finding(
            kind="hides_nan",
            severity="fragile",
            sentence=f"It hides NaN: a NaN in {fields} at an unmasked token becomes a number.",
            where=fields,
        )
