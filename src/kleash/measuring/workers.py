"""The workers of a measurement on a Ray cluster: what they load, and what must be the same on all of them."""

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from kleash.engines import LocalEngine
from kleash.engines.ray import (
    RayEngine,
    WorkerCode,
    WorkerPool,
    WorkerSpec,
    connected_cluster,
    installed_versions,
    requested_workers,
)
from kleash.extras import suppress_library_output
from kleash.jobs import MeasureJob
from kleash.jobs.option_groups import WorkerOptions
from kleash.measuring.largest_drift import NUM_ALTERNATIVES
from kleash.measuring.model_pair import finished_cache, load_models
from kleash.measuring.remote_shards import pack_shard
from kleash.measuring.run_identity import PACKAGES
from kleash.models import StoredReference
from kleash.models.checkpoints.resolution import GENERATION_CONFIG, find_checkpoint
from kleash.models.pair_tokenizers import load_tokenizers
from kleash.store.file_hashes import watching_files


@contextmanager
def kept_cluster(job: WorkerOptions) -> Generator[None]:
    """Context in which this process stays connected to the Ray cluster of a job, over several runs.

    Does nothing unless the job's engine is ray.

    Raises:
        ClusterError: if the cluster cannot be reached.
        MissingExtraError: if ray is not installed.
    """
    if job.engine != "ray":
        yield
        return
    with connected_cluster(job.address, workers=job.workers, resources=job.resources_per_worker):
        yield


@contextmanager
def ray_engine(job: MeasureJob, note: Callable[[str], None]) -> Generator[RayEngine]:
    """Context in which the workers of a job are running; the driver loads tokenizer and hashes, and no weights.

    Raises:
        ClusterError: if the cluster cannot be reached or has no room, or a worker differs from this process.
        ModelError: if a model's files are not here.
        MissingExtraError: if ray is not installed.
    """
    expected = expected_description(job)
    tokenizer = policy_tokenizer(job)
    with connected_cluster(job.address, workers=job.workers, resources=job.resources_per_worker) as ray:
        count, room, resources = requested_workers(ray, job.workers, job.resources_per_worker, note)
        spec = WorkerSpec(
            count=count,
            room=room,
            resources=resources,
            code=WorkerCode(
                partial(worker_engine, job, str(Path.cwd())),
                describe_models,
                partial(pack_shard, column=job.headline),
            ),
            batch_tokens=job.batch_tokens,
            versions=installed_versions(PACKAGES),
            packages=PACKAGES,
            expected=expected,
        )
        pool = WorkerPool(ray, spec, note)
        try:
            yield RayEngine(pool=pool, loaded=pool.wait_for_models(), tokenizer=tokenizer)
        finally:
            pool.close()


def policy_tokenizer(job: MeasureJob) -> Any:
    """The tokenizer by which the driver reads the source: the policy's, as a worker loads it."""
    checkpoints, folder = {"policy": find_checkpoint(job.policy, job.revision_policy)}, finished_cache(job)
    if folder is None:
        checkpoints["reference"] = find_checkpoint(job.reference, job.revision_reference)
    with suppress_library_output():
        stored = None if folder is None else StoredReference(folder).tokenizer(job.trust_remote_code)
        tokenizers, _ = load_tokenizers(checkpoints, job.trust_remote_code, job.tokenizer, stored)
    return tokenizers["policy"]


def worker_engine(job: MeasureJob, folder: str) -> LocalEngine:
    """Load the models of a job in a worker.

    Args:
        job: the job.
        folder: the driver's working folder, in which relative names of models are looked up if it is here as well.
    """
    with suppress(OSError):
        os.chdir(folder)
    with watching_files():  # by the engine, as long as it lives
        return LocalEngine(pair=load_models(job, None), job=job, top=NUM_ALTERNATIVES)


def describe_models(engine: LocalEngine) -> Mapping[str, Any]:
    """What must be the same on all workers: values by the words that an error calls them by."""
    pair = engine.pair
    description: dict[str, Any] = {}
    for model in (pair.policy, pair.reference):
        description[fingerprint_name(model.role)] = model.fingerprint
        description[f"the {model.role}'s dtype"] = str(model.dtype).removeprefix("torch.")
        description[f"the kind of device of the {model.role}"] = model.device.type
    description["the reference"] = "loaded" if pair.reference.stored is None else "read from its cache"
    return description | generation_fingerprint(engine.job)


def expected_description(job: MeasureJob) -> dict[str, Any]:
    """The entries of ``describe_models`` that the driver knows without loading a model.

    Raises:
        ModelError: if a model's files are not here.
    """
    policy = find_checkpoint(job.policy, job.revision_policy)
    expected = {fingerprint_name("policy"): policy.fingerprint()} | generation_fingerprint(job)
    if finished_cache(job) is not None:
        return expected | {"the reference": "read from its cache"}
    reference = find_checkpoint(job.reference, job.revision_reference)
    return expected | {fingerprint_name("reference"): reference.fingerprint(), "the reference": "loaded"}


def generation_fingerprint(job: MeasureJob) -> dict[str, str]:
    """The hash of the policy's generation_config.json, where the policy generates."""
    if job.source[0] != "prompts":
        return {}
    checkpoint = find_checkpoint(job.policy, job.revision_policy)
    return {f"the fingerprint of the policy's {GENERATION_CONFIG}": checkpoint.generation_fingerprint()}


def fingerprint_name(role: str) -> str:
    """The name of a model's hash in words, as a run's header has it."""
    return f"the fingerprint of the {role}'s weights and tokenizer"
