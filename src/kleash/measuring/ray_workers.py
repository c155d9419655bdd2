"""Shards scored by the workers of a Ray cluster: actors with both models, which Ray starts again if they are lost.

The process that was started, the driver, reads the source, hands out shards, and alone writes.
"""

import gc
import os
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from kleash.checkpoints.resolution import find_checkpoint
from kleash.engines import LocalEngine, Shard, ShardResult
from kleash.errors import CannotRunError, ClusterError, summarise_error
from kleash.extras import suppress_library_output
from kleash.jobs import MeasureJob
from kleash.linear import Head
from kleash.measuring.largest_drift import NUM_ALTERNATIVES
from kleash.measuring.model_pair import finished_cache, load_models
from kleash.measuring.progress import ProgressReporter
from kleash.measuring.ray_cluster import connected_cluster, start_actors
from kleash.measuring.run_identity import PACKAGES, header_of
from kleash.models import Model, Pair, StoredReference, TokenSequence
from kleash.models.tokenizers import load_tokenizers
from kleash.store.file_hashes import watching_files
from kleash.store.job_folder import RunHeader
from kleash.version import __version__

MAX_RESTARTS = 10
"""How often Ray starts a worker again."""
MAX_RETRIES = 3
"""How often Ray gives a shard to its worker again, after that was lost with it."""
IN_FLIGHT = 2
"""Shards that a worker has: one that it scores, and the next."""
START_S = 600.0
"""Seconds for which a run without workers waits for the cluster to start one."""
RESUME = "finished shards are on disk: run again with --resume"
OUT_OF_MEMORY = (
    *("can't allocate memory", "out of memory", "cannot allocate memory", "bad_alloc"),
    *("could not create a primitive", "could not create a memory object", "could not execute a primitive"),
)
"""What errors of torch and, in the second row, of oneDNN say, in lower case, where an allocation failed."""


class LoadedModels(NamedTuple):
    """What a worker says of the models that it has loaded."""

    header: RunHeader
    """That of a run with these models, but for its source: equal on all workers."""
    pair: Pair
    """Without networks, heads and tokenizers, which stay with the worker."""
    temperature: float
    float32_gap_reloads: bool
    no_noise_floor: str


class WorkerResult(NamedTuple):
    """A shard as a worker returns it."""

    header: RunHeader
    result: ShardResult
    batch_tokens: int
    """Tokens of a batch: fewer than the job's where the worker ran out of memory with that many."""


class ShardWorker:
    """The actor. It loads the models on first use, so also after Ray has started it again."""

    def __init__(self, job: MeasureJob, folder: str) -> None:
        """Begin without models.

        Args:
            job: the job.
            folder: the driver's, in which relative names of models are looked up if it is on this machine as well.
        """
        self._job, self._folder = job, folder

    @cached_property
    def _engine(self) -> LocalEngine:
        with suppress(OSError):
            os.chdir(self._folder)
        with watching_files():  # by the engine, as long as it lives
            return LocalEngine(pair=load_models(self._job, None), job=self._job, top=NUM_ALTERNATIVES)

    @cached_property
    def _header(self) -> RunHeader:
        return header_of(self._job, self._engine.pair, "")

    def describe(self) -> LoadedModels:
        """Load the models, and describe them."""
        engine = self._engine
        return LoadedModels(
            header=self._header,
            pair=without_networks(engine.pair),
            temperature=engine.temperature,
            float32_gap_reloads=engine.float32_gap_reloads,
            no_noise_floor=engine.no_noise_floor,
        )

    def run(self, shard: Shard) -> WorkerResult:
        """Score a shard; where memory runs out, again with batches of half the size.

        Raises:
            KleashError: as ``LocalEngine.run``.
            CannotRunError: if there is not enough memory for a batch of one sequence.
        """
        return WorkerResult(self._header, *run_within_memory(self._engine, shard))

    def call(self, method: str, sequences: Sequence[TokenSequence]) -> Any:
        """The result of a method of the engine."""
        return getattr(self._engine, method)(sequences)


@dataclass(kw_only=True)
class RayEngine:
    """The engine of a Ray cluster: both models in each of its workers, and none in this process."""

    ray: ModuleType
    job: MeasureJob
    actors: Sequence[Any]
    tokenizer: Any
    """The policy's, loaded in this process."""
    reporter: ProgressReporter
    unknown_columns: Mapping[str, str]
    """None: both models' distributions are known."""

    @cached_property
    def loaded(self) -> LoadedModels:
        """What the first worker says that has loaded the models.

        Raises:
            ClusterError: if none starts.
        """
        processes = [actor.__ray_ready__.remote() for actor in self.actors]
        if self._first_finished(processes, START_S) is None:
            raise ClusterError(
                f"the Ray cluster has started no worker within {START_S:.0f} s; see ray status, and ask for less with "
                "--workers or --resources-per-worker"
            )
        return self._get(self._first_finished([actor.describe.remote() for actor in self.actors]))

    @property
    def pair(self) -> Pair:
        """Policy and reference, described without their networks, with the tokenizer of this process."""
        pair = self.loaded.pair
        policy, reference = (
            replace(model, tokenizer=self.tokenizer) for model in (pair.policy, pair.reference)
        )
        return replace(pair, policy=policy, reference=reference, tokenizer=self.tokenizer)

    @property
    def temperature(self) -> float:
        """The temperature at which both models are scored."""
        return self.loaded.temperature

    @property
    def float32_gap_reloads(self) -> bool:
        """Whether ``float32_gap`` loads a model a second time, in a worker."""
        return self.loaded.float32_gap_reloads

    @property
    def no_noise_floor(self) -> str:
        """The reason why ``noise_floor_columns`` is None."""
        return self.loaded.no_noise_floor

    def results(self, shards: Iterator[Shard]) -> Iterator[tuple[Shard, ShardResult]]:
        """Score shards, and iterate over them with their results, in the order in which they are finished.

        Args:
            shards: taken one by one, when a worker has room.

        Raises:
            ClusterError: if a worker is lost for good, or differs from the first.
            Exception: what a worker raised.
        """
        calls: dict[Any, tuple[Any, Shard | None]] = {
            actor.describe.remote(): (actor, None) for actor in self.actors
        }
        places, is_read = deque[Any](), False
        while True:
            while places and not is_read:
                shard = next(shards, None)
                is_read = shard is None
                if shard is not None:
                    actor = places.popleft()
                    calls[actor.run.remote(shard)] = (actor, shard)
            if is_read and not any(shard for _, shard in calls.values()):
                return
            reference = self._first_finished(list(calls))
            actor, shard = calls.pop(reference)
            answer = self._get(reference)
            self._require_same(self.loaded.header, answer.header, "on another worker")
            places.extend([actor] * (IN_FLIGHT if shard is None else 1))
            if shard is not None:
                yield shard, self._counted(shard, answer)

    def _counted(self, shard: Shard, answer: WorkerResult) -> ShardResult:
        """The result of a shard, which is reported."""
        self.reporter.add_scored(
            len(answer.result.sequences["tokens"]), sum(answer.result.sequences["tokens"])
        )
        if answer.batch_tokens < self.job.batch_tokens:
            self.reporter.note(
                f"shard {shard.index} was scored in batches of {answer.batch_tokens} tokens, since memory ran out"
            )
        return answer.result

    def run(self, shard: Shard) -> ShardResult:
        """Run one shard in any worker. A run uses ``results``."""
        return next(self.results(iter([shard])))[1]

    def noise_floor_columns(self, sequences: Sequence[TokenSequence]) -> Mapping[str, np.ndarray] | None:
        """Token columns of the reference compared with itself in another batch layout, of the first worker."""
        return self._call("noise_floor_columns", sequences)

    def float32_gap(self, sequences: Sequence[TokenSequence]) -> Mapping[str, np.ndarray] | None:
        """Token columns of the reference compared with itself in float32, of the first worker."""
        return self._call("float32_gap", sequences)

    def _call(self, method: str, sequences: Sequence[TokenSequence]) -> Any:
        return self._get(self.actors[0].call.remote(method, list(sequences)))

    def require_same_as_here(self) -> None:
        """Check that the workers have the versions and the files of this process.

        Raises:
            ClusterError: naming what differs.
            ModelError: if a model's files are not here.
        """
        worker_header, job = self.loaded.header, self.job
        fingerprints = {"policy": find_checkpoint(job.policy, job.revision_policy).fingerprint()}
        if finished_cache(job) is None:
            reference = find_checkpoint(job.reference, job.revision_reference)
            fingerprints["reference"] = reference.fingerprint()
        versions = {f"the version of {name}": version(name) for name in PACKAGES}
        own_header = replace(
            worker_header,
            kleash=__version__,
            fingerprints={**worker_header.fingerprints, **fingerprints},
            environment={**worker_header.environment, **versions},
        )
        self._require_same(own_header, worker_header, "on a worker")

    def _require_same(self, first: RunHeader, other: RunHeader, where: str) -> None:
        if differences := first.differences(other, now=where):
            raise ClusterError(
                f"the workers measure different things: {'; '.join(differences)}; all nodes need the same versions "
                "and files"
            )

    def _first_finished(self, references: list[Any], timeout: float | None = None) -> Any:
        """The first of some calls that is finished; None if none is in time."""
        return next(iter(self.ray.wait(references, num_returns=1, timeout=timeout)[0]), None)

    def _get(self, reference: Any) -> Any:
        """The result of a finished or running call.

        Raises:
            ClusterError: if its worker is lost for good.
            Exception: what the worker raised.
        """
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from error
            raise
        except self.ray.exceptions.RayError as error:
            raise ClusterError(f"a worker was lost for good: {summarise_error(error)}; {RESUME}") from error


@contextmanager
def ray_engine(job: MeasureJob, reporter: ProgressReporter) -> Generator[RayEngine]:
    """Context in which the workers of a job are running; the driver loads tokenizer and hashes, and no weights.

    Raises:
        ClusterError: if the cluster cannot be reached or has no room, or a worker differs from this process.
        ModelError: if a model's files are not here.
        CannotRunError: if the run would fill a reference cache.
        MissingExtraError: if ray is not installed.
    """
    if job.reference_cache is not None and finished_cache(job) is None:
        raise CannotRunError(
            f"--reference-cache {job.reference_cache} would be filled by several processes; make it with kleash cache "
            "first, or leave it out"
        )
    tokenizer = policy_tokenizer(job)
    with connected_cluster(job) as ray:
        actor: Any = ray.remote(max_restarts=MAX_RESTARTS, max_task_retries=MAX_RETRIES)(ShardWorker)
        actors = start_actors(ray, job, actor, (job, str(Path.cwd())), reporter.note)
        engine = RayEngine(
            ray=ray, job=job, actors=actors, tokenizer=tokenizer, reporter=reporter, unknown_columns={}
        )
        try:
            engine.require_same_as_here()
            yield engine
        finally:
            for worker in actors:
                with suppress(Exception):  # of a lost cluster, which would hide the first error
                    ray.kill(worker)


def policy_tokenizer(job: MeasureJob) -> Any:
    """The tokenizer by which the driver reads the source: the policy's, as a worker loads it."""
    checkpoints, folder = {"policy": find_checkpoint(job.policy, job.revision_policy)}, finished_cache(job)
    if folder is None:
        checkpoints["reference"] = find_checkpoint(job.reference, job.revision_reference)
    with suppress_library_output():
        stored = None if folder is None else StoredReference(folder).tokenizer(job.trust_remote_code)
        tokenizers, _ = load_tokenizers(checkpoints, job.trust_remote_code, job.tokenizer, stored)
    return tokenizers["policy"]


def run_within_memory(engine: LocalEngine, shard: Shard) -> tuple[ShardResult, int]:
    """Score a shard, with batches of half the size whenever memory runs out.

    Returns:
        The result, and the number of tokens in a batch that it was made with.

    Raises:
        CannotRunError: if memory runs out although each batch is a single sequence.
    """
    batch_tokens = engine.job.batch_tokens
    lengths = [sequence.num_input_tokens for sequence in shard.sequences]
    lengths += [len(prompt.token_ids) + engine.job.max_new_tokens for prompt in shard.prompts]
    while True:
        try:
            job = replace(engine.job, batch_tokens=batch_tokens)
            return replace(engine, job=job).run(shard), batch_tokens
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if batch_tokens <= max(lengths):
                raise CannotRunError(
                    f"a sequence of {max(lengths)} tokens in shard {shard.index} does not fit into the memory of a "
                    f"worker by itself ({summarise_error(error)}); reserve more with --resources-per-worker"
                ) from error
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        batch_tokens //= 2


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a CPU or a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
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
