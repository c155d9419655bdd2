"""The folder of a measurement, written shard by shard, so that a killed run can be continued."""

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any, ClassVar

from kleash.errors import RunFolderError
from kleash.store.atomic import remove_leftovers, writing
from kleash.store.checksums import CHECKSUMS, OTHER_CHECKSUMS, Checksums, begin_checksums, write_checked
from kleash.store.codec import to_json
from kleash.store.job_folder import (
    ADVICE_IF_LOCKED,
    HEADER,
    SOURCE,
    JobFolder,
    RunHeader,
    holds_job,
    require_same,
)
from kleash.store.locks import LOCK_FILES, folder_lock, taking_part
from kleash.store.measurement import Measurement
from kleash.store.tables import (
    ALTERNATIVE_COLUMNS,
    OPTIONAL_COLUMNS,
    SEQUENCE_COLUMNS,
    TOKEN_COLUMNS,
    TOP_COLUMNS,
    column_names,
    encode_table,
    read_columns,
)

KINDS = ("tokens", "sequences", "alternatives")
"""The folders of a run's parts."""
COUNTED_KINDS = ("tokens", "sequences")
"""The folders in which every shard has a file."""
ALTERNATIVES = "alternatives.parquet"
STOP = "stop.json"
MEASUREMENT = "measurement.json"
PART = re.compile(r"part-(\d{5}|[1-9]\d{5,})\.parquet")


@dataclass(frozen=True)
class RunStop:
    """``stop.json``: where a run ends that stopped before the end of its source."""

    shards: int
    """Those from the first on that count."""


@dataclass(frozen=True)
class RunFolder(JobFolder):
    """The files of one run.

    ``run.json`` says what is run; ``tokens/part-*.parquet`` and ``sequences/part-*.parquet`` hold a
    shard each, the second written last, so that a shard counts once its sequences are there; of its sequences that
    had drifted most, ``alternatives/part-*.parquet`` holds both models' likeliest tokens, of which
    ``alternatives.parquet`` is made in the end;
    ``measurement.json`` and ``report.html`` come at the end. ``checksums.jsonl`` has a line for each
    of these files but the report, by which it is verified whenever it is read.

    Shards are finished in any order. Several processes may write one run (``joined``), each with a file of checksums
    of its own, and each shard once its claim is theirs.
    """

    writer: str = ""
    """Names this process's file of checksums, where others may write as well."""
    leftovers: ClassVar[frozenset[str]] = frozenset({*LOCK_FILES, *KINDS, CHECKSUMS, OTHER_CHECKSUMS, SOURCE})

    @property
    def begun(self) -> bool:
        """Whether a shard was finished, be it damaged or gone since."""
        return next((self.root / "sequences").glob("part-*.parquet"), None) is not None

    @contextmanager
    def joined(self, *, resume: bool) -> Generator["RunFolder"]:
        """Context in which this process is one of those that write the run; ``begin`` follows.

        Args:
            resume: whether a run that no process works on is to be continued.

        Raises:
            RunFolderError: if such a run is there and is not to be continued, or the folder cannot be written.
        """
        self.check(resume=True)

        def check(is_alone: bool | None) -> None:
            self.check(resume=resume or is_alone is False)
            if is_alone:
                with self.making_result(
                    lambda: None
                ):  # a source in memory is written before the run is joined
                    self._discard_unfinished()

        with taking_part(
            self.root,
            check,
            lambda: not (self.begun or holds_job(self.root, "run", set(), {*self.leftovers, HEADER})),
            SOURCE,
        ) as is_alone:
            yield self if is_alone else replace(self, writer=token_hex(4))

    @contextmanager
    def writing(self, header: RunHeader, *, resume: bool) -> Generator["RunFolder"]:
        """``joined``, with the run begun."""
        with self.joined(resume=resume) as folder:
            folder.begin(header, on_wait=lambda: None)
            yield folder

    def _discard_unfinished(self) -> None:
        """Take away what does not count of the run that a process alone continues.

        That is the header if no shard was finished, unfinished files, and the sequences of shards of which another
        file is lost.
        """
        lost = [self.root / HEADER]
        if self.begun:
            self.header()  # raises where nothing can be trusted, before anything is taken away
            not_whole = sorted(self.on_disk() - set(self._whole_shards()))
            lost = [self._part("sequences", index) for index in not_whole]
        with writing(self.root):
            for folder in (self.root, *(self.root / kind for kind in KINDS)):
                remove_leftovers(folder)
            for path in lost:
                path.unlink(missing_ok=True)

    def begin(self, header: RunHeader, on_wait: Callable[[], None]) -> None:
        """Write the header of the run, or see that it is the one that others have written.

        Args:
            header: of this process.
            on_wait: called before this process waits for another that has the folder's lock.

        Raises:
            RunFolderError: naming what differs, if the folder holds another run; or if it is damaged or cannot be
                written.
        """
        with self.making_result(on_wait):
            with writing(self.root):
                for kind in KINDS:
                    (self.root / kind).mkdir(exist_ok=True)
            if (self.root / HEADER).exists() or self.begun:
                require_same(self.root, self.header(), header)
            else:
                begin_checksums(self.root)
                write_checked(self.root, self.root / HEADER, to_json(header))

    def making_result(self, on_wait: Callable[[], None]) -> AbstractContextManager[None]:
        """Context in which no other process begins the run or makes its result; this one waits for its turn."""
        return folder_lock(self.root, ADVICE_IF_LOCKED, on_wait=on_wait)

    @property
    def stop(self) -> int | None:
        """The number of shards that count, if the run stopped before the end of its source.

        Raises:
            RunFolderError: if the record of it is damaged or lost.
        """
        stop = Checksums.read(self.root).read_if_written(RunStop, self.root / STOP, "the end of a run")
        return None if stop is None else stop.shards

    def write_stop(self, shards: int) -> None:
        """Record that the run ends after so many shards."""
        self._write(self.root / STOP, to_json(RunStop(shards=shards)))

    def measurement_version(self) -> tuple[int, ...] | None:
        """What changes when another measurement is written; None if there is none."""
        try:
            status = (self.root / MEASUREMENT).stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size

    def has(self, index: int) -> bool:
        """Whether a shard is on disk, perhaps written by another process since this one began."""
        return self._part("sequences", index).exists()

    def on_disk(self) -> frozenset[int]:
        """The numbers of the shards that are on disk, as ``has``."""
        return frozenset(self._indices("sequences"))

    def finished_shards(self) -> tuple[int, ...]:
        """The numbers of the shards whose files are there with their checksums, in rising order, up to the ``stop``."""
        stop = self.stop
        return tuple(index for index in self._whole_shards() if stop is None or index < stop)

    def _whole_shards(self) -> list[int]:
        """``finished_shards`` without regard to the ``stop``."""
        expected = Checksums.read(self.root).names
        on_disk = {_part_name(kind, index) for kind in KINDS for index in self._indices(kind)}
        whole, lost = expected & on_disk, expected - on_disk
        return [
            index
            for index in self._indices("sequences")
            if all(_part_name(kind, index) in whole for kind in COUNTED_KINDS)
            and _part_name("alternatives", index) not in lost
        ]

    def require_shards(self, count: int) -> "RunFolder":
        """Check that all the shards are there that a finished run is made of; returns the folder.

        Who reads ``parts`` of a finished run asks first: ``parts`` passes over a shard of which a file is lost.

        Args:
            count: the number of shards of the run.

        Raises:
            RunFolderError: if not, naming the first that is missing.
        """
        missing = sorted({*range(count)} - {*self.finished_shards()})
        if missing:
            checksums, paths = Checksums.read(self.root), [self._part(kind, missing[0]) for kind in KINDS]
            lost = [path for path in paths if checksums.expects(path) and not path.exists()]
            raise RunFolderError(
                f"{(lost or paths)[0]} is missing or has no checksum, and the run is made of {count} shards; copy the "
                "whole folder, or run again with --resume to make it anew"
            )
        return self

    def write_shard(
        self,
        index: int,
        tokens: Mapping[str, Any],
        sequences: Mapping[str, Any],
        top: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a shard: ``top`` of its worst sequences, its tokens, and its sequences, which make it count."""
        optional = {name: kind for name, kind in OPTIONAL_COLUMNS.items() if name in tokens}
        if top is not None and len(top["prompt_id"]):
            self._write(self._part("alternatives", index), encode_table(top, TOP_COLUMNS))
        self._write(self._part("tokens", index), encode_table(tokens, {**TOKEN_COLUMNS, **optional}))
        self._write(self._part("sequences", index), encode_table(sequences, SEQUENCE_COLUMNS))

    def write_alternatives(self, columns: Mapping[str, Any]) -> None:
        """Write the likeliest tokens of both models in the worst sequences."""
        self._write(self.root / ALTERNATIVES, encode_table(columns, ALTERNATIVE_COLUMNS))

    def write_measurement(self, measurement: Measurement) -> None:
        """Write ``measurement.json``: with it the run is finished."""
        self._write(self.root / MEASUREMENT, measurement.to_json())

    def part(self, kind: str, index: int, names: list[str], checksums: Checksums) -> dict[str, Any]:
        """The named columns of one shard in a folder of ``KINDS``, verified by checksums that were read before."""
        return read_columns(self._part(kind, index), names, checksums.read_bytes)

    def parts(self, kind: str, names: list[str]) -> Iterator[dict[str, Any]]:
        """The named columns in a folder of ``KINDS``, verified, a shard at a time, so that only one is in memory.

        Not every shard has a file of alternatives.
        """
        checksums = Checksums.read(self.root)
        for index in self.finished_shards():
            path = self._part(kind, index)
            if kind in COUNTED_KINDS or path.exists() or checksums.expects(path):
                yield self.part(kind, index, names, checksums)

    def token_columns(self) -> frozenset[str]:
        """The names of the columns of ``tokens/``; an older folder has fewer. All shards have those of the first."""
        first = self._part("tokens", self.finished_shards()[0])
        return column_names(first, Checksums.read(self.root).read_bytes)

    def alternatives(self) -> dict[str, Any]:
        """The columns of ``alternatives.parquet``, verified."""
        return read_columns(
            self.root / ALTERNATIVES, list(ALTERNATIVE_COLUMNS), Checksums.read(self.root).read_bytes
        )

    def _indices(self, kind: str) -> list[int]:
        """The numbers of the shards that have a file of this kind, in rising order."""
        names = (path.name for path in (self.root / kind).glob("part-*.parquet"))
        return sorted(int(match[1]) for name in names if (match := PART.fullmatch(name)))

    def _write(self, path: Path, content: str | bytes) -> None:
        write_checked(self.root, path, content, writer=self.writer)

    def _part(self, kind: str, index: int) -> Path:
        return self.root / _part_name(kind, index)


def _part_name(kind: str, index: int) -> str:
    """The name of a shard's file in the folder of its run."""
    return f"{kind}/part-{index:05d}.parquet"
