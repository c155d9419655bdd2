"""Shards scored by the workers of a Ray cluster: actors with both models, which Ray starts again if they are lost.

The process that was started, the driver, reads the source, hands out shards, and alone writes.
"""

import logging
import math
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from kleash.engines import Engine, LocalEngine, Shard, ShardResult
from kleash.engines.base import EngineTraits
from kleash.errors import CannotRunError, ClusterError, summarise_error
from kleash.extras import import_extra, suppress_library_output
from kleash.jobs import MeasureJob
from kleash.jobs.option_groups import WorkerOptions
from kleash.linear import Head
from kleash.measuring.largest_drift import NUM_ALTERNATIVES
from kleash.measuring.model_pair import (
    PACKAGES,
    checkpoints_of,
    fingerprint_of_tokenizer,
    finished_cache,
    header_of,
    load_models,
)
from kleash.measuring.progress import ProgressReporter
from kleash.models import Model, Pair, TokenSequence
from kleash.models.scoring import RoundingKind
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
PROBE_S = 4.0
"""Seconds within which the address of a cluster must accept a connection."""
CLIENT_PORT = 10001
"""The port of ``ray://host``."""
RESUME = "what is finished is on disk: run again with --resume"


class LoadedModels(NamedTuple):
    """What a worker says of the models that it has loaded."""

    header: RunHeader
    """That of a run with these models, but for its source: equal on all workers."""
    pair: Pair
    """Without networks, heads and tokenizers, which stay with the worker."""
    traits: EngineTraits


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
        """The engine with its models, loaded at the first use."""
        with suppress(OSError):
            os.chdir(self._folder)
        with watching_files():  # by the engine, as long as it lives
            return LocalEngine(pair=load_models(self._job, None), job=self._job, top=NUM_ALTERNATIVES)

    @cached_property
    def _header(self) -> RunHeader:
        return header_of(self._job, self._engine.pair, "")

    def describe(self) -> LoadedModels:
        """Load the models, and describe them."""
        return LoadedModels(self._header, without_networks(self._engine.pair), self._engine.traits)

    def run(self, shard: Shard) -> tuple[RunHeader, ShardResult]:
        """Score a shard; raises KleashError as ``LocalEngine.run``."""
        return self._header, self._engine.run(shard)

    def rounding_columns(self, kind: RoundingKind, sequences: Sequence[TokenSequence]) -> Any:
        """As ``LocalEngine.rounding_columns``."""
        return self._engine.rounding_columns(kind, sequences)


@dataclass(kw_only=True)
class RayEngine(Engine):
    """The engine of a Ray cluster: both models in each of its workers, and none in this process."""

    ray: ModuleType
    actors: Sequence[Any]
    loaded: LoadedModels
    """What the first worker says that has loaded the models."""
    pair: Pair
    """Policy and reference, described without their networks, with the tokenizer of this process."""
    reporter: ProgressReporter

    @property
    def traits(self) -> EngineTraits:
        """The traits of a worker's engine."""
        return self.loaded.traits

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
            (reference,), _ = self.ray.wait(list(calls), num_returns=1)
            actor, shard = calls.pop(reference)
            header, *answer = _get(self.ray, reference)
            _require_same(self.loaded.header, header, "on another worker")
            places.extend([actor] * (IN_FLIGHT if shard is None else 1))
            if shard is not None:
                tokens = answer[0].sequences["tokens"]
                self.reporter.add_scored(len(tokens), sum(tokens))
                yield shard, answer[0]

    def run(self, shard: Shard) -> ShardResult:
        """Run one shard in any worker. A run uses ``results``."""
        return next(self.results(iter([shard])))[1]

    def rounding_columns(self, kind: RoundingKind, sequences: Sequence[TokenSequence]) -> Any:
        """Token columns of the reference compared with itself, of the first worker."""
        return _get(self.ray, self.actors[0].rounding_columns.remote(kind, list(sequences)))


def _require_same(first: RunHeader, other: RunHeader, where: str) -> None:
    """Raise ClusterError, naming what differs, unless two headers are of one run."""
    if differences := first.differences(other, now=where):
        raise ClusterError(
            f"the workers measure different things: {'; '.join(differences)}; all nodes need the same versions and "
            "files"
        )


def _get(ray: ModuleType, call: Any) -> Any:
    """The result of a finished or running call.

    Raises:
        ClusterError: if its worker is lost for good.
        Exception: what the worker raised.
    """
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise
    except ray.exceptions.RayError as error:
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
    stored = finished_cache(job)
    if job.reference_cache is not None and stored is None:
        raise CannotRunError(
            f"--reference-cache {job.reference_cache} would be filled by several processes; make it with kleash cache "
            "first, or leave it out"
        )
    checkpoints = checkpoints_of(job, stored)
    with suppress_library_output():
        stored_tokenizer = None if stored is None else stored.tokenizer(job.trust_remote_code)
        tokenizers, _ = load_tokenizers(checkpoints, job.trust_remote_code, job.tokenizer, stored_tokenizer)
    tokenizer = tokenizers["policy"]
    with connected_cluster(job) as ray:
        actor: Any = ray.remote(max_restarts=MAX_RESTARTS, max_task_retries=MAX_RETRIES)(ShardWorker)
        actors = start_actors(ray, job, actor, (job, str(Path.cwd())))
        try:
            (first,), _ = ray.wait([each.describe.remote() for each in actors], num_returns=1)
            loaded: LoadedModels = _get(ray, first)
            fingerprints = {role: checkpoint.fingerprint() for role, checkpoint in checkpoints.items()}
            fingerprints |= fingerprint_of_tokenizer(job, tokenizer)
            versions = {f"the version of {name}": version(name) for name in PACKAGES}
            own_header = replace(
                loaded.header,
                kleash=__version__,
                fingerprints={**loaded.header.fingerprints, **fingerprints},
                environment={**loaded.header.environment, **versions},
            )
            _require_same(own_header, loaded.header, "on a worker")
            policy, reference = (
                replace(model, tokenizer=tokenizer) for model in (loaded.pair.policy, loaded.pair.reference)
            )
            yield RayEngine(
                ray=ray,
                actors=actors,
                loaded=loaded,
                pair=replace(loaded.pair, policy=policy, reference=reference, tokenizer=tokenizer),
                reporter=reporter,
            )
        finally:
            for worker in actors:
                with suppress(Exception):  # of a lost cluster, which would hide the first error
                    ray.kill(worker)


def without_networks(pair: Pair) -> Pair:
    """The description of a pair: all that can be said of it without weights and tokenizers."""
    names = {id(pair.policy.network): "the network of the policy"}
    names.setdefault(id(pair.reference.network), "the network of the reference")

    def described(model: Model) -> Model:
        return replace(
            model,
            head=Head(weight=None),
            padding=None,
            checkpoint=None,
            tokenizer=None,
            network=names[id(model.network)],
            backbone=None,
            adapters=None,
            stored=None,
        )

    return replace(pair, policy=described(pair.policy), reference=described(pair.reference), tokenizer=None)


@contextmanager
def connected_cluster(job: WorkerOptions) -> Generator[ModuleType]:
    """Context in which this process is connected to the Ray cluster of a job; yields the module ``ray``.

    A cluster that this process is connected to already is used, and stays connected. Without an address, and without
    the environment variable RAY_ADDRESS, a cluster of this machine alone is started, which ends with the context.

    Raises:
        MissingExtraError: if ray is not installed.
        ClusterError: if the cluster cannot be reached or started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = import_extra("ray", "ray")
    if ray.is_initialized():
        yield ray
        return
    address = job.address or os.environ.get("RAY_ADDRESS") or "local"
    settings: dict[str, Any] = {}
    if address == "local":
        cpus = (job.workers or 0) * job.reserved(has_gpus=False).get("CPU", 0.0)
        settings = {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, math.ceil(cpus))}
    with redirect_stdout(sys.stderr):  # Ray prints what its cluster reports, and a run may print JSON
        try:
            _require_answer(address)
            with _keeping_handler(signal.SIGTERM):
                ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, **settings)
        except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
            raise ClusterError(
                f"the Ray cluster {address} cannot be used: {summarise_error(error)}"
            ) from error
        try:
            yield ray
        finally:
            with suppress(Exception):  # of a lost cluster, which would hide the first error
                ray.shutdown()


def _require_answer(address: str) -> None:
    """See that something answers at ``host:port`` or ``ray://host:port``: Ray itself ends the process after minutes.

    Raises:
        OSError: if nothing does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit() or address.startswith("ray://"):
        place = (host, int(port)) if port.isdigit() else (port, CLIENT_PORT)
        socket.create_connection(place, timeout=PROBE_S).close()


@contextmanager
def _keeping_handler(number: int) -> Generator[None]:
    """Context after which a signal has the handler that it had before, if that was set from Python."""
    handler = signal.getsignal(number)
    yield
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)


def start_actors(ray: ModuleType, job: WorkerOptions, actor: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """Ask the cluster for the workers of a job; those without room for now join when there is some.

    Args:
        ray: the connected module.
        job: the options of the workers.
        actor: their class, with Ray's options of restarts.
        arguments: of the class.

    Raises:
        ClusterError: if no node has room for a worker.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    amounts = job.reserved(has_gpus=any(node.get("GPU", 0) for node in nodes))
    places = sum(
        min((int(node.get(name, 0.0) / amount) for name, amount in amounts.items()), default=1)
        for node in nodes
    )
    if not places:
        requested_amounts = ",".join(f"{name}={amount:g}" for name, amount in amounts.items())
        raise ClusterError(
            f"no node of the Ray cluster has {requested_amounts} for a worker; change --resources-per-worker, or add "
            "a node"
        )
    custom_resources = {name: x for name, x in amounts.items() if name not in ("CPU", "GPU", "memory")}
    options: dict[str, Any] = {
        "num_cpus": amounts.get("CPU", 0),
        "num_gpus": amounts.get("GPU", 0),
        "resources": custom_resources,
        "memory": int(amounts["memory"]) if "memory" in amounts else None,
    }
    return [actor.options(**options).remote(*arguments) for _ in range(job.workers or places)]
