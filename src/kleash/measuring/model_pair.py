"""The pair of models of a measurement, both loaded or one stored or served, and the header that identifies its run."""

import os
import platform
import shlex
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch

from kleash.checkpoints.resolution import (
    GENERATION_CONFIG,
    Checkpoint,
    find_checkpoint,
    fingerprint_of,
    hash_tokenizer_files,
)
from kleash.engines import Engine, LocalEngine
from kleash.engines.base_logits import BaseLogits, BaseLogitsEngine, base_logits_beside
from kleash.engines.endpoints import (
    EndpointEngine,
    JSONClient,
    ServedModel,
    connect,
    find_model,
    served_model,
    server_root,
)
from kleash.jobs import MeasureJob
from kleash.jobs.option_groups import SHIPPED_POLICY, SHIPPED_REFERENCE, is_endpoint, is_gguf
from kleash.jobs.options import shared_options
from kleash.jobs.reading import ReadOptions
from kleash.launch_environment import local_rank, local_world_size
from kleash.measuring.progress import ProgressReporter
from kleash.measuring.shards import hash_source, source_sequences
from kleash.models import (
    Pair,
    ReferenceCache,
    StoredReference,
    TokenizerMismatchError,
    in_lockstep,
    load_beside,
)
from kleash.models.base_logits import open_base_logits
from kleash.models.cache.reference_cache import check_cache_folder
from kleash.models.keyed_draws import SAMPLER
from kleash.models.pair_loading import load_checkpoints
from kleash.models.tokenizers import compare_tokenizers, load_named_tokenizer
from kleash.sources.documents import resolve_window
from kleash.store.cache import CachedSource, cache_fingerprint
from kleash.store.job_folder import RunHeader
from kleash.store.locks import folder_lock
from kleash.version import __version__

PACKAGES = ("torch", "transformers", "numpy", "peft", "pyarrow")
"""Packages whose versions are recorded, and are the same in all processes of a run."""


def recorded_versions() -> dict[str, str]:
    """The versions of Python and of the packages that measure, as results record them."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def load_models(job: MeasureJob, source_sha256: str | None) -> Pair:
    """Load the policy and the reference of a job; a finished cache of its text or responses replaces the reference.

    Of two models of which one is behind a server, the other one is loaded, and the server is asked for a probe.

    Args:
        job: the job.
        source_sha256: the hash of the source, which the cache must cover; None if that is not to be checked.

    Raises:
        ModelError: if a model cannot be loaded, the two cannot be compared, or the cache is of another model.
        EndpointError: if a server cannot be reached, or gives no log-probabilities of prompts.
    """
    job = on_device_of_rank(job)
    try:
        return in_lockstep(_load_models(job, source_sha256))
    except TokenizerMismatchError as error:
        for role, default in (("reference", SHIPPED_REFERENCE), ("policy", SHIPPED_POLICY)):
            if getattr(job, role) == default:
                raise TokenizerMismatchError(
                    f"{error}; without --{role} it is {default}, the small model that ships with kleash: give "
                    f"--{role}"
                ) from error
        raise


def on_device_of_rank(job: MeasureJob) -> MeasureJob:
    """The job with a GPU for each of the processes that were started on this machine, where it names none."""
    is_named = job.device not in ("auto", "cuda") or job.device_map is not None
    if local_world_size() == 1 or is_named or not torch.cuda.is_available():
        return job
    return replace(job, device=f"cuda:{local_rank() % torch.cuda.device_count()}")


def checkpoints_of(job: MeasureJob, stored: StoredReference | None = None) -> dict[str, Checkpoint]:
    """The checkpoints of the models that a job loads, by role: not of one that is stored, or behind a server.

    Args:
        job: the job.
        stored: the cache that replaces the reference, from ``finished_cache``.

    Raises:
        ModelError: if one cannot be found.
    """
    other = "reference" if job.has_base_logits or stored is not None else job.endpoint_role
    return {
        role: find_checkpoint(getattr(job, role), getattr(job, f"revision_{role}"), role)
        for role in ("policy", "reference")
        if role != other
    }


def _load_models(job: MeasureJob, source_sha256: str | None) -> Pair:
    """The pair of a job, without advice about the shipped models.

    It is beside a server, beside base logits, beside a finished cache, or both models from their checkpoints.
    """
    if job.endpoint_role is not None:
        return load_beside_server(job, job.endpoint_role)
    if job.has_base_logits:
        return load_beside_base_logits(job)
    stored = finished_cache(job)
    if stored is None:
        return load_checkpoints(checkpoints_of(job), job)
    pair = load_beside(
        stored,
        job.policy,
        job.reference,
        revision_policy=job.revision_policy,
        revision_reference=job.revision_reference,
        loading=job,
    )
    if source_sha256 is not None:
        check_covered(job, pair, stored, source_sha256)
    return pair


def load_beside_base_logits(job: MeasureJob) -> Pair:
    """Load the policy of a job, and pair it with the reference of a file of base logits.

    Raises:
        SourceError: if the file is damaged.
        ModelError: if the policy cannot be loaded, or does not suit the file.
    """
    file = open_base_logits(Path(str(job.reference_cache)).expanduser())
    loaded = load_checkpoints(checkpoints_of(job), job)
    reference = base_logits_beside(loaded.policy, file, f"sha256:{hash_source(job)}")
    size, vocabulary = file.vocab_size, f"the {file.vocab_size} logits of the file"
    note = (
        f"the reference is the file of base logits {file.path}, of {file.chunks} chunks of {file.context} tokens: each "
        "log-probability is known to half a step of 16 bits, and where it is 16 nats or more below the largest, as an "
        "upper bound"
    )
    notes = (*loaded.notes, note)
    if loaded.policy.vocab_size > size:
        vocabulary = f"{vocabulary}, to which the policy is cut"
        notes += (
            f"the policy has {loaded.policy.vocab_size} logits and the file {size}; the policy is cut to them",
        )
    return Pair(
        policy=loaded.policy,
        reference=reference,
        tokenizer=loaded.tokenizer,
        notes=notes,
        vocabulary=vocabulary,
    )


def load_beside_server(job: MeasureJob, role: str) -> Pair:
    """Load the local model of a job whose ``role`` is behind a server, and pair it with the server's.

    Raises:
        EndpointError: if the server cannot be reached, or gives no log-probabilities of prompts.
        ModelError: if the local model cannot be loaded, or the tokenizers differ.
    """
    url, variable = getattr(job, role), f"KLEASH_{role.upper()}_API_KEY"
    api_key = os.environ.get(variable, "").strip() or None
    address = server_root(url, f"--{role}", api_key)
    client = JSONClient(
        url=address,
        subject=f"the {role}'s server {address}",
        key_variable=variable,
        api_key=api_key,
        timeout_seconds=job.endpoint_timeout,
        retries=job.endpoint_retries,
    )
    listed_model = find_model(client, getattr(job, f"{role}_model"))
    loaded = load_checkpoints(checkpoints_of(job), job)
    local, notes = loaded.policy, loaded.notes
    tokenizer = loaded.tokenizer
    if job.tokenizer is not None:
        tokenizer = load_named_tokenizer(job.tokenizer, job.trust_remote_code)
        notes += compare_tokenizers(tokenizer, loaded.tokenizer)
    endpoint = connect(
        client, listed_model, tokenizer=tokenizer, vocab_size=local.vocab_size, top=job.top_logprobs
    )
    note = (
        f"the {role} is {endpoint.probe.model} behind {address} ({endpoint.dialect.name}), which lists "
        f"{endpoint.probe.top} tokens at each position; its weights and settings cannot be checked"
    )
    models = {role: served_model(endpoint, role, local), local.role: local}
    return Pair(
        policy=models["policy"], reference=models["reference"], tokenizer=tokenizer, notes=(*notes, note)
    )


@contextmanager
def engine_for(
    job: MeasureJob, pair: Pair, reporter: ProgressReporter, top: int, workers: Engine | None = None
) -> Generator[Engine]:
    """Context with the engine that runs a job's shards: the workers, or one of this process.

    That is alone, or with a server or a file of base logits. A cache that the measurement fills is locked for it.

    Args:
        job: the job.
        pair: from ``load_models``.
        reporter: receives the progress within shards.
        top: number of likeliest tokens of each model in a shard's result.
        workers: the engine of other processes; None if there is none.

    Raises:
        ModelError, OptionError: if the cache is of another model, or the option is unsupported.
        RunFolderError: if the cache cannot be written, or is in use by another process.
    """
    served = next((model for model in (pair.policy, pair.reference) if isinstance(model, ServedModel)), None)
    if workers is not None:
        yield workers
    elif isinstance(pair.reference, BaseLogits):
        yield BaseLogitsEngine(pair=pair, job=job, reference=pair.reference, on_scored=reporter.add_scored)
    elif served is not None:
        yield EndpointEngine(
            pair=pair,
            job=job,
            endpoint=served.endpoint,
            endpoint_role=served.role,
            on_scored=reporter.add_scored,
        )
    else:
        with _filled_cache(job, pair) as cache:
            yield LocalEngine(
                pair=pair,
                job=job,
                cache=cache,
                on_tokens=reporter.add_generated,
                on_scored=reporter.add_scored,
                top=top,
            )


@contextmanager
def _filled_cache(job: MeasureJob, pair: Pair) -> Generator[ReferenceCache | None]:
    """The cache that a measurement fills, locked for this process; None if there is none."""
    if job.reference_cache is None or pair.reference.stored is not None:
        yield None
        return
    folder = Path(job.reference_cache).expanduser()
    check_cache_folder(folder)
    with folder_lock(
        folder, "wait for it, or make the cache with kleash cache, which any number of runs can read"
    ):
        yield ReferenceCache(folder, pair.reference)


def source_of(job: MeasureJob, context_length: int | None, sha256: str) -> CachedSource:
    """The source of a job, as a cache records it; ``context_length`` of the models that read it."""
    kind, path = job.source
    window, stride = None, None
    if kind == "text":
        window, stride = resolve_window(context_length, job.window, job.stride)
    return CachedSource(
        kind=kind,
        path=path,
        sha256=sha256,
        window=window,
        stride=stride,
        limit=job.limit,
        batch_tokens=job.batch_tokens,
        reading={
            name: value for name, value in shared_options(job, ReadOptions).items() if value is not None
        },
    )


def finished_cache(job: MeasureJob) -> StoredReference | None:
    """The finished cache that replaces the reference; None if there is none.

    None for prompts, since a cache cannot hold responses that are not generated yet.
    """
    if job.reference_cache is None or job.source[0] == "prompts":
        return None
    return StoredReference.find(Path(job.reference_cache).expanduser())


def check_covered(job: MeasureJob, pair: Pair, stored: StoredReference, sha256: str) -> None:
    """Raise ModelError unless the cache holds every sequence of the job."""
    source, cached_source = source_of(job, pair.context_length, sha256), stored.label.source
    advice = "make another: " + shlex.join(
        ("kleash", "cache", "--reference", job.reference, f"--{source.kind}", source.path)
    )
    if cached_source is not None and cached_source.covers(source):
        advice = (
            "the policy's tokenizer or chat template makes other tokens of it; give its folder the reference's chat "
            "template, or plain text or token ids, or --chat-template raw"
        )
    stored.require_all(
        source_sequences(job, pair),
        f"sequences of {source}",
        f"it holds {stored.contents.sequences} of {cached_source}; {advice}",
    )


def fingerprint_of_tokenizer(job: MeasureJob, tokenizer: Any) -> dict[str, str]:
    """The fingerprint of the tokenizer by its name in a header; empty where that of a model includes it."""
    names = [job.policy] if job.has_base_logits else [job.policy, job.reference]
    is_apart = job.tokenizer is not None or all(is_gguf(name) or is_endpoint(name) for name in names)
    return (
        {"tokenizer": fingerprint_of(hash_tokenizer_files(Path(tokenizer.name_or_path)))} if is_apart else {}
    )


def header_of(job: MeasureJob, pair: Pair, source_digest: str) -> RunHeader:
    """The header of a measurement."""
    models = (pair.policy, pair.reference)
    # no other run has the fingerprint of a network in memory, whose weights can be any
    fingerprints = {model.role: model.fingerprint or f"in memory {token_hex(8)}" for model in models}
    if job.source[0] == "prompts" and pair.policy.checkpoint is not None:
        fingerprints[f"policy {GENERATION_CONFIG}"] = pair.policy.checkpoint.fingerprint(of_generation=True)
    fingerprints |= fingerprint_of_tokenizer(job, pair.tokenizer)
    stored = pair.reference.stored
    if stored is not None and stored.label.from_engine:
        fingerprints["reference hidden states, made by an engine"] = cache_fingerprint(stored.folder)
    return RunHeader(
        kleash=__version__,
        settings=job.settings(),
        source_sha256=source_digest,
        fingerprints=fingerprints,
        sampler=SAMPLER,
        environment={f"the version of {name}": version(name) for name in PACKAGES}
        | {f"the {model.role}'s dtype": str(model.dtype).removeprefix("torch.") for model in models},
        probes={model.role: model.endpoint.probe_logps for model in models if isinstance(model, ServedModel)},
    )
