"""The two models of a measurement: both loaded, or the reference read from its cache."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from kleash.errors import ModelError
from kleash.measuring.shards import given_sequences
from kleash.models import (
    Loading,
    Pair,
    ReferenceCache,
    StoredReference,
    TokenizerMismatchError,
    load_beside,
    load_pair,
    window_and_stride,
)
from kleash.models.cache.reference_cache import require_cache
from kleash.records import SHIPPED_POLICY, SHIPPED_REFERENCE, CachedSource, MeasureJob
from kleash.records.locking import folder_lock


def load_models(job: MeasureJob, source_sha256: str) -> Pair:
    """The pair of a job; a finished cache of its text or responses stands in for the reference.

    Raises:
        ModelError: if a model cannot be loaded, the two cannot be compared, or the cache is another's.
    """
    try:
        return _load_models(job, source_sha256)
    except TokenizerMismatchError as error:
        for role, default in (("reference", SHIPPED_REFERENCE), ("policy", SHIPPED_POLICY)):
            if getattr(job, role) == default:
                raise TokenizerMismatchError(
                    f"{error}; no {role} was given, so that it was {default}, kleash's own small model: give --{role}"
                ) from error
        raise


def _load_models(job: MeasureJob, source_sha256: str) -> Pair:
    folder = _finished_cache(job)
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
        how=loading(job),
    )
    _check_covered(job, pair, stored, source_sha256)
    return pair


@contextmanager
def filled_cache(job: MeasureJob, pair: Pair) -> Generator[ReferenceCache | None]:
    """The cache that a measurement fills as it goes, held for this process alone; None if there is none.

    Raises:
        ModelError, OptionError: if it is another model's, or cannot be.
        RunFolderError: if it cannot be written, or another process is writing it.
    """
    if job.reference_cache is None or pair.reference.stored is not None:
        yield None
        return
    folder = Path(job.reference_cache).expanduser()
    require_cache(folder)
    with folder_lock(folder, "wait for it, or make the cache with kleash cache, which any number can read"):
        yield ReferenceCache(folder, pair.reference)


def loading(job: MeasureJob) -> Loading:
    """How a job loads its models."""
    return Loading(
        dtype=job.dtype,
        device=job.device,
        device_map=job.device_map,
        trust_remote_code=job.trust_remote_code,
    )


def source_of(job: MeasureJob, pair: Pair, sha256: str) -> CachedSource:
    """What a job reads, as a cache keeps it in mind."""
    kind, path = job.source
    window, stride = None, None
    if kind == "text":
        window, stride = window_and_stride(pair, job.window, job.stride)
    return CachedSource(
        kind=kind,
        path=path,
        sha256=sha256,
        window=window,
        stride=stride,
        limit=job.limit,
        batch_tokens=job.batch_tokens,
    )


def _finished_cache(job: MeasureJob) -> Path | None:
    """The folder of the cache that stands in for the reference.

    None if there is none, and on prompts: what the policy will answer is in no cache.
    """
    if job.reference_cache is None or job.source[0] == "prompts":
        return None
    folder = Path(job.reference_cache).expanduser()
    return folder if StoredReference.is_in(folder) else None


def _check_covered(job: MeasureJob, pair: Pair, stored: StoredReference, sha256: str) -> None:
    """See that the cache holds all that will be scored, before anything is."""
    wanted = source_of(job, pair, sha256)
    there = stored.label.source
    whole = len(stored.states) >= stored.contents.sequences
    if whole and there is not None and there.covers(wanted):
        return
    missing, asked, first = stored.lacking(given_sequences(job, pair))
    if missing:
        raise ModelError(
            f"{stored.folder} lacks {missing} of the {asked} sequences of {wanted}, the first being {first}; it "
            f"holds {stored.contents.sequences} of {there}; make another: kleash cache --reference {job.reference} "
            f"--{wanted.kind} {wanted.path}"
        )
