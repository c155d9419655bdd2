"""``audit`` for one function, and ``audits_of`` for the cases of a target."""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import isnan
from typing import Any

import torch
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction, KeptPrecision, parameter_roles
from kleash.auditing.checks.batches import batch_findings, batch_mean, check_padding
from kleash.auditing.checks.estimates import estimate_sentences, gradient_findings, value_findings
from kleash.auditing.checks.evidence import Evidence, gather_evidence
from kleash.auditing.checks.extreme_inputs import check_extreme_inputs, nan_input_findings
from kleash.auditing.checks.log_ratios import (
    log_ratio_findings,
    truncated_ratio_findings,
    truncated_ratio_zones,
)
from kleash.auditing.checks.precision import accuracy_rows, precision_findings
from kleash.auditing.checks.purity import (
    check_final_call,
    check_purity,
    restored_process_settings,
)
from kleash.auditing.conventions import CONVENTIONS, Convention, find_convention
from kleash.auditing.finding_kinds import SEVERITIES, remedy_of
from kleash.auditing.quantities import is_quantity
from kleash.auditing.targets.cases import Case
from kleash.auditing.targets.packages import version_of
from kleash.auditing.toy_distributions import IGNORED, SEQUENCES, leaf_inputs
from kleash.errors import CannotRunError, KleashError, OptionError, ShapeError
from kleash.store.audit import FAULTS, Audit, Finding
from kleash.version import __version__

REPEATS = 12
"""Calls that are averaged in each evaluation of a random function."""
MISTAKABLE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "mask": ("labels", ("label", "target")),
    "labels": ("mask", ("mask",)),
}
"""Field that says which positions count -> the other one, and words in the names of parameters that mean that."""
BATCH_MEANS: Mapping[str, tuple[str, ...]] = {
    "": (),
    "tokens": ("Over a batch it takes the mean over all unmasked tokens.",),
    "responses": ("Over a batch it takes the mean of the responses' means.",),
    "neither": (
        "Over a batch it takes neither the mean over all tokens nor the mean of the responses' means.",
    ),
}


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
        convention: how it is called and what it returns: a name of ``CONVENTIONS``, a call as ``from_call`` has it, or
            a ``Convention``.
        name: its name in the audit; None for its module and qualified name.
        arguments: keyword arguments for every call.

    Returns:
        The verdict, the findings, and the numbers that they are based on.

    Raises:
        UnknownNameError: if no convention has this name.
        OptionError: if a parameter for labels would get a mask, or one for a mask labels; if a call is not Python.
        CannotRunError: if the function raises an error or returns no tensor.
        ShapeError: if its result does not have the shape of the convention.

    >>> audit = kleash.audit(kleash.sampled_kl, "loss")
    >>> audit.value, audit.gradient  # k3 in a loss
    ('KL(p ‖ q)', 'KL(q ‖ p)')
    """
    if not callable(function):
        raise CannotRunError(f"{function!r} cannot be called; give the function that computes the KL")
    audited = AuditedFunction(
        function=function,
        convention=find_convention(convention),
        name=name or _function_name(function),
        arguments=dict(arguments or {}),
    )
    _require_labels_or_mask(audited)
    with restored_process_settings(), KeptPrecision() as precision, suppress(KleashError):
        audited.call(leaf_inputs(SEQUENCES))
        audited = replace(audited, keeps_precision=precision.has_converted)
        if audited.convention.sees != "tokens" and _reads_tokens(audited):
            audited = replace(
                audited, convention=replace(audited.convention, sees="tokens"), reads_tokens=True
            )
    with restored_process_settings():
        impurities = list[Finding]()
        try:
            first, impurities = check_purity(audited)
            return _audit_of(audited, first, impurities)
        except (CannotRunError, ShapeError) as error:
            if any(finding.kind == "stateful" for finding in impurities):
                return _record(audited, impurities, last=f"Nothing else could be determined: {error}.")
            is_of_call = audited.convention.summary in str(error)  # not of an import, or of the backward pass
            raise type(error)(f"{error}{_advice(audited) if is_of_call else ''}") from error


def _require_labels_or_mask(audited: AuditedFunction) -> None:
    """Raise OptionError if a parameter whose name says labels gets the mask, or the other way round."""
    for parameter, field in parameter_roles(audited.function, audited.convention).items():
        other, words = MISTAKABLE.get(field, ("", ()))
        if any(word in parameter.lower() for word in words) and field not in parameter.lower():
            raise OptionError(
                f"{audited.name} would get the {field} as its {parameter!r}; labels are tokens, {IGNORED} where "
                "nothing counts, and a mask is True where something does; write the call as the convention: "
                + _line(audited.convention, _call_of(audited.convention).replace(field, other) + ")")
            )


def _reads_tokens(audited: AuditedFunction) -> bool:
    """Whether the result for a response changes with its tokens where the distributions stay."""
    inputs = leaf_inputs(SEQUENCES).select(slice(1))
    shifted = (inputs.tokens + 1) % inputs.logp.shape[-1]
    first, again = audited.call(inputs), audited.call(inputs)
    return torch.equal(first, again) and not torch.equal(
        first, audited.call(replace(inputs, tokens=shifted, labels=shifted))
    )


def _line(convention: Convention, call: str) -> str:
    """The call as ``from_call`` takes it, with the result of the convention."""
    return repr(f"{call} -> {convention.gives} {convention.claims} {convention.place}")


def _advice(audited: AuditedFunction) -> str:
    """How a function can be audited that cannot be called by its convention, or not with every vocabulary."""

    def fits(convention: Convention) -> bool:
        try:
            for toy in (SEQUENCES, "far"):
                replace(audited, convention=convention).call(leaf_inputs(toy))
        except KleashError:
            return False
        return True

    convention = audited.convention
    if fits(convention):
        return "; let it take vocabularies of 2, 3 and 8 tokens, by min(k, vocabulary) for instance"
    call, taken = _call_of(convention), ")[0]"
    if isinstance(audited.function, type):
        call, taken = call.replace("f(", "f()(", 1), ")"
    fitting = ", ".join(
        other.name
        for other in CONVENTIONS.values()
        if other.place == convention.place
        and (call.startswith(_call_of(other)) or _call_of(other).startswith(call))
        and fits(other)
    )
    written = "" if "(" in convention.name else f", such as {_line(convention, call + taken)}"
    return (
        f"; choose the convention that fits it{f' ({fitting})' if fitting else ''}, bind its reduction or other "
        f"arguments, or write the call as the convention{written}, or wrap it, for vocabularies of 2, 3 and 8 tokens"
    )


def _call_of(convention: Convention) -> str:
    """The call without its closing bracket: it is the beginning of one with further arguments."""
    return convention.summary.partition(" -> ")[0].rstrip(")")


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
            result = _record(
                AuditedFunction(
                    function=case.function,
                    convention=case.convention,
                    name=case.name,
                    arguments=case.arguments,
                ),
                [Finding(kind="cannot_be_called", severity="wrong", sentence=str(error))],
            )
        findings = [
            replace(f, severity="fragile") if f.severity == "wrong" and f.kind in case.fragile else f
            for f in result.findings
        ]
        yield replace(
            result,
            findings=_by_severity(findings),
            notes=(*case.notes, *result.notes),
            versions={
                **result.versions,
                **({case.package: case.commit} if case.commit else version_of(case.package)),
            },
        )


def _audit_of(audited: AuditedFunction, first: Tensor, impurities: list[Finding]) -> Audit:
    """The audit of a function after ``check_purity``; a random one is averaged and has fewer checks.

    Args:
        audited: the function.
        first: the result of its first call, with which its last call is compared.
        impurities: what ``check_purity`` found.

    Raises:
        CannotRunError, ShapeError: if a call fails that all functions must allow.
    """
    kinds = {finding.kind for finding in impurities}
    is_random, is_impure = "random" in kinds, not kinds.isdisjoint(("random", "stateful"))
    audited = replace(audited, repeats=REPEATS if is_random else 1)
    evidence = gather_evidence(audited)
    log_ratios = evidence.log_ratios
    is_claimed = is_quantity(evidence.value.on_policy, evidence.claimed, everywhere=False)
    edges, of_edges = check_extreme_inputs(audited, is_claimed=is_claimed, is_random=is_random)
    accuracy = () if is_random else accuracy_rows(audited, log_ratios.estimator, is_claimed)
    masks, of_padding = ((), []) if is_random else check_padding(audited)
    of_batch = (
        []
        if is_impure
        else batch_findings(audited, evidence.gradient, ignores_padding=bool(masks) and not masks[0].problem)
    )
    is_dependent = any(finding.kind == "batch_dependent" for finding in of_batch)
    truncated = [] if is_dependent else truncated_ratio_zones(audited)
    findings = [
        *impurities,
        *of_batch,
        *(() if is_impure else nan_input_findings(audited)),
        *value_findings(evidence),
        *gradient_findings(evidence),
        *([] if is_dependent else log_ratio_findings(log_ratios, is_claimed, evidence.gradient.is_right)),
        *of_edges,
        *truncated_ratio_findings(truncated),
        *of_padding,
        *(() if is_random else precision_findings(audited, accuracy)),
        *(() if is_impure else check_final_call(audited, first)),
    ]
    return replace(
        _record(audited, findings, estimate_sentences(evidence)),
        value=str(evidence.value),
        gradient=_describe_gradient(evidence),
        estimator=log_ratios.estimator,
        values=evidence.value_rows,
        gradients=evidence.gradient_rows,
        value_range=log_ratios.unclamped_range("value") if evidence.value.is_right else "",
        gradient_range=log_ratios.unclamped_range("gradient") if evidence.gradient.is_right else "",
        value_level=evidence.value.positions.level,
        gradient_level=evidence.gradient.positions.level,
        estimator_level=evidence.estimator_level,
        curve=log_ratios.curve,
        right_value_is=log_ratios.right_value_is,
        zones=(*log_ratios.zones, *truncated),
        edges=edges,
        masks=masks,
        accuracy=accuracy,
        # a mean that is NaN with padding, or refuses it, is of nothing; there are no masks if it is random
        notes=BATCH_MEANS[batch_mean(audited) if masks and not isnan(masks[0].value_change) else ""],
    )


def _describe_gradient(evidence: Evidence) -> str:
    """The quantity that the gradient was matched with; "none" if it is detached, "" for a metric."""
    if evidence.is_detached:
        return "none"
    return "" if evidence.audited.convention.place == "metric" else str(evidence.gradient)


def _record(
    audited: AuditedFunction, findings: Sequence[Finding], first: Sequence[str] = (), last: str = ""
) -> Audit:
    """An audit that has findings and a verdict only: sentences before and after those of the findings."""
    convention = audited.convention
    ordered = _by_severity([replace(f, remedy=f.remedy or remedy_of(f.kind, convention)) for f in findings])
    no_fault = "" if any(finding.severity in FAULTS for finding in ordered) else "No fault was found."
    sentences = (*first, *(finding.sentence for finding in ordered), last or no_fault)
    return Audit(
        target=audited.name,
        convention=convention.name,
        summary=convention.summary,
        place=convention.place,
        claims=convention.claims,
        arguments={name: repr(value) for name, value in audited.arguments.items()},
        verdict=tuple(dict.fromkeys(filter(None, sentences))),
        findings=ordered,
        versions={
            **version_of(_function_name(audited.function).partition(".")[0]),
            "kleash": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    )


def _by_severity(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The worst findings first."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def _function_name(function: Callable[..., Any]) -> str:
    """``module.function``, as far as it is known."""
    if isinstance(function, partial):
        return _function_name(function.func)
    module = getattr(function, "__module__", None) or "?"
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"
