"""Batches are halved when memory runs out, down to one sequence; other errors are raised as they are."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kleash.engines import Shard
from kleash.engines.ray.shard_worker import run_within_memory, without_networks
from kleash.errors import CannotRunError, NonFiniteError
from kleash.models import Prompt, load_pair
from kleash.records import MeasureJob

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
    return run_within_memory(engine, SHARD, batch_tokens, lambda smaller: smaller.run(SHARD))  # pyright: ignore[reportArgumentType]


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
        r"^a sequence of 16 tokens in shard 4 does not fit into the memory of worker .* by itself \(\[enforce"
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
    import pickle

    pair = load_pair("shipped:policy", "shipped:reference")
    described = pickle.loads(pickle.dumps(without_networks(pair)))
    assert not described.is_one_model and described.policy.record() == pair.policy.record()
    assert described.context_length == pair.context_length and described.notes == pair.notes
    same = SimpleNamespace(**{**vars(pair), "reference": pair.policy})
    from kleash.models import Pair

    assert pickle.loads(pickle.dumps(without_networks(Pair(**vars(same))))).is_one_model
    assert len(pickle.dumps(without_networks(pair))) < 10_000
