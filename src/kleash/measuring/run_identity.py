"""What identifies a run: its header, which every process compares with that in the folder before its first shard."""

from importlib.metadata import version

from kleash.checkpoints.resolution import GENERATION_CONFIG, find_checkpoint
from kleash.engines.endpoints import ServedModel
from kleash.jobs import MeasureJob
from kleash.measuring.model_pair import finished_cache
from kleash.models import Pair
from kleash.models.keyed_draws import SAMPLER
from kleash.store.cache import cache_fingerprint, read_label
from kleash.store.job_folder import RunHeader
from kleash.version import __version__

PACKAGES = ("torch", "transformers", "numpy", "peft", "pyarrow")
"""Packages whose versions are recorded, and are the same in all processes of a run."""


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
        environment=environment_of(pair),
        probes={
            model.role: model.endpoint.probe_logps
            for model in (pair.policy, pair.reference)
            if isinstance(model, ServedModel)
        },
    )


def environment_of(pair: Pair) -> dict[str, str]:
    """The versions of the packages that compute, and the dtypes of the models, by names in words."""
    versions = {f"the version of {name}": version(name) for name in PACKAGES}
    dtypes = {
        f"the {model.role}'s dtype": str(model.dtype).removeprefix("torch.")
        for model in (pair.policy, pair.reference)
    }
    return versions | dtypes
