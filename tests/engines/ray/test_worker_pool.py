"""What the pool does when workers are lost, fail or differ, with a stand-in for Ray whose workers follow a script.

Real workers of a real cluster are killed by ``tests/measuring/test_ray_run.py`` and ``benchmarks/ray_kills.py``.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import length_hint
from types import SimpleNamespace
from typing import Any

import pytest

from kleash.engines import Shard
from kleash.engines.ray import WorkerCode, WorkerPool, WorkerSpec, pool, task_queue
from kleash.engines.ray.cluster import WorkerResources
from kleash.engines.ray.shard_worker import LoadedModels, ScoredPart
from kleash.engines.ray.task_queue import IN_FLIGHT
from kleash.errors import ClusterError, NonFiniteError
from kleash.models import Prompt


class RayError(Exception):
    """The base of Ray's errors."""


class RayTaskError(RayError):
    """An exception that a worker raised."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("a remote traceback")
        self.cause = cause


class ActorDiedError(RayError):
    """The end of a worker."""


class OutOfMemoryError(RayError):
    """The end of a worker by Ray's memory monitor."""


class NodeDiedError(RayError):
    """The end of a node."""


class ObjectLostError(RayError):
    """A result whose node is gone."""


KILLED = ActorDiedError("Worker unexpectedly exits with a connection error code 2. End of file.")
Script = Callable[[int, int, int], "BaseException | None"]
"""From worker, shard and tokens of a batch: what is raised in place of a result."""


@dataclass(eq=False)
class StandInRay:
    """Ray's functions that the pool calls; ``wait`` runs one call of one worker, chosen at random."""

    script: Script
    draw: random.Random
    description: dict[str, Any] = field(default_factory=lambda: {"files": "the same"})
    versions: Callable[[int], dict[str, str]] = lambda number: {"the version of torch": "2"}
    queues: dict[int, deque[tuple[int, str, tuple[Any, ...]]]] = field(default_factory=dict)
    answers: dict[int, Any] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    scored: list[tuple[int, int]] = field(default_factory=list)
    most_in_flight: int = 0
    calls: int = 0
    exceptions = SimpleNamespace(
        RayError=RayError,
        RayTaskError=RayTaskError,
        OutOfMemoryError=OutOfMemoryError,
        NodeDiedError=NodeDiedError,
        ObjectLostError=ObjectLostError,
    )

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._actor))

    def _actor(self, number: int) -> Any:
        self.queues[number] = deque()
        methods = ("versions", "load", "score", "noise_floor_columns")
        return SimpleNamespace(
            number=number,
            **{name: SimpleNamespace(remote=partial(self._call, number, name)) for name in methods},
        )

    def _call(self, number: int, name: str, *arguments: Any) -> int:
        self.calls += 1
        self.queues[number].append((self.calls, name, arguments))
        scores = sum(name == "score" for _, name, _ in self.queues[number])
        self.most_in_flight = max(self.most_in_flight, scores)
        return self.calls

    def kill(self, actor: Any) -> None:
        self.killed.add(actor.number)
        self.queues[actor.number].clear()

    def wait(self, calls: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        if timeout:
            busy = [number for number, queue in self.queues.items() if queue]
            if busy:
                self._step(self.draw.choice(busy))
        ready = [call for call in calls if call in self.answers]
        return ready, [call for call in calls if call not in self.answers]

    def _step(self, number: int) -> None:
        call, name, arguments = self.queues[number].popleft()
        if name == "versions":
            self.answers[call] = (f"node-{number}", self.versions(number))
        elif name == "load":
            error = self.script(number, -1, 0)
            self.answers[call] = error or models(self.description)
        elif name == "score":
            shard, batch_tokens, _ = arguments
            error = self.script(number, shard.index, batch_tokens)
            if error is None:
                self.scored.append((number, shard.index))
            self.answers[call] = error or ScoredPart(f"rows of {shard.index}", 5, 0.5, batch_tokens)
            if error is not None and not isinstance(error, RayTaskError):
                for later, _, _ in self.queues[number]:
                    self.answers[later] = error
                self.queues[number].clear()
        else:
            self.answers[call] = self.script(number, -2, 0) or "columns"

    def get(self, call: int) -> Any:
        while call not in self.answers:
            self.wait([], 1, 1.0)
        answer = self.answers.pop(call)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def models(description: dict[str, Any]) -> LoadedModels:
    return LoadedModels(
        process=1,
        description=dict(description),
        pair=None,  # pyright: ignore[reportArgumentType]
        temperature=1.0,
        float32_gap_reloads=False,
        unknown_columns={},
        no_noise_floor="",
    )


def shards(count: int) -> Iterator[Shard]:
    for index in range(count):
        yield Shard(
            index=index, prompts=(Prompt(prompt_id=10 * index, token_ids=(1,), text="a", prompt_hash=""),)
        )


def make_pool(ray: StandInRay, workers: int = 3, room: int | None = None) -> tuple[WorkerPool, list[str]]:
    notes: list[str] = []
    code = WorkerCode(lambda: None, lambda engine: {}, lambda *_: None)  # pyright: ignore[reportArgumentType]
    spec = WorkerSpec(
        count=workers,
        room=workers if room is None else room,
        resources=WorkerResources(),
        code=code,
        batch_tokens=64,
        versions={"the version of torch": "2"},
        packages=("torch",),
        expected={"files": "the same"},
    )
    made = WorkerPool(ray, spec, notes.append)  # pyright: ignore[reportArgumentType]
    made.wait_for_models()
    return made, notes


def never(worker: int, shard: int, batch_tokens: int) -> None:
    """Nothing fails."""


def run(
    script: Script, count: int = 30, seed: int = 0, workers: int = 3
) -> tuple[list[int], StandInRay, list[str]]:
    ray = StandInRay(script, random.Random(seed))
    made, notes = make_pool(ray, workers)
    indices = [scored.shard.index for scored in made.results(shards(count), lambda: None)]
    made.close()
    return indices, ray, notes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss", [None, KILLED, NodeDiedError("node died"), OutOfMemoryError("low memory")])
def test_every_shard_is_returned_once_whatever_workers_are_lost(
    seed: int, loss: BaseException | None
) -> None:
    draw, lost = random.Random(seed), set[int]()

    def script(worker: int, shard: int, batch_tokens: int) -> BaseException | None:
        if loss is None or shard in lost or shard < 0 or draw.random() < 0.7:
            return None
        lost.add(shard)
        return loss

    indices, ray, notes = run(script, seed=seed)
    assert sorted(indices) == list(range(30)) and ray.most_in_flight <= IN_FLIGHT
    assert len([note for note in notes if " was lost (" in note]) == len(lost)
    assert len(ray.queues) == 3 + len(lost)  # each lost worker was replaced


def test_a_shard_that_ends_its_workers_is_named_after_three(seed: int = 1) -> None:
    tries: list[int] = []

    def script(worker: int, shard: int, batch_tokens: int) -> BaseException | None:
        if shard == 7:
            tries.append(batch_tokens)
        return KILLED if shard == 7 else None

    with pytest.raises(
        ClusterError, match=r"^shard 7 \(prompt_id 70\) ended 3 workers that scored it, the last because"
    ):
        run(script, seed=seed)
    assert tries == [64, 64, 32]  # the kernel kills a process that takes the last memory without saying so


def test_nodes_are_lost_for_reasons_of_their_own() -> None:
    losses: list[int] = []

    def script(worker: int, shard: int, batch_tokens: int) -> BaseException | None:
        if shard == 3 and len(losses) < 6:
            losses.append(batch_tokens)
            return NodeDiedError("node died")
        return None

    indices, _, _ = run(script)
    assert sorted(indices) == list(range(30)) and losses == [64] * 6


def test_memory_that_ray_saw_run_out_halves_the_batches() -> None:
    tries: list[int] = []

    def script(worker: int, shard: int, batch_tokens: int) -> BaseException | None:
        if shard == 3:
            tries.append(batch_tokens)
        return OutOfMemoryError("the node was low on memory") if shard == 3 and batch_tokens > 16 else None

    assert sorted(run(script)[0]) == list(range(30)) and tries == [64, 32, 16]


@pytest.mark.parametrize("seed", range(6))
def test_of_several_errors_the_one_of_the_first_shard_is_raised(seed: int) -> None:
    """All shards before it are returned, as a single process would have written them."""

    def script(worker: int, shard: int, batch_tokens: int) -> BaseException | None:
        return RayTaskError(NonFiniteError(f"NaN in {shard}")) if shard in (9, 10, 11, 12) else None

    ray = StandInRay(script, random.Random(seed))
    made, _ = make_pool(ray, workers=4)
    returned: list[int] = []
    with pytest.raises(NonFiniteError, match=r"^NaN in 9$"):
        for scored in made.results(shards(30), lambda: None):
            returned.append(scored.shard.index)
    assert set(range(9)) <= set(returned)


def test_workers_that_do_not_start_end_the_run() -> None:
    def script(worker: int, shard: int, batch_tokens: int) -> BaseException | None:
        return KILLED if shard == -1 else None

    message = r"^3 workers ended one after the other while they started \(its process was killed or crashed\)"
    with pytest.raises(ClusterError, match=message):
        run(script)


@pytest.mark.parametrize("part", ["versions", "files"])
def test_a_worker_that_differs_is_named_before_it_gets_a_shard(part: str) -> None:
    ray = StandInRay(never, random.Random(0))
    if part == "versions":
        ray.versions = lambda number: {"the version of torch": "1" if number == 2 else "2"}
        message = r"^worker 2 on node-2 measures something else: the version of torch is '1' there and '2' here; all"
    else:
        ray.description = {"files": "others"}
        message = (
            r"measures something else: files is 'others' there and 'the same' here; all nodes need the same"
        )
    with pytest.raises(ClusterError, match=message):
        make_pool(ray)
    assert not ray.scored


def test_a_late_shard_is_also_given_to_an_idle_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard 5 never ends in the worker that took it first."""
    monkeypatch.setattr(task_queue, "LATE_S", 0.0)
    monkeypatch.setattr(task_queue, "LATE_FACTOR", 0.0)
    stuck: list[int] = []

    class StuckRay(StandInRay):
        def _step(self, number: int) -> None:
            if number in stuck:
                return
            if self.queues[number][0][1] == "score" and self.queues[number][0][2][0].index == 5 and not stuck:
                stuck.append(number)
                return
            super()._step(number)

    ray = StuckRay(never, random.Random(0))
    made, _ = make_pool(ray)
    assert sorted(scored.shard.index for scored in made.results(shards(30), lambda: None)) == list(range(30))
    assert len({worker for worker, shard in ray.scored if shard == 5} - set(stuck)) == 1


def test_a_shard_that_waits_behind_a_slow_one_is_given_to_an_idle_worker() -> None:
    """Shard 5 takes as long as all others, so that the shard behind it would have to wait."""

    class SlowRay(StandInRay):
        slow: int | None = None

        def _step(self, number: int) -> None:
            _, name, arguments = self.queues[number][0]
            if name == "score" and arguments[0].index == 5 and len(self.scored) < 29 and self.calls < 10_000:
                self.slow = number
                self.calls += 10  # time goes by, so that the test ends
                return
            super()._step(number)

    ray = SlowRay(never, random.Random(0))
    made, _ = make_pool(ray)
    assert sorted(scored.shard.index for scored in made.results(shards(30), lambda: None)) == list(range(30))
    assert {shard for _, shard in ray.scored[:29]} == set(range(30)) - {5}


@pytest.mark.parametrize(
    ("count", "started"), [(2, [1]), (3, [2]), (30, range(5, 30)), (300, range(30, 301))]
)
def test_workers_without_room_are_started_only_for_shards_that_no_worker_has(
    count: int, started: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 000 workers there is room for one, which has two shards; four others may wait at a time."""
    monkeypatch.setattr(pool, "MAX_WAITING", 4)
    ray = StandInRay(never, random.Random(0))
    made, notes = make_pool(ray, workers=100_000, room=1)
    most_waiting, most_ahead, taken = 0, 0, iter(range(count))
    assert len(ray.queues) == 1 and notes == []

    def source() -> Iterator[Shard]:
        return (shard for shard, _ in zip(shards(count), taken, strict=False))

    def hint() -> None:
        nonlocal most_waiting, most_ahead
        starting = [any(name != "score" for _, name, _ in queue) for queue in ray.queues.values()]
        most_waiting = max(most_waiting, sum(starting))
        queued = sum(name == "score" for queue in ray.queues.values() for _, name, _ in queue)
        most_ahead = max(most_ahead, count - length_hint(taken) - queued - len(ray.scored))

    indices = [scored.shard.index for scored in made.results(source(), hint)]
    assert sorted(indices) == list(range(count)) and most_waiting <= 4 and most_ahead <= 4
    assert len(ray.queues) in started
    assert len({worker for worker, _ in ray.scored}) > 1 or count < 4


def test_a_call_goes_to_another_worker_if_one_is_lost() -> None:
    losses = iter([KILLED, KILLED])

    def script(worker: int, shard: int, batch_tokens: int) -> BaseException | None:
        return next(losses, None) if shard == -2 else None

    made, notes = make_pool(StandInRay(script, random.Random(0)))
    assert made.call("noise_floor_columns", []) == "columns" and len(notes) == 2
