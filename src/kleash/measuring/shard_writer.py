"""Writing shards on several threads: most of the time that a shard takes is spent on waiting for the disk."""

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple

from kleash.measuring.sequence_clusters import SequenceSums
from kleash.store import RunFolder
from kleash.store.run_folder import EncodedShard

WRITERS = 8
"""Threads that write."""
MAX_WAITING = 2 * WRITERS
"""Shards that wait for a thread or are being written; the next one waits until there is room."""


class WrittenShard(NamedTuple):
    """A shard that is on disk."""

    index: int
    sums: SequenceSums


class ShardWriter:
    """Context that writes encoded shards; at its end, all that it was given are on disk."""

    def __init__(self, folder: RunFolder) -> None:
        """Prepare for a folder that is locked by this process."""
        self._folder = folder
        self._threads = ThreadPoolExecutor(WRITERS, thread_name_prefix="kleash-writer")
        self._waiting: deque[tuple[Future[None], WrittenShard]] = deque()

    def __enter__(self) -> "ShardWriter":
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the threads."""
        self._threads.shutdown()

    def add(self, index: int, files: EncodedShard, top: Mapping[str, Any], sums: SequenceSums) -> None:
        """Write a shard as soon as a thread has time."""
        future = self._threads.submit(self._folder.write_encoded_shard, index, files, top)
        self._waiting.append((future, WrittenShard(index, sums)))

    def written(self, *, all_of_them: bool = False) -> Iterator[WrittenShard]:
        """Iterate over the shards that are on disk and were not returned yet; waits if too many are not.

        Args:
            all_of_them: whether to wait for every shard.

        Raises:
            RunFolderError: if one cannot be written.
        """
        while self._waiting:
            future, shard = self._waiting[0]
            if not (all_of_them or future.done() or len(self._waiting) > MAX_WAITING):
                return
            future.result()
            self._waiting.popleft()
            yield shard
