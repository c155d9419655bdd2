"""Resolving the argument of ``kleash audit`` to cases: a target, one of its cases, or ``package.module:function``."""

import ast
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kleash import dotted
from kleash.auditing.conventions import CONVENTIONS, resolve_convention
from kleash.auditing.targets.cases import Case
from kleash.auditing.targets.packages import INSTALL_COMMANDS
from kleash.auditing.targets.target_registry import TARGETS
from kleash.dotted import Function
from kleash.errors import OptionError, UnknownNameError

COMMON_CONVENTIONS: Mapping[str, str] = MappingProxyType(
    {
        "loss": "f(token_logp, token_logq), log-probabilities of sampled tokens, one value a token, differentiated",
        "reward": "the same, detached and subtracted from a reward",
        "metric": "the same, only logged",
        "mean_loss_with_mask": "f(token_logp, token_logq, mask), one mean over the mask, differentiated",
        "loss_with_behaviour": "f(token_logp, token_logq, behaviour_logp), with importance weights",
        "log_probabilities": "f(logp, logq) of whole distributions, the vocabulary on the last axis",
        "logits": "f(logits_p, logits_q)",
        "distillation": "f(student_logits, teacher_logits), KL(teacher ‖ student)",
        "kl_div": "f(logq, p), the order of torch's F.kl_div",
    }
)
"""Convention -> the call and the meaning of its result, for the error without a convention."""


def cases_of(target: str, convention: str | None = None, arguments: Sequence[str] = ()) -> tuple[Case, ...]:
    """The cases to audit.

    Args:
        target: a key of ``TARGETS`` for all its cases, ``"verl:low_var_kl"`` for one of them, or
            ``"package.module:function"``.
        convention: how a function at a dotted path is called; targets have their own conventions.
        arguments: keyword arguments for a function at a dotted path, as typed: ``"kl_penalty=k3"``.

    Raises:
        OptionError: if a dotted path comes without a convention, or a target with one, or an argument is malformed.
        UnknownNameError: if the target, case, convention, module or function does not exist.
        MissingExtraError: if the package is not installed; the message has the command that installs it.
        CannotRunError: if importing it raises.
    """
    package, colon, case_name = target.partition(":")
    if package in TARGETS and (not colon or case_name in {case.name for case in TARGETS[package].cases}):
        if convention is not None or arguments:
            raise OptionError(
                f"{package} brings its own conventions and arguments; name the function as package.module:function "
                "to choose them"
            )
        cases = [case for case in TARGETS[package].load() if not colon or case.name == case_name]
        return tuple(replace(case, name=f"{package}:{case.name}") for case in cases)
    if not colon and "." not in package:
        raise UnknownNameError(
            f"no target is called {target!r}; there are {', '.join(TARGETS)}, or write package.module:function"
        )
    return (_case_at_path(target, convention, arguments),)


def _case_at_path(target: str, convention: str | None, arguments: Sequence[str]) -> Case:
    """The case of a function at a dotted path."""
    function = function_at(target)
    if convention is None:
        names = (*COMMON_CONVENTIONS, *(name for name in CONVENTIONS if name not in COMMON_CONVENTIONS))
        common = "; ".join(f"{name} is {meaning}" for name, meaning in COMMON_CONVENTIONS.items())
        raise OptionError(f"how is {target} called? give --convention, one of {', '.join(names)}. {common}")
    package = target.partition(".")[0].partition(":")[0]
    return Case(
        name=target,
        function=function,
        convention=resolve_convention(convention),
        arguments=parse_arguments(function, arguments),
        packages=(package,),
    )


def function_at(path: str) -> Function:
    """The function at ``package.module:function``; a dot after the colon goes into a class.

    Raises:
        OptionError: if ``path`` is malformed, or the object there cannot be called.
        MissingExtraError: if the package, or one that it imports, is not installed.
        UnknownNameError: if the package has no such module, or the module no such name.
        CannotRunError: if importing the module raises.
    """
    return dotted.resolve_function(path, "a target", INSTALL_COMMANDS)


def parse_arguments(function: Function, assignments: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments for ``function`` from ``name=value`` as typed on a command line.

    A value is read as a Python literal (``2``, ``.5``, ``True``, ``None``, ``"k3"``), or as a string if it is none.

    Raises:
        OptionError: if an assignment has no ``=``, a name comes twice, or the function does not take it.
    """
    arguments: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name.isidentifier():
            raise OptionError(f"an argument of the target is written name=value, and {assignment!r} is not")
        if name in arguments:
            raise OptionError(f"the target's argument {name} was given twice")
        arguments[name] = value
        with suppress(ValueError, SyntaxError):  # text that is no literal stays text
            arguments[name] = ast.literal_eval(value)
    _check_arguments(function, arguments)
    return arguments


def _check_arguments(function: Function, arguments: Mapping[str, Any]) -> None:
    """Refuse a keyword that ``function`` does not take.

    Raises:
        OptionError: if there is one; the message lists what the function takes.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin may have no signature
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    keywords = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in arguments:
        if name not in keywords:
            function_name = getattr(function, "__name__", type(function).__name__)
            raise OptionError(
                f"{function_name} takes no argument {name!r}; it takes {', '.join(keywords) or 'none'}"
            )
