"""Resolving the argument of ``kleash audit`` to cases: a target, one of its cases, or ``package.module:function``."""

import ast
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from kleash import dotted
from kleash.auditing.audited_function import parameter_roles
from kleash.auditing.conventions import CONVENTIONS, find_convention
from kleash.auditing.targets.cases import Case, Target
from kleash.auditing.targets.checkouts import load_function
from kleash.auditing.targets.liger import LIGER
from kleash.auditing.targets.openrlhf import OPENRLHF
from kleash.auditing.targets.packages import INSTALL_COMMANDS
from kleash.auditing.targets.repositories import REPOSITORIES
from kleash.auditing.targets.trl import TRL
from kleash.auditing.targets.verl import VERL
from kleash.errors import OptionError, UnknownNameError
from kleash.registry import grouped, look_up

ENTRY_POINT_GROUP = "kleash.audit_targets"
"""A package registers a ``Target`` by an entry point of this group, whose name is that of the target.

kleash's own target is one, since it audits code of higher layers than this one."""
BUILT_IN = {target.name: target for target in (TRL, VERL, OPENRLHF, LIGER, *REPOSITORIES)}


def target_names() -> tuple[str, ...]:
    """What ``kleash audit NAME`` audits, without loading entry points."""
    return tuple(dict.fromkeys((*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP)))))


def find_target(name: str) -> Target:
    """The target called ``name``, one of ``target_names``; an entry point is loaded."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    (entry_point,) = entry_points(group=ENTRY_POINT_GROUP, name=name)
    return entry_point.load()


def cases_of(
    target: str,
    convention: str | None = None,
    arguments: Sequence[str] = (),
    source: Path | None = None,
) -> tuple[Case, ...]:
    """The cases to audit.

    Args:
        target: one of ``target_names`` for all its cases, ``"verl:low_var_kl"`` for one of them,
            ``"package.module:function"``, or with a source ``"FILE_OR_FOLDER:function"``.
        convention: how a function that is no case of a target is called; targets have their own conventions.
        arguments: keyword arguments for such a function, as typed: ``"kl_penalty=k3"``.
        source: the folder of a checkout, whose code is run without the packages that it imports.

    Raises:
        OptionError: if a dotted path comes without a convention, or a target with one, or an argument is malformed; if
            a target of a checkout comes without a source, or another with one.
        UnknownNameError: if the target, case, convention, module or function does not exist.
        MissingExtraError: if the package is not installed; the message has the command that installs it.
        CannotRunError: if importing it raises.
    """
    package, colon, case_name = target.partition(":")
    known = find_target(package) if package in target_names() else None
    names = dict.fromkeys(case.name for case in known.cases) if known else {}
    if known and colon and convention is None:
        look_up(names, case_name, f"case of {package}")
    if known and (not colon or case_name in names):
        if convention is not None or arguments:
            raise OptionError(
                f"{package} brings its own conventions and arguments; name the function as package.module:function, or "
                "FILE:function with --source, to choose them"
            )
        cases = [case for case in known.load(source) if not colon or case.name == case_name]
        return tuple(replace(case, name=f"{package}:{case.name}") for case in cases)
    if not colon and (source is not None or "." not in package):
        raise UnknownNameError(
            f"no target is called {target!r}; there are {', '.join(target_names())}, or write package.module:function"
        )
    loaded = None if source is None else load_function(source, target)
    function = (
        loaded.function
        if loaded
        else dotted.resolve_function(
            target,
            "a target",
            INSTALL_COMMANDS,
            "; write it as FILE:function with --source ., which runs only what the function needs",
        )
    )
    if convention is None:
        calls = grouped((record.summary.partition(" -> ")[0], record.name) for record in CONVENTIONS.values())
        listed = "".join(f"\n{call}: {', '.join(names)}" for call, names in calls.items())
        raise OptionError(
            f"how is {target} called? give --convention, the name after the call:{listed}\n"
            "p is the policy, q the reference; token_logp are log-probabilities of sampled tokens, logp those of the "
            "whole vocabulary. A loss is differentiated, a reward detached, a metric only logged\n"
            "any other call is written out: --convention 'f(student=logits_p, teacher=logits_q, labels=labels)[0] "
            "-> mean reverse_kl'"
        )
    record = find_convention(convention)
    roles = ", ".join(f"{name} = {role}" for name, role in parameter_roles(function, record).items())
    return (
        Case(
            name=target,
            function=function,
            convention=record,
            arguments=_parse_arguments(arguments),
            notes=(*(loaded.notes if loaded else ()), *((f"called with {roles}",) if roles else ())),
            package=loaded.file if loaded else dotted.split_path(target)[0].partition(".")[0],
            commit=loaded.commit if loaded else "",
        ),
    )


def _parse_arguments(assignments: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments from ``name=value`` as typed on a command line.

    A value is read as a Python literal (``2``, ``.5``, ``True``, ``None``, ``"k3"``), or as a string if it is none.

    Raises:
        OptionError: if an assignment has no ``=``.
    """
    arguments: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise OptionError(f"an argument of the target is written name=value, and {assignment!r} is not")
        arguments[name] = value
        with suppress(ValueError, SyntaxError):  # text that is no literal stays text
            arguments[name] = ast.literal_eval(value)
    return arguments
