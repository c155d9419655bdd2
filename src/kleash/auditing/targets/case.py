"""What is audited: one function, how it is called, and what to say about how it was run."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kleash.auditing.conventions import Convention
from kleash.auditing.targets.dotted import Function, import_target, version_of
from kleash.auditing.targets.installing import INSTALLATIONS, quiet, stand_ins


@dataclass(frozen=True, kw_only=True)
class Case:
    """One function to audit, ready to be called."""

    name: str
    function: Function
    """Takes what its convention says; imports what it needs when it is called."""
    convention: Convention
    """How it is called."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments bound to it."""
    audits: str = ""
    """The real code that runs, by its dotted path."""
    notes: tuple[str, ...] = ()
    """What whoever reads the result should know about how it was run."""
    fragile: Collection[str] = ()
    """Kinds of findings that its own trainer never meets, for a reason that stands in the notes: fragile, not wrong."""
    packages: tuple[str, ...] = ()
    """The importable packages whose versions belong to the result."""

    @property
    def versions(self) -> dict[str, str]:
        """The installed versions of its packages."""
        return {package: version_of(package) for package in self.packages}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A package whose KL code is known by name."""

    name: str
    package: str
    """What is imported."""
    modules: Sequence[str]
    """The modules that its cases use."""
    cases: tuple[Case, ...]
    stood_in: tuple[str, ...] = ()
    """Packages that its modules import and that nothing audited uses: absent ones are stood in for."""
    not_audited: tuple[str, ...] = ()
    """KL code of the package that is not audited, and why."""

    @property
    def install(self) -> str:
        """The line that installs it."""
        return INSTALLATIONS.get(self.package, f"pip install {self.package}")

    def load(self) -> tuple[Case, ...]:
        """Its cases, once all that they use has been imported.

        Raises:
            MissingExtraError: if the package is not installed; it gives the line that installs it.
            UnknownNameError, CannotRunError: if the installed version lacks a module, or it cannot be imported.
        """
        with quiet(), stand_ins(self.stood_in) as absent:
            import_target(self.package)
            for module in self.modules:
                import_target(module)
        told = tuple(
            f"{name} is not installed: an empty module stood in for it while {self.name} was imported"
            for name in absent
        )
        return tuple(
            replace(case, notes=(f"runs `{case.audits}`", *case.notes, *told), packages=(self.package,))
            for case in self.cases
        )
