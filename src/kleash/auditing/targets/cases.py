"""The records of audit targets: a case is one function and how it is called, a target is one package."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from kleash.auditing.conventions import CONVENTIONS, SHAPES, Convention, find_convention
from kleash.auditing.targets.checkouts import load_function
from kleash.auditing.targets.packages import INSTALL_COMMANDS, import_target, quiet, stand_ins
from kleash.dotted import Function
from kleash.errors import CannotRunError, OptionError


def not_loaded(*_: Any, **__: Any) -> Any:
    """Stands for the function of a case that ``Target.load`` has not loaded."""
    raise CannotRunError("this case has a function once its target is loaded")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One function to audit, with its convention and arguments."""

    name: str
    function: Function = not_loaded
    """Called by ``convention``; imports what it needs when it is called. By default that at ``audits``, loaded by its
    target."""
    convention: Convention
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments bound to it."""
    audits: str = ""
    """The dotted path of the package's code that runs, or ``FILE:function`` of a checkout."""
    notes: tuple[str, ...] = ()
    """How the code is run, for the reader of the audit."""
    fragile: Collection[str] = ()
    """Kinds of findings that the package's own trainer never causes (a note says why): fragile, not wrong."""
    package: str = ""
    """The importable package whose version is recorded in the audit, or the name of what a checkout has."""
    commit: str = ""
    """The version of code from a checkout."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A package whose KL code can be audited by name."""

    name: str
    package: str
    """The importable package."""
    modules: Sequence[str] = ()
    """The modules that its cases use."""
    cases: tuple[Case, ...]
    repository: str = ""
    """Where to get the checkout that its cases are loaded from; "" for an installed package."""
    stood_in: tuple[str, ...] = ()
    """Packages that its modules import and that no case uses: stand-ins replace missing ones."""
    not_audited: tuple[str, ...] = ()
    """KL code of the package that is not audited, and why."""

    @property
    def install(self) -> str:
        """The command that installs it, or fetches the checkout."""
        if self.repository:
            return f"git clone --depth 1 {self.repository}"
        return INSTALL_COMMANDS.get(self.package, f"pip install {self.package}")

    def load(self, source: Path | None = None) -> tuple[Case, ...]:
        """Its cases, after importing the modules that they use, or loading their functions from a checkout.

        Raises:
            OptionError: if there is no source for code of a checkout, or one for an installed package.
            MissingExtraError: if the package is not installed; the message has the command that installs it.
            UnknownNameError, CannotRunError: if the installed version lacks a module, or it cannot be imported, or as
                ``load_function`` has it.
        """
        if (source is None) == bool(self.repository):
            raise OptionError(
                f"{self.name} is audited from a checkout; run: {self.install}, and give its folder as --source"
                if source is None
                else f"{self.name} is audited as it is installed; a function of a checkout is named FILE:function"
            )
        if source is not None:
            loaded = {name: load_function(source, name) for name in {case.audits for case in self.cases}}
            return tuple(
                replace(
                    case,
                    function=loaded[case.audits].function,
                    notes=(*loaded[case.audits].notes, *case.notes),
                    package=self.package,
                    commit=loaded[case.audits].commit,
                )
                for case in self.cases
            )
        with quiet(), stand_ins(self.stood_in) as missing:
            for module in (self.package, *self.modules):
                import_target(module)
            functions = [
                resolve_name(case.audits) if case.function is not_loaded else case.function
                for case in self.cases
            ]
        notes = tuple(
            f"{name} is not installed: an empty module replaced it while {self.name} was imported"
            for name in missing
        )
        return tuple(
            replace(
                case,
                function=function,
                notes=(f"runs `{case.audits}`", *case.notes, *notes),
                package=self.package,
            )
            for case, function in zip(self.cases, functions, strict=True)
        )


MINUS_REWARD = replace(CONVENTIONS["reward_with_mask"], name="minus_reward_with_mask", sign=-1)
"""Minus the KL per token, as it is added to the scores."""

STUDENT_NOTE = "the student is p, the teacher q"
TOP_2_NOTE = "k = 2, so that a small vocabulary is truncated"


def as_in_words(line: str, call: str) -> Convention:
    """The convention of a call that is written out, which audits show as a shorter one."""
    record = find_convention(line)
    return replace(record, summary=f"{call} -> {SHAPES[record.gives]}")


def make_case(
    name: str,
    audits: str,
    convention: str | Convention,
    *notes: str,
    function: Function = not_loaded,
    fragile: Collection[str] = (),
    **arguments: Any,
) -> Case:
    """A case of the code at ``audits``, a dotted path or ``FILE:function`` of a checkout.

    Its ``function`` calls that code, and is by default the code itself.
    """
    return Case(
        name=name,
        audits=audits,
        convention=find_convention(convention),
        notes=notes,
        function=function,
        fragile=fragile,
        arguments=arguments,
    )
