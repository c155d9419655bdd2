"""The sweep: the reference run once into a cache, each candidate measured against it, and their ranking."""

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import torch

from kleash.arguments import with_parameters_of
from kleash.checkpoints.resolution import find_checkpoint, repository_of
from kleash.errors import KleashError, ModelError, RunFolderError, TrackerWarning, lacking_memory
from kleash.jobs import MeasureJob, SweepJob
from kleash.measuring.attribution import attribute
from kleash.measuring.keywords import job_of_keywords, sweep_parameters
from kleash.measuring.progress import ProgressReporter
from kleash.measuring.ray_workers import connected_cluster
from kleash.measuring.reference_cache import cache_reference, is_cached
from kleash.measuring.run import default_out, measure_together, resumable
from kleash.measuring.sequence_clusters import SequenceSums, sum_run
from kleash.measuring.shards import hash_source
from kleash.measuring.sweep_ranking import (
    measured_candidate,
    rank_candidates,
)
from kleash.models.cache.stored_reference import StoredReference
from kleash.reports.gate_verdicts import with_gate
from kleash.reports.sweep import PAGE, write_sweep
from kleash.reports.trackers import require_trackers, send_result
from kleash.store import Measurement, RunFolder
from kleash.store.atomic import is_disk_full
from kleash.store.checksums import file_checksum
from kleash.store.file_hashes import watched_files, watching_files
from kleash.store.job_folder import ADVICE_IF_LOCKED, SOURCE, holds_job, require_same
from kleash.store.locks import LOCK_FILES, folder_lock, taking_part
from kleash.store.sweep import SWEEP, Attribution, Sweep, SweepCandidate
from kleash.version import __version__

T = TypeVar("T")

PARENT = "kleash-sweeps"
"""Folder of the sweeps without ``--out``."""


@with_parameters_of(sweep_parameters)
def sweep(job: SweepJob | None = None, reporter: ProgressReporter | None = None, **options: Any) -> Sweep:
    """Measure several candidates against one reference, and rank them.

    Writes into ``job.out``: ``reference-cache/`` as ``cache_reference`` does, ``candidates/NN-name/`` as ``measure``
    does, ``sweep.json`` and ``sweep.html``. A candidate that cannot be measured is recorded with the reason, and the
    others are measured. With ``resume=True`` finished candidates are kept, as long as their files, the source and the
    options are the same, and those that failed are tried again.

    With ``job.attribute``, the KL of each measured candidate is then attributed to groups of its weights, by passes
    that are kept in ``attribution/``.

    Any number of processes that call this with the same job share the work: one makes the cache, each scores shards
    of a candidate, or of a pass of an attribution, that no other has.

    >>> result = kleash.sweep(candidates=["shipped:policy"], text=["The sea was calm."], out="sweep")
    >>> [candidate.name for candidate in result.ranking]
    ['shipped:policy']

    Args:
        job: the candidates, the reference and the source; None for the options.
        reporter: receives the progress.
        options: the fields of ``SweepJob``, which ``kleash sweep --help`` describes; ``text`` or ``responses`` may be
            in memory, as for ``measure``.

    Returns:
        The sweep, as in ``sweep.json``.

    Raises:
        SourceError: if the text or the responses cannot be read.
        ModelError: if the reference cannot be loaded, or no candidate can be found.
        RunFolderError: if ``job.out`` cannot be written, or holds a sweep and ``job.resume`` is not set, or one of
            other options, or the run of another model in the folder of a candidate.
        ClusterError: if the Ray cluster of ``job.engine`` cannot be reached.
        OptionError, CannotRunError, MissingExtraError: if an option is unsupported or a dependency is missing.
        Interrupted: on Ctrl-C, with the command that resumes.

    Warns:
        TrackerWarning: if a tracker of ``job.report_to`` does not get the sweep, which is on disk then.
    """
    with job_of_keywords(SweepJob, job, options, partial(default_out, PARENT)) as sweep_job:
        return sweep_together(sweep_job, reporter)[0]


def sweep_together(job: SweepJob, reporter: ProgressReporter | None = None) -> tuple[Sweep, bool]:
    """``sweep``, with whether this process made it of the measurements, rather than another one."""
    out = Path(job.out if job.out is not None else default_out(PARENT)).expanduser()
    reporter = reporter if reporter is not None else ProgressReporter()
    require_trackers(job.report_to)

    def check(is_alone: bool | None) -> None:
        if is_alone is not False:
            check_sweep_folder(out, resume=job.resume)

    # one connection over all candidates
    with (
        resumable(out, "what is finished is on disk: run the same command again with --resume"),
        taking_part(out, check, lambda: check_sweep_folder(out, resume=False) is None, SOURCE),
        connected_cluster(job) if job.engine == "ray" else nullcontext(),
    ):
        result, is_own = _sweep(job, out, reporter)
    for sentence in send_result(job.report_to, result, out) if is_own else ():
        warnings.warn(sentence, TrackerWarning, stacklevel=3)
    return result, is_own


def check_sweep_folder(out: Path, *, resume: bool) -> None:
    """Check, without writing, that a sweep may be written here.

    Raises:
        RunFolderError: if the folder holds a sweep that is not to be resumed, or other files.
    """
    has_sweep = holds_job(out, "sweep", {"candidates", SWEEP, "reference-cache"}, {*LOCK_FILES, SOURCE})
    if has_sweep and not resume:
        raise RunFolderError(f"{out} holds a sweep; go on with it by --resume, or give another --out")


def _sweep(job: SweepJob, out: Path, reporter: ProgressReporter) -> tuple[Sweep, bool]:
    """``sweep_together`` in a folder that this process takes part in."""
    note = partial(reporter.note, "another process runs the reference or writes the ranking; waiting for it")
    before = _written(out)
    with folder_lock(out, ADVICE_IF_LOCKED, on_wait=note):
        _check_runs(job, out)
        _check_candidates(job, reporter)
        _cache_reference(job, out, reporter)
    with watching_files():
        digest = hash_source(job.measure_job(1, out))
        source_files = watched_files()
    candidates: list[SweepCandidate] = []
    sequences: dict[int, SequenceSums] = {}
    for number, name in enumerate(job.candidates, start=1):
        reporter.note(f"candidate {number} of {len(job.candidates)}: {name}")
        candidates.append(_measure_candidate(job, out, number, digest, reporter, sequences))
        _free_memory()
    source_files.require_unchanged()
    ranked = with_gate(rank_candidates(job, out, candidates, sequences), job.at_most)
    result = ranked
    if job.attribute:
        with folder_lock(out, ADVICE_IF_LOCKED, on_wait=note):
            _write(out, ranked)
    for candidate in ranked.ranking if job.attribute else ():
        run = sequences[candidate.number]
        attributions, failure = _attempt(partial(attribute, job, out, candidate, run, digest, reporter))
        if attributions is None:
            reporter.note(f"the attribution of candidate {candidate.number} failed: {failure}")
            attributions = tuple(
                Attribution(
                    candidate=candidate.number, grouping=each, failure=failure, statistic=job.statistic
                )
                for each in job.attribute
            )
        result = replace(result, attributions=(*result.attributions, *attributions))
        _free_memory()
    with folder_lock(out, ADVICE_IF_LOCKED, on_wait=note):
        written = _written(out)
        is_own = written in (None, before) or written != result.to_json()
        if is_own:
            _write(out, result)
    return result, is_own


def _written(out: Path) -> str | None:
    """The text of ``sweep.json``; None if there is none yet."""
    return (out / SWEEP).read_text(encoding="utf-8") if (out / SWEEP).exists() else None


def _check_runs(job: SweepJob, out: Path) -> None:
    """Check that the candidates' folders hold no run of another model, as after a change of order, or of other options.

    Raises:
        RunFolderError: if one does.
    """
    for number in range(1, len(job.candidates) + 1):
        folder = RunFolder(out / job.folder_of(number))
        try:
            header = folder.header() if folder.begun else None
        except RunFolderError:  # damaged: said when it is this candidate's turn
            continue
        if header is not None:
            settings = job.measure_job(number, out).settings()
            require_same(folder.root, header, replace(header, kleash=__version__, settings=settings))


def _check_candidates(job: SweepJob, reporter: ProgressReporter) -> None:
    """Name the candidates that cannot be found before the reference is run; those of the hub are taken to be there.

    Raises:
        ModelError: if none can be found.
    """
    failures: list[str] = []
    for name in job.candidates:
        if repository_of(name) is None:
            try:
                find_checkpoint(name)
            except KleashError as error:
                failures.append(str(error))
    if len(failures) == len(job.candidates):
        raise ModelError(f"no candidate can be found: {'; '.join(failures)}")
    for failure in failures:
        reporter.note(f"a candidate cannot be measured: {failure}")


def _cache_reference(job: SweepJob, out: Path, reporter: ProgressReporter) -> None:
    """Run the reference into its cache, unless that is finished.

    Raises:
        KleashError: as ``cache_reference``.
    """
    cache_job = job.cache_job(out)
    if is_cached(cache_job, any_dtype=job.engine != "local"):
        reporter.note(f"the cache of the reference {job.reference} is finished, and kept")
        return
    place = "" if job.engine == "local" else " by this process"
    reporter.note(f"the reference {job.reference} is run once{place}, into {cache_job.out}")
    cache_reference(cache_job, reporter)


def _write(out: Path, result: Sweep) -> None:
    """Write ``sweep.json`` and the page."""
    result.write(out)
    write_sweep(out / PAGE, result)


def _measure_candidate(
    job: SweepJob,
    out: Path,
    number: int,
    digest: str,
    reporter: ProgressReporter,
    sequences: dict[int, SequenceSums],
) -> SweepCandidate:
    """Measure a candidate, unless its run is finished, and return it with its numbers or the reason why it has none.

    The sums of its sequences, which the ranking needs, are put into ``sequences`` under its number.

    Raises:
        RunFolderError: if no space is left.
    """
    candidate = SweepCandidate(
        number=number, name=job.candidates[number - 1], folder=str(job.folder_of(number))
    )

    def measure_and_read() -> Measurement:
        measure_job = job.measure_job(number, out)
        measurement = _finished_run(measure_job, digest)
        if measurement is None:
            resumed_job = replace(measure_job, resume=True)
            measurement, _ = measure_together(resumed_job, reporter, makes_anew=False)
        else:
            reporter.note(f"{measure_job.out} is finished, and kept")
        folder = RunFolder(out / candidate.folder).require_shards(measurement.counts.shards)
        sequences[number] = sum_run(folder, [job.statistic], itemgetter(job.statistic))
        return measurement

    measurement, failure = _attempt(measure_and_read)
    if measurement is None:
        reporter.note(f"candidate {number} failed: {failure}")
        return replace(candidate, failure=failure)
    file = out / candidate.folder / "measurement.json"
    return measured_candidate(replace(candidate, measurement_sha256=file_checksum(file).sha256), measurement)


def _attempt(action: Callable[[], T]) -> tuple[T | None, str]:
    """What an action returns; or None, and why it failed.

    Raises:
        RunFolderError: if no space is left.
    """
    try:
        return action(), ""
    except KleashError as error:
        if is_disk_full(error.__cause__):
            raise
        return None, str(error)
    except (RuntimeError, MemoryError) as error:
        if lack := lacking_memory(error):
            return None, f"it does not fit into memory: {lack}"
        raise


def _finished_run(job: MeasureJob, digest: str) -> Measurement | None:
    """The measurement of a candidate's run folder, if it is finished and of the same files, source and options.

    Raises:
        ModelError: if the candidate cannot be found.
    """
    root = Path(str(job.out))
    if not (root / "measurement.json").exists():
        return None
    header = RunFolder(root).header()
    reference = StoredReference(Path(str(job.reference_cache))).label.reference.fingerprint
    fingerprints = {
        **header.fingerprints,  # the cache has the hidden states of the tokens of a given tokenizer
        "policy": find_checkpoint(job.policy).fingerprint(),
        "reference": reference,
    }
    expected = replace(header, settings=job.settings(), source_sha256=digest, fingerprints=fingerprints)
    return None if header.differences(expected) else Measurement.read(root)


def _free_memory() -> None:
    """Free what a measured model held, before the next one is loaded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
