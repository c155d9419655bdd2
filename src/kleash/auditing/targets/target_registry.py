"""The targets by name: those of this package, and those that packages register as entry points."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points

from kleash.auditing.targets.cases import Target
from kleash.auditing.targets.liger import LIGER
from kleash.auditing.targets.openrlhf import OPENRLHF
from kleash.auditing.targets.trl import TRL
from kleash.auditing.targets.verl import VERL
from kleash.errors import CannotRunError

ENTRY_POINT_GROUP = "kleash.audit_targets"
BUILT_IN = {target.name: target for target in (TRL, VERL, OPENRLHF, LIGER)}


class TargetRegistry(Mapping[str, Target]):
    """Name -> target; an entry point is loaded when its target is looked up.

    A package registers a ``Target`` by an entry point of the group ``kleash.audit_targets``, whose name is that of
    the target. kleash's own target is one, since it audits code of higher layers than this one.
    """

    @cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        return {
            entry_point.name: entry_point
            for entry_point in entry_points(group=ENTRY_POINT_GROUP)
            if entry_point.name not in BUILT_IN
        }

    def __getitem__(self, name: str) -> Target:
        """The target called ``name``.

        Raises:
            KeyError: if there is none.
            CannotRunError: if its entry point is no target.
        """
        if name in BUILT_IN:
            return BUILT_IN[name]
        target = self._entry_points[name].load()
        if not isinstance(target, Target):
            raise CannotRunError(
                f"the entry point {name!r} of {ENTRY_POINT_GROUP} is of type {type(target).__name__}, not Target"
            )
        return target

    def __contains__(self, name: object) -> bool:
        """Whether a target has this name, without loading entry points."""
        return name in BUILT_IN or name in self._entry_points

    def __iter__(self) -> Iterator[str]:
        """The names, without loading entry points."""
        yield from BUILT_IN
        yield from self._entry_points

    def __len__(self) -> int:
        """The number of targets."""
        return len(BUILT_IN) + len(self._entry_points)


TARGETS: Mapping[str, Target] = TargetRegistry()
"""Name -> target: what ``kleash audit NAME`` audits."""
