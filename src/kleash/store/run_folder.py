"""The folder of a measurement, written shard by shard, so that a killed run can be continued."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kleash.errors import RunFolderError
from kleash.store.checksums import CHECKSUMS, Checksums, write_checked
from kleash.store.job_folder import JobFolder
from kleash.store.measurement import Measurement
from kleash.store.tables import (
    ALTERNATIVE_COLUMNS,
    SEQUENCE_COLUMNS,
    TOKEN_COLUMNS,
    TOP_COLUMNS,
    read_columns,
    read_parts,
    write_table,
)

KINDS = ("tokens", "sequences", "alternatives")
"""The folders of a run's parts."""
ALTERNATIVES = "alternatives.parquet"


@dataclass(frozen=True)
class RunFolder(JobFolder):
    """The files of one run.

    ``run.json`` says what is run; ``tokens/part-*.parquet`` and ``sequences/part-*.parquet`` hold a
    shard each, the second written last, so that a shard counts once its sequences are there; of its sequences that
    had drifted most, ``alternatives/part-*.parquet`` holds both models' likeliest tokens, of which
    ``alternatives.parquet`` is made in the end;
    ``measurement.json`` and ``report.html`` come at the end. ``checksums.jsonl`` has a line for each
    of these files but the report, by which it is verified whenever it is read.
    """

    leftovers: ClassVar[frozenset[str]] = frozenset({".lock", *KINDS, CHECKSUMS})
    subfolders: ClassVar[tuple[str, ...]] = KINDS

    @property
    def begun(self) -> bool:
        """Whether a shard was finished, be it damaged or gone since."""
        return next((self.root / "sequences").glob("part-*.parquet"), None) is not None

    def finished_shards(self) -> int:
        """How many shards are there with their checksums, from the first on without a gap."""
        checksums = self.checksums()
        done = 0
        while all(path.exists() and checksums.covers(path) for path in self._shard(done, checksums)):
            done += 1
        return done

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
