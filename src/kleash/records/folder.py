"""A run folder: what a run writes, shard by shard, so that it can be killed at any moment and go on."""

import json
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kleash.errors import RunFolderError
from kleash.records.atomic import TEMPORARY, cannot_write, write_atomically
from kleash.records.codec import decode, to_json
from kleash.records.locking import folder_lock
from kleash.records.measurement import SCHEMA, Measurement
from kleash.records.tables import (
    ALTERNATIVE_COLUMNS,
    SEQUENCE_COLUMNS,
    TOKEN_COLUMNS,
    TOP_COLUMNS,
    read_parts,
    write_table,
)

BEFORE_A_RUN = frozenset({".lock", "tokens", "sequences", "alternatives", f"{TEMPORARY}run.json"})
"""What a run may leave behind that was killed before it had begun."""


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """What decides a run's result, written before its first shard; to go on, all of it must agree."""

    schema: int = SCHEMA
    kleash: str
    settings: Mapping[str, Any]
    source_sha256: str
    fingerprints: Mapping[str, str]
    """Of the policy and of the reference."""
    sampler: str = ""
    """The algorithm that draws responses; empty in runs from before it was recorded."""

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
            **{f"the {role}'s weights": mark for role, mark in self.fingerprints.items()},
            "the sampler": self.sampler or "that of an older version",
        }


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
    if (root / "run.json").exists():
        if not resume and begun:
            raise RunFolderError(
                f"{root} holds a run already; go on with it with --resume, or give another --out"
            )
        return
    strangers = sorted(found.name for found in root.iterdir() if found.name not in leftovers)
    if strangers:
        raise RunFolderError(
            f"{root} exists and is not a run of kleash (it holds {strangers[0]}); give another --out"
        )


def require_same(root: Path, held: RunHeader, header: RunHeader) -> None:
    """See that the run a folder holds is the one that is to go on.

    Raises:
        RunFolderError: naming what differs, if it is another.
    """
    differences = held.differences(header)
    if differences:
        raise RunFolderError(f"{root} holds another run: {'; '.join(differences)}; give another --out")


def read_header(root: Path) -> RunHeader:
    """What the run in a folder is.

    Raises:
        RunFolderError: if it is none, or damaged.
    """
    path = root / "run.json"
    try:
        return decode(RunHeader, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunFolderError(f"{path} cannot be read as the header of a run: {error}") from error


@dataclass(frozen=True)
class RunFolder:
    """The files of one run.

    ``run.json`` says what is run; ``tokens/part-*.parquet`` and ``sequences/part-*.parquet`` hold a
    shard each, the second written last, so that a shard counts once its sequences are there; of its sequences that
    had drifted most, ``alternatives/part-*.parquet`` holds both models' likeliest tokens, of which
    ``alternatives.parquet`` is made in the end;
    ``measurement.json`` and ``report.html`` come at the end.
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
            check_root(self.root, resume=resume, begun=self.finished_shards() > 0, leftovers=BEFORE_A_RUN)
        except RunFolderError:
            raise
        except OSError as error:  # a name that is too long, a folder that may not be looked into
            raise cannot_write(self.root, error) from error

    def _begin(self, header: RunHeader, *, resume: bool) -> None:
        self.check(resume=resume)
        folders = (self.root, *(self.root / kind for kind in ("tokens", "sequences", "alternatives")))
        path = self.root / "run.json"
        kept = self.finished_shards()
        if kept:
            require_same(self.root, self.header(), header)
        for folder in folders:
            folder.mkdir(exist_ok=True)
            for left in folder.glob(f"{TEMPORARY}*"):
                left.unlink()
        if not kept:
            write_atomically(path, to_json(header))

    def header(self) -> RunHeader:
        """What the run in this folder is.

        Raises:
            RunFolderError: if it is none, or damaged.
        """
        return read_header(self.root)

    def finished_shards(self) -> int:
        """How many shards are there, from the first on without a gap."""
        done = 0
        while self._part("sequences", done).exists() and self._part("tokens", done).exists():
            done += 1
        return done

    def require_shards(self, count: int) -> None:
        """See that all the shards are there that a finished run is made of.

        Raises:
            RunFolderError: if not, naming the first that is missing.
        """
        done = self.finished_shards()
        if done < count:
            kind = next(kind for kind in ("tokens", "sequences") if not self._part(kind, done).exists())
            raise RunFolderError(
                f"{self._part(kind, done)} is missing, and the run is made of {count} shards; copy the whole folder, "
                "or run again with --resume to make it anew"
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
            write_table(self._part("alternatives", index), top, TOP_COLUMNS)
        write_table(self._part("tokens", index), tokens, TOKEN_COLUMNS)
        write_table(self._part("sequences", index), sequences, SEQUENCE_COLUMNS)

    def write_alternatives(self, columns: Mapping[str, Any]) -> None:
        """Write the likeliest tokens of both models in the worst sequences."""
        write_table(self.root / "alternatives.parquet", columns, ALTERNATIVE_COLUMNS)

    def write_measurement(self, measurement: Measurement) -> None:
        """Write ``measurement.json``: with it the run is finished."""
        write_atomically(self.root / "measurement.json", measurement.to_json())

    def token_parts(self, names: list[str]) -> Iterator[dict[str, Any]]:
        """The named columns of ``tokens/``, a shard at a time."""
        return read_parts([self._part("tokens", index) for index in range(self.finished_shards())], names)

    def sequence_parts(self, names: list[str]) -> Iterator[dict[str, Any]]:
        """The named columns of ``sequences/``, a shard at a time."""
        return read_parts([self._part("sequences", index) for index in range(self.finished_shards())], names)

    def top_parts(self, names: list[str]) -> Iterator[dict[str, Any]]:
        """The named columns of ``alternatives/``, a shard at a time."""
        return read_parts(
            [self._part("alternatives", index) for index in range(self.finished_shards())], names
        )

    def alternatives(self) -> dict[str, Any]:
        """The columns of ``alternatives.parquet``."""
        return next(read_parts([self.root / "alternatives.parquet"], list(ALTERNATIVE_COLUMNS)))

    def _part(self, kind: str, index: int) -> Path:
        return self.root / kind / f"part-{index:05d}.parquet"
