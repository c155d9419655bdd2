"""The shards of a run that are not finished: which one a worker scores next, and what became of the others."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import median

from kleash.engines.base import Shard
from kleash.engines.ray.pool_records import PoolWorker, Task
from kleash.engines.ray.worker_loss import WorkerLoss, are_too_many, needs_smaller_batches
from kleash.errors import ClusterError

IN_FLIGHT = 2
"""Shards that a worker has: one that it scores, and the next."""
LATE_FACTOR, LATE_S = 4.0, 10.0
"""A shard is late after this many times the median, and not before so many seconds."""
RESUME = "finished shards are on disk: run again with --resume"


class TaskQueue:
    """The shards that are not finished.

    A shard is handed out again if its worker is lost. What it holds does not depend on who scores it, so of two results
    of one shard the first is taken and the second dropped.
    """

    def __init__(self, batch_tokens: int) -> None:
        """``batch_tokens``: of a batch of a shard that is handed out for the first time."""
        self._batch_tokens = batch_tokens
        self._source: Iterator[Shard] = iter(())
        self._ahead: deque[Shard] = deque()
        self._backlog: list[Task] = []
        self._open: dict[int, Task] = {}
        self._failures: dict[int, BaseException] = {}
        self._durations: deque[float] = deque(maxlen=101)

    def read_from(self, shards: Iterator[Shard]) -> None:
        """Take further shards from this iterator."""
        self._source = shards

    @property
    def is_empty(self) -> bool:
        """Whether each shard that was taken is finished or has failed."""
        return not self._open

    def raise_failure(self) -> None:
        """Raise the error of a shard, once all earlier ones are finished, so that it is that of a single process."""
        first = min(self._failures, default=None)
        if first is not None and first < min(self._open, default=first + 1):
            raise self._failures[first]

    def next_task(self) -> Task | None:
        """The next shard: the first of those that lost their worker, or else one from the source."""
        failed = min(self._failures, default=None)
        lost = [task for task in self._backlog if failed is None or task.shard.index < failed]
        if lost:
            task = min(lost, key=lambda task: task.shard.index)
            self._backlog.remove(task)
            return task
        if failed is not None or not self._read_ahead(1):
            return None
        shard = self._ahead.popleft()
        self._open[shard.index] = Task(shard=shard, batch_tokens=self._batch_tokens)
        return self._open[shard.index]

    def count_unassigned(self, limit: int) -> int:
        """The number of shards that no worker has, up to a limit, which is read ahead from the source."""
        return min(limit, len(self._backlog) + self._read_ahead(limit))

    def _read_ahead(self, count: int) -> int:
        """Read shards from the source until so many are at hand; the number that are."""
        self._ahead.extend(islice(self._source, max(0, count - len(self._ahead))))
        return len(self._ahead)

    def copied_task(self, workers: Sequence[PoolWorker]) -> Task | None:
        """A shard for a worker that has none, at the end of a run: one that waits behind another in its worker.

        If there is none, the one that has been with its worker for the longest time, if that is much longer than usual.
        """
        queued = [task for worker in workers for task in list(worker.queue)[1:]]
        waiting = [task for task in queued if task.copies == 1 and not task.is_done]
        if waiting:
            return min(waiting, key=lambda task: task.shard.index)
        if not self._durations:
            return None
        limit = time.monotonic() - max(LATE_S, LATE_FACTOR * IN_FLIGHT * median(self._durations))
        late = [task for task in self._open.values() if task.copies == 1 and task.start_time < limit]
        return min(late, key=lambda task: task.start_time, default=None)

    def is_first_result(self, task: Task, seconds: float) -> bool:
        """Note that a worker has scored a shard in so many seconds; false if another one had done it before."""
        self._durations.append(seconds)
        return self._close(task)

    def fail(self, task: Task, cause: BaseException) -> None:
        """Note the error that a worker raised for a shard; a result that came before it counts."""
        if self._close(task):
            self._failures[task.shard.index] = cause

    def _close(self, task: Task) -> bool:
        task.copies -= 1
        if task.is_done:
            return False
        task.is_done = True
        del self._open[task.shard.index]
        return True

    def put_back(self, tasks: Sequence[Task], loss: WorkerLoss) -> None:
        """Note that a worker was lost with these shards, of which it scored the first.

        Raises:
            ClusterError: if that one has lost too many workers.
        """
        for place, task in enumerate(tasks):
            task.copies -= 1
            if task.is_done or task.copies:
                continue
            self._backlog.append(task)
            if place == 0:
                _blame(task, loss)


def _blame(task: Task, loss: WorkerLoss) -> None:
    """Count the loss of a worker against the shard that it scored."""
    task.losses.append(loss)
    if are_too_many(task.losses):
        raise ClusterError(
            f"{describe_shards([task])} ended {len(task.losses)} workers that scored it, the last because "
            f"{loss.reason}; look at what it holds, or give a worker more memory with --resources-per-worker; "
            f"{RESUME}"
        )
    if needs_smaller_batches(task.losses):
        task.batch_tokens = max(1, task.batch_tokens // 2)


def describe_shards(tasks: list[Task]) -> str:
    """Shards in words, with the prompts, documents or responses in them."""
    return " and ".join(describe_shard(task.shard) for task in tasks)


def describe_shard(shard: Shard) -> str:
    """A shard in words."""
    items = shard.prompts or shard.sequences
    first, last = items[0].prompt_id, items[-1].prompt_id
    return f"shard {shard.index} (prompt_id {first}" + (f" to {last})" if last != first else ")")
