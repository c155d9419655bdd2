"""Workers of Ray: what they answer, differences between them, and batches that are halved when memory runs out."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kleash.engines import Shard
from kleash.errors import CannotRunError, ClusterError, NonFiniteError
from kleash.measuring.progress import NullProgressReporter
from kleash.measuring.ray_cluster import connected_cluster, reserved, start_actors
from kleash.measuring.ray_workers import (
    LoadedModels,
    RayEngine,
    WorkerResult,
    run_within_memory,
    without_networks,
)
from kleash.models import Pair, Prompt, load_pair
from kleash.records import MeasureJob
from kleash.store.job_folder import RunHeader

TORCH_SAYS = (
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
)


@dataclass(frozen=True)
class StandInEngine:
    """Runs out of memory with more than so many tokens in a batch."""

    job: MeasureJob
    most: int
    error: Exception
    tried: list[int] = field(default_factory=list)

    def run(self, shard: Shard) -> Any:
        self.tried.append(self.job.batch_tokens)
        if self.job.batch_tokens > self.most:
            raise self.error
        return f"batches of {self.job.batch_tokens}"


SHARD = Shard(
    index=4,
    prompts=tuple(
        Prompt(prompt_id=n, token_ids=tuple(range(4 + n)), text="", prompt_hash="") for n in range(3)
    ),
)


def within_memory(engine: StandInEngine, batch_tokens: int) -> tuple[Any, int]:
    engine = replace(engine, job=replace(engine.job, batch_tokens=batch_tokens))
    return run_within_memory(engine, SHARD)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(TORCH_SAYS),
        RuntimeError("could not create a primitive"),  # oneDNN
        RuntimeError("std::bad_alloc"),
        torch.OutOfMemoryError("CUDA out of memory."),
    ],
)
def test_batches_are_halved_until_memory_is_enough(error: Exception) -> None:
    engine = StandInEngine(MeasureJob(max_new_tokens=10), 1100, error)
    assert within_memory(engine, 4096) == ("batches of 1024", 1024)
    assert engine.tried == [4096, 2048, 1024]


def test_a_sequence_that_does_not_fit_by_itself_ends_in_a_sentence() -> None:
    engine = StandInEngine(MeasureJob(max_new_tokens=10), 0, RuntimeError(TORCH_SAYS))
    message = (
        r"^a sequence of 16 tokens in shard 4 does not fit into the memory of a worker by itself \(\[enforce"
    )
    with pytest.raises(CannotRunError, match=message):
        within_memory(engine, 64)
    assert engine.tried == [64, 32, 16]  # 4 + 2 tokens of the longest prompt, and 10 new ones


@pytest.mark.parametrize("error", [NonFiniteError("NaN"), RuntimeError("shapes differ"), ValueError("other")])
def test_other_errors_are_not_tried_again(error: Exception) -> None:
    engine = StandInEngine(MeasureJob(), 0, error)
    with pytest.raises(type(error), match=str(error)):
        within_memory(engine, 64)
    assert engine.tried == [64]


def test_a_described_pair_says_whether_both_are_one_model() -> None:
    """Without weights and tokenizers, so that it can be sent; what is compared of networks is whether they are one."""
    pair = load_pair("shipped:policy", "shipped:reference")
    described = pickle.loads(pickle.dumps(without_networks(pair)))
    assert not described.is_one_model and described.policy.record() == pair.policy.record()
    assert described.context_length == pair.context_length and described.notes == pair.notes
    same = SimpleNamespace(**{**vars(pair), "reference": pair.policy})
    assert pickle.loads(pickle.dumps(without_networks(Pair(**vars(same))))).is_one_model
    assert len(pickle.dumps(without_networks(pair))) < 10_000


HEADER = RunHeader(kleash="1", settings={}, source_sha256="", fingerprints={"policy": "p"})


class StandInRay:
    """Runs a call when its result is asked for; ``wait`` gives the oldest."""

    exceptions = SimpleNamespace(RayTaskError=ZeroDivisionError, RayError=ZeroDivisionError)

    def wait(self, calls: list[Callable[[], Any]], num_returns: int, timeout: float | None) -> Any:
        return calls[:1], calls[1:]

    def get(self, call: Callable[[], Any]) -> Any:
        return call()


def actor(header: RunHeader) -> Any:
    """A worker that loads nothing."""
    result: Any = SimpleNamespace(sequences={"tokens": [2, 3]})
    loaded = LoadedModels(header, None, 1.0, False, "")  # pyright: ignore[reportArgumentType]

    def remote(answer: Any) -> Any:
        return SimpleNamespace(remote=lambda *_: lambda: answer)

    return SimpleNamespace(
        __ray_ready__=remote(True), describe=remote(loaded), run=remote(WorkerResult(header, result, 4096))
    )


def engine_of(*headers: RunHeader) -> RayEngine:
    return RayEngine(
        ray=StandInRay(),  # pyright: ignore[reportArgumentType]
        job=MeasureJob(),
        actors=[actor(header) for header in headers],
        tokenizer=None,
        reporter=NullProgressReporter(),
        unknown_columns={},
    )


def test_every_shard_is_scored_once_and_few_are_read_ahead() -> None:
    read: list[int] = []

    def shards() -> Any:
        for index in range(9):
            read.append(index)
            yield Shard(index=index)

    scored: list[int] = []
    for shard, _ in engine_of(HEADER, HEADER).results(shards()):
        scored.append(shard.index)
        assert len(read) - len(scored) < 4, "two workers with two shards each"
    assert sorted(scored) == list(range(9))


@pytest.mark.parametrize(
    "change", [{"fingerprints": {"policy": "q"}}, {"environment": {"the version of torch": "1"}}]
)
def test_a_worker_with_other_weights_or_versions_gets_no_shard(change: dict[str, Any]) -> None:
    with pytest.raises(ClusterError, match="measure different things"):
        list(engine_of(HEADER, replace(HEADER, **change)).results(iter([Shard(index=0)])))


def test_a_worker_without_room_is_refused_and_memory_counts() -> None:
    job = MeasureJob(engine="ray", resources_per_worker="cpu=2,memory=1e9")
    assert reserved(job, has_gpus=True) == {"CPU": 2.0, "memory": 1e9}
    assert reserved(MeasureJob(engine="ray"), has_gpus=True) == {"CPU": 1.0, "GPU": 1.0}
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "memory": 0.5e9}}]
    with pytest.raises(ClusterError, match=r"no node .* has CPU=2,memory=1e"):
        start_actors(SimpleNamespace(nodes=lambda: nodes), job, None, (), print)  # pyright: ignore[reportArgumentType]


@pytest.mark.peers("ray")
def test_an_address_at_which_nothing_answers_is_refused_at_once() -> None:
    with (
        pytest.raises(ClusterError, match=r"127\.0\.0\.1:9"),
        connected_cluster(MeasureJob(engine="ray", address="127.0.0.1:9")),
    ):
        pass
