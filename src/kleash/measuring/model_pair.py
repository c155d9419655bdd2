"""The pair of models of a measurement: both loaded, or the reference read from its cache."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from kleash.errors import ModelError
from kleash.jobs import SHIPPED_POLICY, SHIPPED_REFERENCE, MeasureJob
from kleash.measuring.shards import source_sequences
from kleash.models import (
    Loading,
    Pair,
    ReferenceCache,
    StoredReference,
    TokenizerMismatchError,
    load_beside,
    load_pair,
    resolve_window,
)
from kleash.models.cache.reference_cache import check_cache_folder
from kleash.store import CachedSource
from kleash.store.locks import folder_lock


def load_models(job: MeasureJob, source_sha256: str) -> Pair:
    """Load the policy and the reference of a job; a finished cache of its text or responses replaces the reference.

    Raises:
        ModelError: if a model cannot be loaded, the two cannot be compared, or the cache is of another model.
    """
    try:
        return _load_models(job, source_sha256)
    except TokenizerMismatchError as error:
        for role, default in (("reference", SHIPPED_REFERENCE), ("policy", SHIPPED_POLICY)):
            if getattr(job, role) == default:
                raise TokenizerMismatchError(
                    f"{error}; without --{role} it is {default}, the small model that ships with kleash: give --{role}"
                ) from error
        raise


def _load_models(job: MeasureJob, source_sha256: str) -> Pair:
    """``load_models`` without its advice about the shipped models."""
    folder = finished_cache(job)
    if folder is None:
        return load_pair(
            job.policy,
            job.reference,
            revision_policy=job.revision_policy,
            revision_reference=job.revision_reference,
            dtype=job.dtype,
            device=job.device,
            device_map=job.device_map,
            trust_remote_code=job.trust_remote_code,
        )
    stored = StoredReference(folder)
    pair = load_beside(
        stored,
        job.policy,
        job.reference,
        revision_policy=job.revision_policy,
        revision_reference=job.revision_reference,
        loading=loading(job),
    )
    _check_covered(job, pair, stored, source_sha256)
    return pair


@contextmanager
def filled_cache(job: MeasureJob, pair: Pair) -> Generator[ReferenceCache | None]:
    """The cache that a measurement fills, locked for this process; None if there is none.

    Raises:
        ModelError, OptionError: if it is of another model, or the option is unsupported.
        RunFolderError: if it cannot be written, or is in use by another process.
    """
    if job.reference_cache is None or pair.reference.stored is not None:
        yield None
        return
    folder = Path(job.reference_cache).expanduser()
    check_cache_folder(folder)
    with folder_lock(
        folder, "wait for it, or make the cache with kleash cache, which any number of runs can read"
    ):
        yield ReferenceCache(folder, pair.reference)


def loading(job: MeasureJob) -> Loading:
    """The loading options of a job."""
    return Loading(
        dtype=job.dtype,
        device=job.device,
        device_map=job.device_map,
        trust_remote_code=job.trust_remote_code,
    )


def source_of(job: MeasureJob, pair: Pair, sha256: str) -> CachedSource:
    """The source of a job, as a cache records it."""
    kind, path = job.source
    window, stride = None, None
    if kind == "text":
        window, stride = resolve_window(pair, job.window, job.stride)
    return CachedSource(
        kind=kind,
        path=path,
        sha256=sha256,
        window=window,
        stride=stride,
        limit=job.limit,
        batch_tokens=job.batch_tokens,
    )


def finished_cache(job: MeasureJob) -> Path | None:
    """The folder of a finished cache that replaces the reference; None if there is none.

    None for prompts, since a cache cannot hold responses that are not generated yet.
    """
    if job.reference_cache is None or job.source[0] == "prompts":
        return None
    folder = Path(job.reference_cache).expanduser()
    return folder if StoredReference.exists_in(folder) else None


def _check_covered(job: MeasureJob, pair: Pair, stored: StoredReference, sha256: str) -> None:
    """Raise ModelError unless the cache holds every sequence of the job."""
    source = source_of(job, pair, sha256)
    cached_source = stored.label.source
    is_complete = len(stored.states) >= stored.contents.sequences
    if is_complete and cached_source is not None and cached_source.covers(source):
        return
    missing, total, first = stored.count_missing(source_sequences(job, pair))
    if missing:
        raise ModelError(
            f"{stored.folder} lacks {missing} of the {total} sequences of {source}, the first being {first}; it "
            f"holds {stored.contents.sequences} of {cached_source}; make another: kleash cache --reference "
            f"{job.reference} --{source.kind} {source.path}"
        )
