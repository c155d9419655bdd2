"""The audit from beginning to end."""

import platform
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kleash.auditing.conventions import Convention, convention_called
from kleash.auditing.evidence import Evidence, gather
from kleash.auditing.subject import Subject
from kleash.auditing.verdict import judge, verdict
from kleash.errors import CannotRunError
from kleash.records.audit import Audit
from kleash.version import __version__


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
    is sampled: two audits of one function are equal. The function is further tried along the log ratio from
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
    with torch.enable_grad():
        evidence = gather(subject)
    findings = judge(evidence)
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
        values=evidence.expected.value_rows(),
        gradients=evidence.expected.gradient_rows,
        zones=evidence.course.rows,
        edges=evidence.edges,
        masks=evidence.masks,
        accuracy=evidence.accuracy,
        notes=(evidence.over_a_batch,) if evidence.over_a_batch else (),
        versions=_versions(function),
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
    return str(name) if name.everywhere else f"{name}, where no log ratio is large"


def _versions(function: Callable[..., Any]) -> dict[str, str]:
    found = {"kleash": __version__, "python": platform.python_version(), "torch": torch.__version__}
    package = name_of(function).partition(".")[0]
    try:
        return {package: version(package), **found}
    except PackageNotFoundError:
        return found
