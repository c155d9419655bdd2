"""``audit`` for one function, and ``audits_of`` for the cases of a target."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.checks.purity import check_purity, restored_process_settings
from kleash.auditing.conventions import Convention, resolve_convention
from kleash.auditing.report import (
    audit_of_failing_calls,
    audit_of_refusal,
    audit_record,
    function_name,
    with_remedies,
)
from kleash.auditing.targets.cases import Case
from kleash.errors import CannotRunError, ShapeError
from kleash.store.audit import Audit, Finding


def audit(
    function: Callable[..., Any],
    convention: str | Convention,
    *,
    name: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Audit:
    """Determine what a KL implementation estimates and what it differentiates, by exact enumeration.

    The function is called with every response over toy distributions, and its results are weighted by the probabilities
    of the responses. Expectations are therefore finite sums in float64 without sampling error, and two audits of one
    pure function are equal. Impure functions are reported; a random one is averaged over many calls. The function is
    also called along the log ratio from -100 to 100 nats, on extreme inputs, with arbitrary numbers in the padding, in
    float32 and in bfloat16.

    Args:
        function: the KL function; called hundreds of times on tiny tensors, on the CPU.
        convention: how it is called and what it returns: a name of ``CONVENTIONS``, or a ``Convention``.
        name: its name in the audit; None for its module and qualified name.
        arguments: keyword arguments for every call.

    Returns:
        The verdict, the findings, and the numbers that they are based on.

    Raises:
        UnknownNameError: if no convention has this name.
        CannotRunError: if the function raises an error or returns no tensor.
        ShapeError: if its result does not have the shape of the convention.
    """
    if not callable(function):
        raise CannotRunError(f"{function!r} cannot be called; give the function that computes the KL")
    audited = AuditedFunction(
        function=function,
        convention=resolve_convention(convention),
        name=name or function_name(function),
        arguments=dict(arguments or {}),
    )
    with restored_process_settings():
        purity = check_purity(audited)
        try:
            return audit_record(audited, purity)
        except (CannotRunError, ShapeError) as error:
            if not purity.has_state:
                raise
            return audit_of_failing_calls(audited, purity, str(error))


def audits_of(cases: Sequence[Case]) -> Iterator[Audit]:
    """The audit of each case, with notes on how it was run.

    If one of several cases cannot be called, that is a finding; if the only case cannot, it is an error.

    Raises:
        CannotRunError, ShapeError: if the only case cannot be called by its convention.
    """
    for case in cases:
        try:
            result = audit(case.function, case.convention, name=case.name, arguments=case.arguments)
        except (CannotRunError, ShapeError) as error:
            if len(cases) == 1:
                raise
            audited = AuditedFunction(
                function=case.function,
                convention=case.convention,
                name=case.name,
                arguments=case.arguments,
            )
            result = audit_of_refusal(audited, str(error))
        findings = with_remedies(
            [_with_case_severity(finding, case) for finding in result.findings], case.convention
        )
        yield replace(
            result,
            findings=findings,
            notes=(*case.notes, *result.notes),
            versions={**result.versions, **case.versions},
        )


def _with_case_severity(finding: Finding, case: Case) -> Finding:
    """The finding, fragile instead of wrong if the case's trainer never causes it."""
    if finding.severity == "wrong" and finding.kind in case.fragile:
        return replace(finding, severity="fragile")
    return finding
