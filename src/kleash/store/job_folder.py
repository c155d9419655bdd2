"""Folders that a job writes: the header that identifies the run, and the lock of the process that writes."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, TypeVar

from kleash.errors import RunFolderError
from kleash.store.atomic import TEMPORARY, remove_leftovers, writing
from kleash.store.checksums import Checksums, begin_checksums, is_there, write_checked
from kleash.store.codec import to_json
from kleash.store.locks import folder_lock
from kleash.store.measurement import SCHEMA

HEADER = "run.json"
SOURCE = "source.jsonl"
"""The prompts, texts or responses of a run that were given in memory."""
ADVICE_IF_LOCKED = "wait for it, or give another --out"
PROBE_NATS = 0.05
"""Largest median difference between two answers of one server to its probe; rounding in bfloat16 stays below it."""
MAY_DIFFER = {"reference_cache", "at_most", "direction"}
"""Options that may differ: hidden states are the same wherever they lie, so a sweep with its cache can be moved, and a
gate is decided anew."""
MAY_DIFFER_IN_TRAINING = {"steps", "batch_tokens"}
"""A training may go on for more steps, and in less memory; the shards of a measurement depend on ``batch_tokens``."""
KIND_OF_FINGERPRINT = "sha256:"
"""Prefix of fingerprints, which are made from every byte of the files."""


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """What determines a run's result, written before its first shard; ``--resume`` requires all of it to be equal."""

    schema: int = SCHEMA
    kleash: str
    settings: Mapping[str, Any]
    source_sha256: str
    fingerprints: Mapping[str, str]
    """Of the policy, the reference and other files, by what they are: "policy", "policy generation_config.json"."""
    sampler: str = ""
    """The algorithm that draws responses."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Versions of packages and dtypes of models, by names in words."""
    probes: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    """Role of a model behind a server -> log-probabilities of its probe, in nats: its weights have no fingerprint."""

    def differences(self, other: "RunHeader", now: str = "now") -> list[str]:
        """What differs in ``other``, each as "NAME was 1 and is NOW 2"."""
        mine, yours = self.described(), other.described()
        names = [name for name in {**mine, **yours} if mine.get(name) != yours.get(name)]
        probe_changes = {
            role: probe_change(probe, other.probes[role])
            for role, probe in self.probes.items()
            if role in other.probes
        }
        return [
            *(f"{name} was {mine.get(name)!r} and is {now} {yours.get(name)!r}" for name in names),
            *(
                f"the server of the {role} serves another model: its log-probabilities of the probe differ by "
                f"{change:.2g} nats in the median"
                for role, change in probe_changes.items()
                if change > PROBE_NATS
            ),
        ]

    def described(self) -> dict[str, Any]:
        """What determines the result, by its name in words; a run of ``kleash.attach`` has arguments and no options."""
        return {
            "kleash": self.kleash,
            **{
                name if "trainer" in self.settings else f"--{name.replace('_', '-')}": value
                for name, value in self.settings.items()
                if name not in (MAY_DIFFER_IN_TRAINING if "algorithm" in self.settings else MAY_DIFFER)
            },
            "the source's content (sha256)": self.source_sha256[:16],
            **{f"the fingerprint of the {what}": mark for what, mark in self.fingerprints.items()},
            "the sampler": self.sampler,
            **self.environment,
        }


def probe_change(first: Sequence[float], second: Sequence[float]) -> float:
    """The median difference of two answers to one probe, in nats; infinite if they are of different lengths."""
    if len(first) != len(second):
        return inf
    return median(
        0.0 if before == after else abs(before - after) for before, after in zip(first, second, strict=True)
    )


def require_same(root: Path, stored: RunHeader, header: RunHeader) -> None:
    """Check that the run in a folder is the one that is to be continued.

    Raises:
        RunFolderError: naming what differs, if it is another.
    """
    differences = stored.differences(header)
    if differences:
        raise RunFolderError(
            f"{root} holds another run: {'; '.join(differences)}; go on with it as it was, or give another --out "
            "(out=)"
        )


def holds_job(root: Path, what: str, marks: Set[str], leftovers: Iterable[str]) -> bool:
    """Whether a folder holds what a job has begun; one that does not may be taken for a new job. Nothing is written.

    Args:
        root: the folder, which may be missing.
        what: the job's folder, for errors: "run", "sweep".
        marks: names of files or folders of which one is there as soon as a job has begun.
        leftovers: patterns of the names that a job which was killed before may have left, beside unfinished files.

    Raises:
        RunFolderError: if it is a file, cannot be read, or holds other files.
    """
    with writing(root):
        if is_there(root) and not root.is_dir():
            raise RunFolderError(f"{root} is a file, and a {what} is a folder; give another name")
        names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if not marks.isdisjoint(names):
        return True
    known = (f"{TEMPORARY}*", *leftovers)
    for name in names:
        if not any(fnmatchcase(name, pattern) for pattern in known):
            raise RunFolderError(f"{root} holds {name} and is no {what} of kleash; give another folder")
    return False


FolderT = TypeVar("FolderT", bound="JobFolder")


@dataclass(frozen=True)
class JobFolder(ABC):
    """A folder that one process at a time writes, from the beginning or where an interrupted run ended."""

    root: Path
    if_begun: str = "go on with it with --resume (resume=True), or give another --out"
    """What to do where the folder holds a run that is not continued."""
    leftovers: ClassVar[frozenset[str]]
    """Patterns of the names that a run which was killed before its first shard or step may have left, beside
    unfinished files."""

    @contextmanager
    def writing(self: FolderT, header: RunHeader, *, resume: bool) -> Generator[FolderT, None, None]:
        """Lock the folder for this process, and begin or continue the run.

        Raises:
            RunFolderError: if the folder holds a run and ``resume`` is false, if the run was made with other
                settings or inputs, or if another process is writing it.
        """
        self.check(resume=resume)
        with folder_lock(self.root, ADVICE_IF_LOCKED):
            self.check(resume=resume)
            if self.begun:
                require_same(self.root, self.header(), header)
            remove_leftovers(self.root)
            if not self.begun:
                begin_checksums(self.root)
            write_checked(self.root, self.root / HEADER, to_json(header))  # again for what may differ
            yield self

    def check(self, *, resume: bool) -> None:
        """Check, without changing anything, that a run may be written here.

        Raises:
            RunFolderError: if not.
        """
        if holds_job(self.root, "run", {HEADER}, self.leftovers) and self.begun and not resume:
            raise RunFolderError(f"{self.root} holds a run already; {self.if_begun}")

    @property
    @abstractmethod
    def begun(self) -> bool:
        """Whether there is something to continue."""

    def header(self) -> RunHeader:
        """The header of the run in this folder.

        Raises:
            RunFolderError: if there is none, or it is damaged or of another schema.
        """
        return Checksums.read(self.root).read_record(RunHeader, self.root / HEADER, "the header of a run")
