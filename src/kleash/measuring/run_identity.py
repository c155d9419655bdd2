"""What identifies a run: its header, made once a machine and compared over the ranks before anything is written."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from kleash.engines.endpoints import ServedModel
from kleash.errors import CannotRunError, OptionError, RankError
from kleash.jobs import MeasureJob
from kleash.measuring.model_pair import finished_cache
from kleash.measuring.rank_group import RankGroup
from kleash.measuring.shards import hash_source
from kleash.models import Pair, find_source
from kleash.models.checkpoints.resolution import GENERATION_CONFIG, find_checkpoint
from kleash.models.keyed_draws import SAMPLER
from kleash.sources.files import STANDARD_INPUT
from kleash.store.cache import cache_fingerprint, read_label
from kleash.store.file_hashes import file_key, sharing_hashes
from kleash.store.job_folder import RunHeader, describe_differences
from kleash.version import __version__

PACKAGES = ("torch", "transformers", "numpy", "peft", "pyarrow")
"""Packages whose versions are recorded, and are the same on all ranks."""


def check_ranks_can_share(job: MeasureJob, ranks: RankGroup) -> None:
    """Check the options that several processes cannot share.

    Raises:
        OptionError: if there is no ``--out``, the source is standard input, or they would start workers of Ray.
        CannotRunError: if the run would fill a reference cache.
    """
    if ranks.world_size == 1 and job.engine == "local":
        return
    if job.reference_cache is not None and finished_cache(job) is None:
        raise CannotRunError(
            f"--reference-cache {job.reference_cache} would be filled by several processes; make it with kleash cache "
            "first, or leave it out"
        )
    if ranks.world_size == 1:
        return
    if job.engine != "local":
        raise OptionError(
            f"--engine {job.engine} deals shards to its own workers; start one process instead of {ranks.world_size}"
        )
    if job.out is None:
        raise OptionError("several processes must agree on the run's folder; give --out")
    kind, path = job.source
    if path == STANDARD_INPUT:
        raise OptionError(f"--{kind} {path} is read by one process; write it to a file for several")


@contextmanager
def shared_source_sha256(job: MeasureJob, ranks: RankGroup) -> Generator[str]:
    """Context in which files are hashed by one process of each machine; yields the SHA-256 of the source.

    The first rank on a machine hashes the source and the local models. The others take over its hashes for files that
    agree in path, size, times and inode.

    Raises:
        SourceError, ModelError: if a file cannot be read.
    """
    if ranks.world_size == 1:
        yield hash_source(job)
        return
    hashes: dict[str, str] = {}
    hashing_rank = ranks.ranks_on_node[0]
    source_key = "\n".join(map(file_key, find_source(job.source[1], job.source[0], job).paths))
    name = f"hashes/{hashing_rank}"
    if ranks.rank == hashing_rank:
        with sharing_hashes(hashes):
            if job.endpoint_role != "policy":
                find_checkpoint(job.policy, job.revision_policy).fingerprint()
            if job.endpoint_role != "reference" and finished_cache(job) is None:
                find_checkpoint(job.reference, job.revision_reference).fingerprint()
        digest = hash_source(job)
        ranks.post(name, {"source": {source_key: digest}, "files": hashes})
    else:
        ranks.wait_for(lambda: ranks.peek(name) is not None)
        message = ranks.peek(name)
        hashes.update(message["files"])
        digest = message["source"].get(source_key) or hash_source(job)
    with sharing_hashes(hashes):
        yield digest


def header_of(job: MeasureJob, pair: Pair, source_digest: str) -> RunHeader:
    """The header of a measurement."""
    fingerprints = {"policy": pair.policy.fingerprint, "reference": pair.reference.fingerprint}
    if job.source[0] == "prompts":
        checkpoint = find_checkpoint(job.policy, job.revision_policy)
        fingerprints[f"policy {GENERATION_CONFIG}"] = checkpoint.generation_fingerprint()
    cache = finished_cache(job)
    if cache is not None and read_label(cache).from_engine:
        fingerprints["reference hidden states, made by an engine"] = cache_fingerprint(cache)
    return RunHeader(
        kleash=__version__,
        settings=job.settings(),
        source_sha256=source_digest,
        fingerprints=fingerprints,
        sampler=SAMPLER,
        probes={
            model.role: model.endpoint.probe_logps
            for model in (pair.policy, pair.reference)
            if isinstance(model, ServedModel)
        },
    )


def require_same_on_all_ranks(job: MeasureJob, header: RunHeader, ranks: RankGroup) -> None:
    """Check that all ranks have the same settings, files and versions.

    Raises:
        RankError: on all ranks, naming one that differs from the first, and in what.
    """
    versions = {f"the version of {name}": version(name) for name in PACKAGES}
    where = {"--out": job.out, "--shard": job.shard, "--resume": job.resume}
    descriptions: list[dict[str, Any]] = ranks.gather("header", {**where, **header.described(), **versions})
    probes: list[dict[str, tuple[float, ...]]] = ranks.gather("probes", dict(header.probes))
    first, first_header = descriptions[0], replace(header, probes=probes[0])
    for rank, description in enumerate(descriptions):
        clauses = [
            *describe_differences(first, description, "on rank 0"),
            *first_header.probe_differences(replace(header, probes=probes[rank])),
        ]
        if clauses:
            differences = "; ".join(clauses)
            raise RankError(
                f"rank {rank} on {ranks.nodes[rank]} measures something else: {differences}; start all ranks with "
                "the same command, files and versions"
            )
