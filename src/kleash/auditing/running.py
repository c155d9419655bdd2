"""The audit from beginning to end."""

import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import isnan, nan
from typing import Any, TypeVar

import torch

from kleash.auditing.conventions import Convention, convention_called
from kleash.auditing.curves import curve_rows
from kleash.auditing.evidence import Evidence, gather
from kleash.auditing.judging_calls import call_findings
from kleash.auditing.judging_edges import validity
from kleash.auditing.purity import Purity, process_settings_kept, purity
from kleash.auditing.subject import Subject
from kleash.auditing.verdict import judge, verdict, with_remedies
from kleash.errors import CannotRunError, ShapeError
from kleash.records.audit import (
    AccuracyRow,
    Audit,
    CurveRow,
    EdgeRow,
    GradientRow,
    MaskRow,
    ValueRow,
    ZoneRow,
)
from kleash.version import __version__

Row = TypeVar("Row", ValueRow, GradientRow, ZoneRow, EdgeRow, MaskRow, AccuracyRow, CurveRow)


def audit(
    function: Callable[..., Any],
    convention: str | Convention,
    *,
    name: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Audit:
    """What a KL implementation estimates, and what it differentiates.

    By enumeration: every response of a small world is put before the function once, and what it returns is
    weighted with the response's probability. So the expectations are finite sums, in float64, and nothing
    is sampled: two audits of one pure function are equal, and one that is not pure is called so (a random function
    is averaged over many calls). The function is further tried along the log ratio from
    -100 to 100 nats, on extreme inputs, with garbage in the padding, in float32 and in bfloat16.

    Args:
        function: anyone's KL; called hundreds of times on tiny tensors, on the CPU.
        convention: how it is called and what it returns: a name of ``CONVENTIONS``, or a record of your own.
        name: what to call it; otherwise where it was defined.
        arguments: keyword arguments for every call.

    Returns:
        An Audit: verdict, findings, and the numbers they rest on.

    Raises:
        UnknownNameError: if there is no such convention.
        CannotRunError: if the function raises an error or returns no tensor; the sentence says which.
        ShapeError: if it returns another shape than the convention says.
    """
    if not callable(function):
        raise CannotRunError(f"{function!r} cannot be called; give the function that computes the KL")
    record = convention_called(convention)
    bound = dict(arguments or {})
    subject = Subject(function=function, convention=record, name=name or name_of(function), arguments=bound)
    with process_settings_kept():
        pure = purity(subject)
        try:
            evidence = gather(subject, pure)
        except (CannotRunError, ShapeError) as error:
            if not pure.has_state:
                raise
            return _without_numbers(subject, pure, str(error))
        findings = judge(evidence)
    curve, right_value_is = curve_rows(subject, evidence.course.scan, evidence.estimator)
    return Audit(
        target=subject.name,
        convention=record.name,
        summary=record.summary,
        place=record.place,
        claims=record.claims,
        arguments={key: repr(value) for key, value in bound.items()},
        value=_in_words(evidence, "value"),
        gradient=_in_words(evidence, "gradient"),
        estimator=evidence.estimator,
        verdict=verdict(evidence, findings),
        findings=findings,
        values=comparable(evidence.expected.value_rows()),
        gradients=comparable(evidence.expected.gradient_rows),
        zones=comparable(evidence.course.rows + evidence.ratios),
        edges=comparable(evidence.edges + evidence.hidden_nans),
        masks=comparable(evidence.masks),
        accuracy=comparable(evidence.accuracy),
        value_range=_range(evidence, "value"),
        gradient_range=_range(evidence, "gradient"),
        gradient_level=evidence.gradient_over_steps.level,
        calls=evidence.calls,
        curve=comparable(curve),
        right_value_is=right_value_is,
        notes=(evidence.over_a_batch,) if evidence.over_a_batch else (),
        versions=_versions(function),
    )


def comparable(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows with one and the same NaN everywhere, so that equal audits compare as equal."""

    def one(row: Row) -> Row:
        lost = {name: nan for name, value in vars(row).items() if isinstance(value, float) and isnan(value)}
        return replace(row, **lost)

    return tuple(one(row) for row in rows)


def _without_numbers(subject: Subject, pure: Purity, error: str) -> Audit:
    """The audit of a function whose earlier calls make later ones fail."""
    findings = with_remedies(call_findings(pure.rows))
    verdict = (*(finding.sentence for finding in findings), f"Nothing else could be found out: {error}.")
    return blank_audit(
        subject.convention,
        subject.name,
        subject.arguments,
        verdict=verdict,
        findings=findings,
        calls=pure.rows,
        versions=_versions(subject.function),
    )


def blank_audit(convention: Convention, name: str, arguments: Mapping[str, Any], **found: Any) -> Audit:
    """An audit without numbers, for a function that gives none; ``found`` are fields of ``Audit``."""
    return Audit(
        target=name,
        convention=convention.name,
        summary=convention.summary,
        place=convention.place,
        claims=convention.claims,
        arguments={key: repr(value) for key, value in arguments.items()},
        value="",
        gradient="",
        estimator="",
        values=(),
        gradients=(),
        zones=(),
        edges=(),
        masks=(),
        accuracy=(),
        **found,
    )


def name_of(function: Callable[..., Any]) -> str:
    """``module.function``, as far as it knows."""
    if isinstance(function, partial):
        return name_of(function.func)
    module = getattr(function, "__module__", None) or "?"
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


def _in_words(evidence: Evidence, what: str) -> str:
    if what == "gradient" and (not evidence.asks_gradient or evidence.detached):
        return "none" if evidence.asks_gradient else ""
    names = evidence.value_names if what == "value" else evidence.gradient_names
    name = names["on-policy"]
    if name is None:
        return "none of the table"
    if not name.everywhere:
        return f"{name}, where no log ratio is large"
    over = evidence.value_over_steps if what == "value" else evidence.gradient_over_steps
    if over.level == "neither":
        return f"{name} for one token"
    return str(name)


def _range(evidence: Evidence, what: str) -> str:
    """As long as which log ratios what ``_in_words`` says holds."""
    names = evidence.value_names if what == "value" else evidence.gradient_names
    return validity(evidence, what) if evidence.is_claimed(names["on-policy"]) else ""


def _versions(function: Callable[..., Any]) -> dict[str, str]:
    found = {"kleash": __version__, "python": platform.python_version(), "torch": torch.__version__}
    package = name_of(function).partition(".")[0]
    try:
        return {package: version(package), **found}
    except PackageNotFoundError:
        return found
