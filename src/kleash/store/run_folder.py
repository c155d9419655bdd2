"""The folder of a measurement, written shard by shard, so that a killed run can be continued."""

import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from kleash.errors import RunFolderError
from kleash.store.atomic import cannot_write
from kleash.store.checksums import (
    CHECKSUMS,
    OTHER_CHECKSUMS,
    Checksums,
    merge_checksums,
    record_removal,
    write_checked,
    write_checked_together,
)
from kleash.store.job_folder import ADVICE_IF_LOCKED, JobFolder, RunHeader, require_same
from kleash.store.locks import LOCK, OTHER_LOCKS, folder_lock, lock_name, require_no_other_writer
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
    read_parts,
    write_table,
)
from kleash.store.worker_log import WORKER_LOG

KINDS = ("tokens", "sequences", "alternatives")
"""The folders of a run's parts."""
COUNTED_KINDS = ("tokens", "sequences")
"""The folders in which every shard has a file."""
ALTERNATIVES = "alternatives.parquet"
PART = re.compile(r"part-(\d{5}|[1-9]\d{5,})\.parquet")
SHARD_FOLDERS = "shard-*-of-*"
"""The folders of a run's array tasks, which ``kleash merge`` puts together."""


class EncodedShard(NamedTuple):
    """The files of a shard."""

    tokens: bytes
    sequences: bytes
    top: bytes | None = None
    """The file of its sequences that had drifted most; None if it has none of them."""


def encode_top(top: Mapping[str, Any]) -> bytes | None:
    """The file of the likeliest tokens, columns ``TOP_COLUMNS``; None without rows."""
    return encode_table(top, TOP_COLUMNS) if len(top["prompt_id"]) else None


def encode_shard(tokens: Mapping[str, Any], sequences: Mapping[str, Any]) -> EncodedShard:
    """The files of a shard's tokens and sequences."""
    optional = {name: kind for name, kind in OPTIONAL_COLUMNS.items() if name in tokens}
    return EncodedShard(
        encode_table(tokens, {**TOKEN_COLUMNS, **optional}), encode_table(sequences, SEQUENCE_COLUMNS)
    )


@dataclass(frozen=True)
class RunFolder(JobFolder):
    """The files of one run.

    ``run.json`` says what is run; ``tokens/part-*.parquet`` and ``sequences/part-*.parquet`` hold a
    shard each, the second written last, so that a shard counts once its sequences are there; of its sequences that
    had drifted most, ``alternatives/part-*.parquet`` holds both models' likeliest tokens, of which
    ``alternatives.parquet`` is made in the end;
    ``measurement.json`` and ``report.html`` come at the end. ``checksums.jsonl`` has a line for each
    of these files but the report, by which it is verified whenever it is read.

    Shards are finished in any order. Several processes may write one run: the first opens the folder
    (``writing``), the others join it (``joining``), each with a lock and a file of checksums of its own.
    """

    writer: int = 0
    """The number of this process among those that write the run; the first is 0."""
    leftovers: ClassVar[frozenset[str]] = frozenset(
        {LOCK, OTHER_LOCKS, *KINDS, CHECKSUMS, OTHER_CHECKSUMS, SHARD_FOLDERS, WORKER_LOG}
    )
    subfolders: ClassVar[tuple[str, ...]] = KINDS

    @property
    def begun(self) -> bool:
        """Whether a shard was finished, be it damaged or gone since."""
        return next((self.root / "sequences").glob("part-*.parquet"), None) is not None

    @contextmanager
    def joining(self, header: RunHeader) -> Generator["RunFolder"]:
        """Lock this writer's place in a run that the first writer has opened.

        Raises:
            RunFolderError: if the run is not the one of ``header``, or another process has this place.
        """
        with folder_lock(self.root, ADVICE_IF_LOCKED, lock_name(self.writer)):
            require_same(self.root, self.header(), header)
            yield self

    @contextmanager
    def locked(self) -> Generator[None]:
        """Context in which the run is locked, no other writer of an earlier run is active, and checksums are merged.

        Raises:
            RunFolderError: if another process is writing it, or checksums are damaged.
        """
        with super().locked():
            require_no_other_writer(self.root, ADVICE_IF_LOCKED)
            if self.begun:
                self.merge_checksums()
            else:  # what a run left that was killed before its first shard
                (self.root / WORKER_LOG).unlink(missing_ok=True)
            yield

    def merge_checksums(self) -> None:
        """Put the checksums of all writers into one file; the others must have left.

        Raises:
            RunFolderError: if checksums are damaged or cannot be written.
        """
        merge_checksums(self.root)

    def finished_shards(self) -> tuple[int, ...]:
        """The numbers of the shards whose files are there with their checksums, in rising order."""
        checksums = self.checksums()
        covered, expected = checksums.names, checksums.expected_names
        on_disk = {kind: frozenset(self._indices(kind)) for kind in KINDS}

        def is_finished(index: int) -> bool:
            has_top = _part_name("alternatives", index) in expected
            return all(
                index in on_disk[kind] and (not checksums.exists or _part_name(kind, index) in covered)
                for kind in (KINDS if has_top else COUNTED_KINDS)
            )

        return tuple(index for index in sorted(on_disk["sequences"]) if is_finished(index))

    def require_shards(self, count: int, indices: Iterable[int] | None = None) -> None:
        """Check that all the shards are there that a finished run is made of.

        Args:
            count: the number of shards of the run.
            indices: those that must be there; None for all.

        Raises:
            RunFolderError: if not, naming the first that is missing.
        """
        finished = set(self.finished_shards())
        required = range(count) if indices is None else indices
        missing = [index for index in required if index not in finished]
        if not missing:
            return
        advice = "copy the whole folder, or run again with --resume to make it anew"
        more = f" ({len(missing)} shards are missing)" if len(missing) > 1 else ""
        checksums = self.checksums()
        for path in self._shard(missing[0], checksums):
            if not path.exists():
                raise RunFolderError(
                    f"{path} is missing, and the run is made of {count} shards{more}; {advice}"
                )
            if not checksums.covers(path):
                raise RunFolderError(
                    f"{path} has no checksum in {CHECKSUMS}, and the run wrote one{more}; {advice}"
                )

    def drop_shards(self, count: int) -> None:
        """Remove the shards beyond the first ``count``, which a run that stops early does not need.

        Raises:
            RunFolderError: if a file cannot be removed.
        """
        for kind in ("sequences", "tokens", "alternatives"):  # without its sequences, a shard does not count
            paths = [self._part(kind, index) for index in self._indices(kind) if index >= count]
            record_removal(self.root, *paths)
            for path in paths:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise cannot_write(path, error) from error

    def copy_shards(self, indices: Iterable[int], source: "RunFolder") -> None:
        """Copy finished shards of another folder, verified.

        Raises:
            RunFolderError: if a file is missing or damaged, or cannot be written.
        """
        checksums = source.checksums()
        for path in (path for index in indices for path in source._shard(index, checksums)):
            content = checksums.read_bytes(path)
            write_checked(self.root, self.root / path.relative_to(source.root), content, writer=self.writer)

    def write_shard(
        self,
        index: int,
        tokens: Mapping[str, Any],
        sequences: Mapping[str, Any],
        top: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a shard: ``top`` of its worst sequences, its tokens, and its sequences, which make it count."""
        shard = encode_shard(tokens, sequences)
        if top is not None:
            self._write_part("alternatives", index, encode_table(top, TOP_COLUMNS))
        self._write_part("tokens", index, shard.tokens)
        self._write_part("sequences", index, shard.sequences)

    def write_encoded_shards(self, shards: Mapping[int, EncodedShard]) -> None:
        """Write several shards that other processes have encoded, and wait for the disk once for all of them."""
        files: dict[Path, bytes] = {}
        for index, shard in shards.items():
            contents = {"alternatives": shard.top, "tokens": shard.tokens, "sequences": shard.sequences}
            files |= {
                self._part(kind, index): content for kind, content in contents.items() if content is not None
            }
        write_checked_together(self.root, files, writer=self.writer)

    def write_alternatives(self, columns: Mapping[str, Any]) -> None:
        """Write the likeliest tokens of both models in the worst sequences."""
        write_table(self.root / ALTERNATIVES, columns, ALTERNATIVE_COLUMNS, root=self.root)

    def write_measurement(self, measurement: Measurement) -> None:
        """Write ``measurement.json``: with it the run is finished."""
        write_checked(self.root, self.root / "measurement.json", measurement.to_json())

    def token_part(self, index: int, names: list[str], checksums: Checksums) -> dict[str, Any]:
        """The named columns of ``tokens/`` of one shard, verified by checksums that were read before."""
        return read_columns(self._part("tokens", index), names, checksums.read_bytes)

    def sequence_part(self, index: int, names: list[str], checksums: Checksums) -> dict[str, Any]:
        """The named columns of ``sequences/`` of one shard, as ``token_part``."""
        return read_columns(self._part("sequences", index), names, checksums.read_bytes)

    def token_columns(self) -> frozenset[str]:
        """The names of the columns of ``tokens/``; an older folder has fewer. All shards have those of the first."""
        first = self._part("tokens", self.finished_shards()[0])
        return column_names(first, self.checksums().read_bytes)

    def token_parts(self, names: list[str]) -> Iterator[dict[str, Any]]:
        """The named columns of ``tokens/``, a shard at a time, verified."""
        return self._parts("tokens", names)

    def sequence_parts(self, names: list[str]) -> Iterator[dict[str, Any]]:
        """The named columns of ``sequences/``, a shard at a time, verified."""
        return self._parts("sequences", names)

    def top_parts(self, names: list[str]) -> Iterator[dict[str, Any]]:
        """The named columns of ``alternatives/``, a shard at a time, verified, of the shards that have such a file."""
        checksums = self.checksums()
        paths = [self._part("alternatives", index) for index in self.finished_shards()]
        return read_parts(
            [path for path in paths if path.exists() or checksums.expects(path)], names, checksums.read_bytes
        )

    def alternatives(self) -> dict[str, Any]:
        """The columns of ``alternatives.parquet``, verified."""
        return read_columns(self.root / ALTERNATIVES, list(ALTERNATIVE_COLUMNS), self.checksums().read_bytes)

    def _parts(self, kind: str, names: list[str]) -> Iterator[dict[str, Any]]:
        paths = [self._part(kind, index) for index in self.finished_shards()]
        return read_parts(paths, names, self.checksums().read_bytes)

    def _shard(self, index: int, checksums: Checksums) -> list[Path]:
        """The files of a shard, in the order in which they are written."""
        top = self._part("alternatives", index)
        paths = [self._part("tokens", index), self._part("sequences", index)]
        return [top, *paths] if checksums.expects(top) else paths

    def _indices(self, kind: str) -> list[int]:
        """The numbers of the shards that have a file of this kind, in rising order."""
        matches = (PART.fullmatch(path.name) for path in (self.root / kind).glob("part-*.parquet"))
        indices = (int(match.group(1)) for match in matches if match is not None)
        return sorted(set(indices))

    def _write_part(self, kind: str, index: int, content: bytes) -> None:
        write_checked(self.root, self._part(kind, index), content, writer=self.writer)

    def _part(self, kind: str, index: int) -> Path:
        return self.root / _part_name(kind, index)


def _part_name(kind: str, index: int) -> str:
    """The name of a shard's file in the folder of its run."""
    return f"{kind}/part-{index:05d}.parquet"
