"""The workers of a run: starting them, handing out shards, and going on when one is lost.

Each worker has at most ``IN_FLIGHT`` shards, so that it never waits for the next one and few results are in memory.
Which shard is next, and what happens to those of a lost worker, is in ``task_queue``.

Workers for which the cluster has no room yet wait in its queue, where they tell its autoscaler what is needed. There
are no more of them than shards that no worker has.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

from kleash.engines.base import Shard
from kleash.engines.ray.pool_records import Call, PoolWorker, ScoredShard, WorkerSpec
from kleash.engines.ray.shard_worker import LoadedModels, ShardWorker
from kleash.engines.ray.task_queue import IN_FLIGHT, RESUME, TaskQueue, describe_shards
from kleash.engines.ray.worker_loss import WorkerLoss, describe_loss
from kleash.errors import ClusterError, KleashError
from kleash.store.job_folder import describe_differences

MAX_FAILED_STARTS = 3
"""Workers that may end one after the other while they load the models."""
MAX_CALLS = 3
"""Workers on which one call is tried."""
START_S = 600.0
"""Seconds for which a run without workers waits for the cluster to start one."""
JOIN_S = 20.0
"""Seconds for which the first worker waits for the others before anything is written."""
NOTE_S = 30.0
"""Seconds after which the user is told that the cluster has no room yet."""
MAX_WAITING = 64
"""Workers that wait in the cluster's queue at a time."""
POLL_S = 1.0
"""Seconds from one look at the clock to the next."""


class WorkerPool:
    """The workers of one run, on a cluster to which this process is connected."""

    def __init__(self, ray: ModuleType, spec: WorkerSpec, note: Callable[[str], None]) -> None:
        """Ask the cluster for the workers.

        Args:
            ray: the connected module.
            spec: what is asked for.
            note: called with sentences for the user.
        """
        self._ray, self._spec, self._note = ray, spec, note
        self._actor_class: Any = ray.remote(ShardWorker)
        self._calls: dict[Any, Call] = {}
        self._alive: list[PoolWorker] = []
        self._failed_starts = 0
        self._idle_since = time.monotonic()
        self._has_noted_wait = False
        self._tasks = TaskQueue(spec.batch_tokens)
        self._first: LoadedModels | None = None
        self.workers: list[PoolWorker] = []
        """All workers that were started, also those that were lost."""
        for _ in range(spec.room):
            self._start_worker()

    def wait_for_models(self) -> LoadedModels:
        """Wait until the workers have loaded the models, and return the description of the first worker's.

        All are compared with the driver and with the first. Those that take longer than ``JOIN_S`` join later.

        Raises:
            ClusterError: if none starts, or one differs.
            KleashError: if a worker cannot load the models.
        """
        while self._first is None:
            self._receive()
        deadline = time.monotonic() + JOIN_S
        while not all(worker.is_ready for worker in self._alive) and time.monotonic() < deadline:
            self._receive()
        ready = sum(worker.is_ready for worker in self._alive)
        if ready < self._spec.room:
            self._note(f"{ready} of {self._spec.room} workers have started; the others join later")
        return self._first

    def results(self, shards: Iterator[Shard], hint: Callable[[], Any]) -> Iterator[ScoredShard]:
        """Score shards, and iterate over the results in the order in which they are finished.

        An error of a shard is raised once all earlier shards are finished, so that it is that of a single process.

        Args:
            shards: taken one by one, when a worker has room.
            hint: returns what is sent along with a shard.

        Raises:
            ClusterError: if no worker is left, or a shard ends every worker that scores it.
            Exception: what a worker raised.
        """
        self._tasks.read_from(shards)
        while True:
            self._hand_out(hint)
            self._start_waiting_workers()
            self._tasks.raise_failure()
            if self._tasks.is_empty:
                return
            yield from self._receive()

    def call(self, method: str, *arguments: Any) -> Any:
        """The result of a method on any worker, on another one if that is lost.

        Raises:
            ClusterError: if no worker is left, or too many are lost.
            Exception: what a worker raised.
        """
        for attempt in range(MAX_CALLS):
            while not any(worker.is_ready for worker in self._alive):
                self._receive()
            worker = min(
                (worker for worker in self._alive if worker.is_ready), key=lambda worker: len(worker.queue)
            )
            try:
                return self._ray.get(getattr(worker.actor, method).remote(*arguments))
            except self._ray.exceptions.RayTaskError as error:
                raise cause_of(error) from error
            except self._ray.exceptions.RayError as error:
                loss = describe_loss(self._ray, error)
                self._lose(worker, loss)
                if attempt == MAX_CALLS - 1:
                    raise ClusterError(
                        f"{MAX_CALLS} workers were lost while they scored the sample for the noise floor "
                        f"({loss.reason}); {RESUME}"
                    ) from error
        raise AssertionError

    def close(self) -> None:
        """End all workers."""
        for worker in self._alive:
            with suppress(Exception):
                self._ray.kill(worker.actor)
        self._alive.clear()
        self._calls.clear()

    def _start_worker(self) -> None:
        """Ask the cluster for one more worker."""
        number = len(self.workers)
        options = self._spec.resources.actor_options()
        actor = self._actor_class.options(max_restarts=0, max_task_retries=0, **options).remote(number)
        worker = PoolWorker(number=number, actor=actor)
        self.workers.append(worker)
        self._alive.append(worker)
        self._send(Call("versions", worker), self._spec.packages)

    def _start_waiting_workers(self) -> None:
        """Ask for workers beyond those that had room at the start, as long as there are shards for them."""
        missing = self._spec.count - len(self._alive)
        if missing <= 0:
            return
        waiting = sum(not worker.is_ready for worker in self._alive)
        limit = min(MAX_WAITING, self._tasks.count_unassigned(MAX_WAITING))
        for _ in range(min(missing, limit - waiting)):
            self._start_worker()

    def _send(self, call: Call, *arguments: Any) -> None:
        """Call a worker's method."""
        self._calls[getattr(call.worker.actor, call.method).remote(*arguments)] = call

    def _hand_out(self, hint: Callable[[], Any]) -> None:
        """Give the next shards to the workers that have room, first to those that have none."""
        for depth in range(IN_FLIGHT):
            for worker in self._alive:
                if not worker.is_ready or len(worker.queue) > depth:
                    continue
                task = self._tasks.next_task() or (
                    self._tasks.copied_task(self._alive) if depth == 0 else None
                )
                if task is None:
                    return
                task.start_time, task.copies = time.monotonic(), task.copies + 1
                worker.queue.append(task)
                self._send(Call("score", worker, task), task.shard, task.batch_tokens, hint())

    def _receive(self) -> list[ScoredShard]:
        """Wait for results or for ``POLL_S``, and deal with all that has arrived."""
        calls = list(self._calls)
        ready, waiting = self._ray.wait(calls, num_returns=1, timeout=POLL_S)
        if ready and waiting:
            ready += self._ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]
        scored: list[ScoredShard] = []
        for reference in ready:
            call = self._calls.pop(reference, None)
            if call is None:  # its worker was lost meanwhile
                continue
            try:
                answer = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:
                self._fail(call, error)
            except self._ray.exceptions.RayError as error:
                self._lose(call.worker, describe_loss(self._ray, error))
            else:
                scored += self._handle_answer(call, answer)
        self._look_at_clock()
        return scored

    def _handle_answer(self, call: Call, answer: Any) -> list[ScoredShard]:
        """Go on with what a worker returned: send the next call, or return a shard whose first result it is."""
        worker, task = call.worker, call.task
        if call.method == "versions":
            worker.node, versions = answer
            self._require_same(worker, versions, self._spec.versions)
            self._send(Call("load", worker), self._spec.code)
        elif call.method == "load":
            self._join(worker, answer)
        elif task is not None:
            worker.queue.remove(task)
            worker.seconds += answer.seconds
            if self._tasks.is_first_result(task, answer.seconds):
                worker.shards += 1
                worker.tokens += answer.tokens
                return [ScoredShard(task.shard, answer, worker)]
        return []

    def _join(self, worker: PoolWorker, loaded: LoadedModels) -> None:
        """Compare a worker that has loaded the models with the driver and the first worker."""
        worker.process = loaded.process
        expected = self._spec.expected
        self._require_same(worker, {name: loaded.description.get(name) for name in expected}, expected)
        if self._first is None:
            self._first = loaded
        self._require_same(worker, loaded.description, self._first.description, "on the first worker")
        worker.is_ready = True
        self._failed_starts = 0

    def _require_same(
        self,
        worker: PoolWorker,
        described: Mapping[str, Any],
        expected: Mapping[str, Any],
        where: str = "here",
    ) -> None:
        """Raise ClusterError if a worker differs."""
        differences = "; ".join(describe_differences(expected, described, where))
        if differences:
            raise ClusterError(
                f"{worker.name} measures something else: {differences}; all nodes need the same versions and files"
            )

    def _fail(self, call: Call, error: Any) -> None:
        """Deal with an error that a worker raised: of a shard it counts when all before it are finished."""
        cause, task = cause_of(error), call.task
        if cause is not error:
            cause.__cause__ = error
        if task is None:
            if isinstance(cause, KleashError):
                raise ClusterError(f"{call.worker.name} cannot load the models: {cause}") from error
            raise cause
        call.worker.queue.remove(task)
        self._tasks.fail(task, cause)

    def _lose(self, worker: PoolWorker, loss: WorkerLoss) -> None:
        """Put a lost worker's shards back, and ask for another worker.

        Raises:
            ClusterError: if the shard that it scored has lost too many, or workers do not even start.
        """
        if worker not in self._alive:
            return
        self._alive.remove(worker)
        self._calls = {
            reference: call for reference, call in self._calls.items() if call.worker is not worker
        }
        with suppress(Exception):
            self._ray.kill(worker.actor)
        self._tasks.put_back(list(worker.queue), loss)
        if not worker.is_ready and not loss.is_of_node:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise ClusterError(
                    f"{self._failed_starts} workers ended one after the other while they started ({loss.reason}); "
                    "does each node have kleash, the models, and the memory for them?"
                )
        again = f"; scored again: {describe_shards(list(worker.queue))}" if worker.queue else ""
        self._note(f"{worker.name} was lost ({loss.reason}){again}")
        worker.queue.clear()
        self._start_worker()

    def _look_at_clock(self) -> None:
        """Tell the user that the cluster has started no worker, and give up after ``START_S``."""
        now = time.monotonic()
        if any(worker.node for worker in self._alive):
            self._idle_since, self._has_noted_wait = now, False
            return
        seconds = now - self._idle_since
        if seconds > START_S:
            raise ClusterError(
                f"the Ray cluster has started no worker with {self._spec.resources} within {START_S:.0f} s; see ray "
                f"status, and ask for less with --workers or --resources-per-worker; {RESUME}"
            )
        if seconds > NOTE_S and not self._has_noted_wait:
            self._has_noted_wait = True
            self._note(f"waiting for the Ray cluster to start workers with {self._spec.resources}")


def cause_of(error: Any) -> BaseException:
    """The exception that a worker raised, from Ray's error around it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error
