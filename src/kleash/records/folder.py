"""A run folder: what a run writes, shard by shard, so that it can be killed at any moment and go on."""

from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kleash.errors import RunFolderError
from kleash.records.atomic import TEMPORARY, cannot_write, remove_leftovers
from kleash.records.checksums import CHECKSUMS, Checksums, begin_checksums, write_checked
from kleash.records.codec import to_json
from kleash.records.locking import folder_lock
from kleash.records.measurement import SCHEMA, Measurement
from kleash.records.renamed_fields import with_current_options
from kleash.records.tables import (
    ALTERNATIVE_COLUMNS,
    SEQUENCE_COLUMNS,
    TOKEN_COLUMNS,
    TOP_COLUMNS,
    read_columns,
    read_parts,
    write_table,
)

BEFORE_A_RUN = frozenset({".lock", "tokens", "sequences", "alternatives", CHECKSUMS})
"""What a run may leave behind that was killed before it had begun, beside unfinished files."""
HEADER = "run.json"
ALTERNATIVES = "alternatives.parquet"
KIND_OF_FINGERPRINT = "sha256:"
"""How the fingerprints of models begin that take in every byte; older ones sampled the weights."""


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """What decides a run's result, written before its first shard; to go on, all of it must agree."""

    schema: int = SCHEMA
    kleash: str
    settings: Mapping[str, Any]
    source_sha256: str
    fingerprints: Mapping[str, str]
    """Of the policy, the reference and other files, by what they are: "policy", "policy generation_config.json"."""
    sampler: str = ""
    """The algorithm that draws responses; empty in runs from before it was recorded."""
    checksums: bool = True
    """Whether the folder's files have checksums; False for runs that an older kleash began."""

    def differences(self, other: "RunHeader") -> list[str]:
        """What differs in ``other``, each as "name: mine, not yours"."""
        mine, yours = self._flat(), other._flat()
        names = [name for name in {**mine, **yours} if mine.get(name) != yours.get(name)]
        return [f"{name} was {mine.get(name)!r} and is now {yours.get(name)!r}" for name in names]

    def _flat(self) -> dict[str, Any]:
        return {
            "kleash": self.kleash,
            **{f"--{name.replace('_', '-')}": value for name, value in self.settings.items()},
            "the source's content (sha256)": self.source_sha256[:16],
            **{_described(what): mark for what, mark in self.fingerprints.items()},
            "the sampler": self.sampler or "that of an older version",
        }


@dataclass(frozen=True, kw_only=True)
class StoredHeader(RunHeader):
    """A header as it is read: an older kleash wrote nothing of checksums."""

    checksums: bool = False

    def __post_init__(self) -> None:
        """Take options by their current names."""
        object.__setattr__(self, "settings", with_current_options(self.settings))


def _described(what: str) -> str:
    role, _, part = what.partition(" ")
    return f"the fingerprint of the {role}'s {part or 'weights and tokenizer'}"


def check_root(root: Path, *, resume: bool, begun: bool, leftovers: Collection[str]) -> None:
    """See, without touching anything, whether a run may be written to ``root``.

    Args:
        root: a folder, or nothing yet.
        resume: whether it is to be gone on with.
        begun: whether there is something in it to go on with.
        leftovers: what a run may leave behind that was killed before it had begun.

    Raises:
        RunFolderError: if not.
    """
    if not root.exists():
        return
    if not root.is_dir():
        raise RunFolderError(f"{root} is a file; --out names a folder")
    if (root / HEADER).exists():
        if not resume and begun:
            raise RunFolderError(
                f"{root} holds a run already; go on with it with --resume, or give another --out"
            )
        return
    names = [path.name for path in root.iterdir() if not path.name.startswith(TEMPORARY)]
    strangers = sorted(name for name in names if name not in leftovers)
    if strangers:
        raise RunFolderError(
            f"{root} exists and is not a run of kleash (it holds {strangers[0]}); give another --out"
        )


def require_same(root: Path, stored: RunHeader, header: RunHeader) -> None:
    """See that the run a folder holds is the one that is to go on.

    Raises:
        RunFolderError: naming what differs, if it is another.
    """
    differences = stored.differences(header)
    older = [mark for mark in stored.fingerprints.values() if not mark.startswith(KIND_OF_FINGERPRINT)]
    if (
        differences
        and older
        and any(mark.startswith(KIND_OF_FINGERPRINT) for mark in header.fingerprints.values())
    ):
        raise RunFolderError(
            f"{root} holds a run of an older kleash, whose fingerprints read only samples of the weights, so that "
            "nothing proves that the models are still the same; give another --out (report and compare read it as "
            "before)"
        )
    if differences:
        raise RunFolderError(f"{root} holds another run: {'; '.join(differences)}; give another --out")


def read_header(root: Path) -> RunHeader:
    """What the run in a folder is.

    Raises:
        RunFolderError: if it is none, or damaged.
    """
    header = Checksums.read(root).read_record(StoredHeader, root / HEADER, "the header of a run")
    return RunHeader(**vars(header))


def begin_header(root: Path, header: RunHeader) -> None:
    """Write what the run in a folder is; nothing that lay there before counts any more."""
    begin_checksums(root)
    write_checked(root, root / HEADER, to_json(header))


@dataclass(frozen=True)
class RunFolder:
    """The files of one run.

    ``run.json`` says what is run; ``tokens/part-*.parquet`` and ``sequences/part-*.parquet`` hold a
    shard each, the second written last, so that a shard counts once its sequences are there; of its sequences that
    had drifted most, ``alternatives/part-*.parquet`` holds both models' likeliest tokens, of which
    ``alternatives.parquet`` is made in the end;
    ``measurement.json`` and ``report.html`` come at the end. ``checksums.jsonl`` has a line for each
    of these files but the report, by which it is verified whenever it is read.
    """

    root: Path

    @contextmanager
    def writing(self, header: RunHeader, *, resume: bool) -> Generator["RunFolder"]:
        """Hold the folder for this process alone, begun afresh or gone on with.

        Raises:
            RunFolderError: if it holds something already and ``resume`` is false, if another run
                wrote what it holds, or if another process is writing it.
        """
        self.check(resume=resume)
        with folder_lock(self.root, "wait for it, or give another --out"):
            self._begin(header, resume=resume)
            yield self

    def check(self, *, resume: bool) -> None:
        """See, without touching anything, whether a run may be written here.

        Raises:
            RunFolderError: if not.
        """
        try:
            check_root(self.root, resume=resume, begun=self.begun, leftovers=BEFORE_A_RUN)
        except RunFolderError:
            raise
        except OSError as error:  # a name that is too long, a folder that may not be looked into
            raise cannot_write(self.root, error) from error

    def _begin(self, header: RunHeader, *, resume: bool) -> None:
        self.check(resume=resume)
        if self.begun:
            require_same(self.root, self.header(), header)
        for folder in (self.root, *(self.root / kind for kind in ("tokens", "sequences", "alternatives"))):
            folder.mkdir(exist_ok=True)
            remove_leftovers(folder)
        if not self.begun:
            begin_header(self.root, header)

    @property
    def begun(self) -> bool:
        """Whether a shard was finished, be it damaged or gone since."""
        return next((self.root / "sequences").glob("part-*.parquet"), None) is not None

    def header(self) -> RunHeader:
        """What the run in this folder is.

        Raises:
            RunFolderError: if it is none, or damaged.
        """
        return read_header(self.root)

    def finished_shards(self) -> int:
        """How many shards are there with their checksums, from the first on without a gap."""
        checksums = self.checksums()
        done = 0
        while all(path.exists() and checksums.covers(path) for path in self._shard(done, checksums)):
            done += 1
        return done

    def checksums(self) -> Checksums:
        """The checksums of the run's files.

        Raises:
            RunFolderError: if they are damaged, or missing where there must be some.
        """
        return Checksums.read(self.root)

    def require_shards(self, count: int) -> None:
        """See that all the shards are there that a finished run is made of.

        Raises:
            RunFolderError: if not, naming the first that is missing.
        """
        done = self.finished_shards()
        if done >= count:
            return
        advice = "copy the whole folder, or run again with --resume to make it anew"
        checksums = self.checksums()
        for path in self._shard(done, checksums):
            if not path.exists():
                raise RunFolderError(f"{path} is missing, and the run is made of {count} shards; {advice}")
            if not checksums.covers(path):
                raise RunFolderError(
                    f"{path} has no checksum in {CHECKSUMS}, and the run wrote one; {advice}"
                )

    def write_shard(
        self,
        index: int,
        tokens: Mapping[str, Any],
        sequences: Mapping[str, Any],
        top: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a shard: ``top`` of its worst sequences, its tokens, and its sequences, which make it count."""
        if top is not None:
            write_table(self._part("alternatives", index), top, TOP_COLUMNS, root=self.root)
        write_table(self._part("tokens", index), tokens, TOKEN_COLUMNS, root=self.root)
        write_table(self._part("sequences", index), sequences, SEQUENCE_COLUMNS, root=self.root)

    def write_alternatives(self, columns: Mapping[str, Any]) -> None:
        """Write the likeliest tokens of both models in the worst sequences."""
        write_table(self.root / ALTERNATIVES, columns, ALTERNATIVE_COLUMNS, root=self.root)

    def write_measurement(self, measurement: Measurement) -> None:
        """Write ``measurement.json``: with it the run is finished."""
        write_checked(self.root, self.root / "measurement.json", measurement.to_json())

    def token_parts(self, names: list[str]) -> Iterator[dict[str, Any]]:
        """The named columns of ``tokens/``, a shard at a time, verified."""
        return self._parts("tokens", names)

    def sequence_parts(self, names: list[str]) -> Iterator[dict[str, Any]]:
        """The named columns of ``sequences/``, a shard at a time, verified."""
        return self._parts("sequences", names)

    def top_parts(self, names: list[str]) -> Iterator[dict[str, Any]]:
        """The named columns of ``alternatives/``, a shard at a time, verified."""
        return self._parts("alternatives", names)

    def alternatives(self) -> dict[str, Any]:
        """The columns of ``alternatives.parquet``, verified."""
        return read_columns(self.root / ALTERNATIVES, list(ALTERNATIVE_COLUMNS), self.checksums().read_bytes)

    def _parts(self, kind: str, names: list[str]) -> Iterator[dict[str, Any]]:
        paths = [self._part(kind, index) for index in range(self.finished_shards())]
        return read_parts(paths, names, self.checksums().read_bytes)

    def _shard(self, index: int, checksums: Checksums) -> list[Path]:
        """The files of a shard, in the order in which they are written."""
        top = self._part("alternatives", index)
        paths = [self._part("tokens", index), self._part("sequences", index)]
        return [top, *paths] if checksums.expects(top) else paths

    def _part(self, kind: str, index: int) -> Path:
        return self.root / kind / f"part-{index:05d}.parquet"
