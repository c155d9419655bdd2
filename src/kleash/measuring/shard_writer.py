"""Writing shards beside the process that receives them: most of their time is spent on waiting for the disk."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from kleash.errors import RunFolderError
from kleash.measuring.sequence_clusters import SequenceSums
from kleash.store import RunFolder
from kleash.store.run_folder import EncodedShard

MAX_BATCH = 16
"""Shards that are written together: for all of them, the disk is waited for once."""
MAX_WAITING = 2 * MAX_BATCH
"""Shards in memory that wait to be written; the next one waits until there is room."""


@dataclass(frozen=True)
class WrittenShard:
    """A shard that is on disk, or about to be."""

    index: int
    sums: SequenceSums


class ShardWriter:
    """Context with a thread that writes encoded shards; ``written`` returns those that are on disk."""

    def __init__(self, folder: RunFolder) -> None:
        """Prepare for a folder that is locked by this process."""
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kleash-writer")
        self._waiting: deque[tuple[EncodedShard, WrittenShard]] = deque()
        self._batch: Future[list[WrittenShard]] | None = None

    def __enter__(self) -> "ShardWriter":
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the thread; after an error, once the shards that wait are on disk."""
        try:
            if error is not None:
                with suppress(RunFolderError):
                    deque(self.written(wait_for_all=True), maxlen=0)
        finally:
            self._thread.shutdown()

    def add(self, shard: WrittenShard, files: EncodedShard) -> None:
        """Write a shard with the next batch."""
        self._waiting.append((files, shard))
        self._start_batch()

    def written(self, *, wait_for_all: bool = False) -> Iterator[WrittenShard]:
        """Iterate over the shards that are on disk and were not returned yet.

        Waits for a batch while more than ``MAX_WAITING`` shards are in memory.

        Args:
            wait_for_all: whether to wait until every shard is on disk.

        Raises:
            RunFolderError: if one cannot be written.
        """
        while self._batch is not None:
            if not (wait_for_all or self._batch.done() or len(self._waiting) > MAX_WAITING):
                return
            batch, self._batch = self._batch, None
            shards = batch.result()
            self._start_batch()
            yield from shards

    def _start_batch(self) -> None:
        """Let the thread write the shards that wait, unless it is writing."""
        if self._batch is None and self._waiting:
            count = min(MAX_BATCH, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(count)]
            self._batch = self._thread.submit(self._write, batch)

    def _write(self, batch: list[tuple[EncodedShard, WrittenShard]]) -> list[WrittenShard]:
        self._folder.write_encoded_shards({shard.index: files for files, shard in batch})
        return [shard for _, shard in batch]
