"""A worker: an actor of Ray, which loads a pair of models and scores one shard after the other."""

import gc
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from kleash.engines.base import Shard, ShardResult
from kleash.engines.local import LocalEngine
from kleash.errors import CannotRunError
from kleash.linear import Head
from kleash.models import Model, Pair, TokenSequence
from kleash.version import __version__

T = TypeVar("T")
OUT_OF_MEMORY = (
    *("can't allocate memory", "out of memory", "cannot allocate memory", "bad_alloc"),
    *("could not create a primitive", "could not create a memory object", "could not execute a primitive"),
)
"""What errors of torch and, in the second row, of oneDNN say, in lower case, where an allocation failed.

oneDNN says no more than that a step was not made. What fails for another reason fails with smaller batches, too.
"""


class WorkerCode(NamedTuple):
    """The functions that a worker runs. They are sent by name, so each is a function of an installed module."""

    make_engine: Callable[[], LocalEngine]
    """Loads the models, on the worker's node."""
    describe: Callable[[LocalEngine], Mapping[str, Any]]
    """What must be the same on all workers and the driver, by names in words."""
    pack: Callable[[Shard, ShardResult, Any], Any]
    """Makes of a shard's result, and of the hint that came with the shard, what is sent to the driver."""


@dataclass(frozen=True, kw_only=True)
class LoadedModels:
    """What a worker says of the models that it has loaded."""

    process: int
    """Its process id."""
    description: Mapping[str, Any]
    pair: Pair
    """Without networks, heads and tokenizers, which stay with the worker."""
    temperature: float
    float32_gap_reloads: bool
    unknown_columns: Mapping[str, str]
    no_noise_floor: str


class ScoredPart(NamedTuple):
    """A shard as a worker returns it."""

    packed: Any
    tokens: int
    seconds: float
    batch_tokens: int
    """Tokens of a batch: fewer than the job's where the worker ran out of memory with that many."""


class ShardWorker:
    """The actor. Its methods run one at a time, in the order in which they are called."""

    def __init__(self, number: int) -> None:
        """Begin without models.

        Args:
            number: of the worker, from 0.
        """
        self._number = number
        self._engine: LocalEngine | None = None
        self._code: WorkerCode | None = None

    def versions(self, packages: Sequence[str]) -> tuple[str, dict[str, str]]:
        """The node, and the versions of kleash and some packages there; called before anything else is sent."""
        return platform.node(), installed_versions(packages)

    def load(self, code: WorkerCode) -> LoadedModels:
        """Load the models.

        Raises:
            KleashError: if they cannot be loaded.
        """
        self._code, self._engine = code, code.make_engine()
        engine = self._engine
        return LoadedModels(
            process=os.getpid(),
            description=code.describe(engine),
            pair=without_networks(engine.pair),
            temperature=engine.temperature,
            float32_gap_reloads=engine.float32_gap_reloads,
            unknown_columns=dict(engine.unknown_columns),
            no_noise_floor=engine.no_noise_floor,
        )

    def score(self, shard: Shard, batch_tokens: int, hint: Any) -> ScoredPart:
        """Score a shard; where memory runs out, again with batches of half the size.

        Raises:
            KleashError: as ``LocalEngine.run``.
            CannotRunError: if there is not enough memory for a batch of one sequence.
        """
        assert self._code is not None
        start, pack = time.perf_counter(), self._code.pack

        def run(engine: LocalEngine) -> tuple[Any, int]:
            result = engine.run(shard)
            return pack(shard, result, hint), len(result.tokens["token_id"])

        (packed, tokens), batch_tokens = run_within_memory(self._loaded, shard, batch_tokens, run)
        return ScoredPart(packed, tokens, time.perf_counter() - start, batch_tokens)

    def run(self, shard: Shard) -> ShardResult:
        """The result of a shard, as the engine returns it."""
        return self._loaded.run(shard)

    def noise_floor_columns(self, sequences: Sequence[TokenSequence]) -> Mapping[str, np.ndarray] | None:
        """As the engine's."""
        return self._loaded.noise_floor_columns(sequences)

    def float32_gap(self, sequences: Sequence[TokenSequence]) -> Mapping[str, np.ndarray] | None:
        """As the engine's."""
        return self._loaded.float32_gap(sequences)

    @property
    def _loaded(self) -> LocalEngine:
        if self._engine is None:
            raise CannotRunError(f"worker {self._number} has no models yet")
        return self._engine


def run_within_memory(
    engine: LocalEngine, shard: Shard, batch_tokens: int, run: Callable[[LocalEngine], T]
) -> tuple[T, int]:
    """Score a shard with batches of at most ``batch_tokens``, and with half of that whenever memory runs out.

    Args:
        engine: of the worker.
        shard: the shard.
        batch_tokens: tokens of a batch.
        run: scores the shard with an engine of smaller batches.

    Returns:
        The result, and the number of tokens in a batch that it was made with.

    Raises:
        CannotRunError: if memory runs out although each batch is a single sequence.
    """
    longest = longest_sequence(engine, shard)
    while True:
        try:
            return run(replace(engine, job=replace(engine.job, batch_tokens=batch_tokens))), batch_tokens
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if batch_tokens <= longest:
                reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
                raise CannotRunError(
                    f"a sequence of {longest} tokens in shard {shard.index} does not fit into the memory of worker "
                    f"{platform.node()} by itself ({reason}); reserve more for a worker with "
                    "--resources-per-worker, or choose a smaller dtype or --max-new-tokens"
                ) from error
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        batch_tokens //= 2


def longest_sequence(engine: LocalEngine, shard: Shard) -> int:
    """An upper bound on the tokens of a sequence of a shard."""
    lengths = [sequence.num_input_tokens for sequence in shard.sequences]
    lengths += [len(prompt.token_ids) + engine.job.max_new_tokens for prompt in shard.prompts]
    return max(lengths, default=1)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a CPU or a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(words in str(error).lower() for words in OUT_OF_MEMORY)


def without_networks(pair: Pair) -> Pair:
    """The description of a pair: all that can be said of it without weights and tokenizers."""
    names = {id(pair.policy.network): "the network of the policy"}
    names.setdefault(id(pair.reference.network), "the network of the reference")

    def described(model: Model) -> Model:
        return replace(
            model,
            head=Head(weight=None),
            padding=None,
            tokenizer=None,
            network=names[id(model.network)],
            backbone=None,
            adapters=None,
            stored=None,
        )

    return replace(pair, policy=described(pair.policy), reference=described(pair.reference), tokenizer=None)


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions of kleash and of some packages, by names in words."""
    versions = {"the version of kleash": __version__}
    for package in packages:
        try:
            versions[f"the version of {package}"] = version(package)
        except PackageNotFoundError:
            versions[f"the version of {package}"] = "none"
    return versions
