"""The measuring job: load the models, score shard by shard, write the files."""

import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from time import monotonic

import torch

from kleash.engines import Engine
from kleash.errors import Interrupted, OptionError, RunFolderError, TrackerWarning
from kleash.jobs import MeasureJob
from kleash.measuring.dealing import VISIBLE_S, DealtShards, OpenRun, run_shards
from kleash.measuring.estimand import sampler_notes
from kleash.measuring.largest_drift import NUM_ALTERNATIVES
from kleash.measuring.measurement import FinishedRun, make_measurement
from kleash.measuring.model_pair import engine_for, filled_cache, load_models
from kleash.measuring.progress import NullProgressReporter, ProgressReporter
from kleash.measuring.rank_group import RankGroup
from kleash.measuring.run_identity import (
    check_ranks_can_share,
    header_of,
    require_same_on_all_ranks,
    shared_source_sha256,
)
from kleash.measuring.shared_weights import follow, is_mirrored, mirrored, process_group
from kleash.measuring.workers import ray_engine
from kleash.models import describe_source, turns_of
from kleash.models.threads import threads_for_scoring
from kleash.reports import write_report
from kleash.reports.gate_verdicts import gate_of_measurement
from kleash.reports.trackers import require_trackers, send_measurement
from kleash.store import ArrayTask, Measurement, RunFolder
from kleash.store.codec import decode
from kleash.store.file_hashes import require_unchanged_files, watching_files
from kleash.store.job_folder import HEADER, RunHeader


def default_out() -> str:
    """The folder of a run without ``--out``, named by date and time."""
    return str(Path("kleash-runs") / datetime.now().strftime("%Y-%m-%d-%H%M%S"))


def measure(
    job: MeasureJob, reporter: ProgressReporter | None = None, ranks: RankGroup | None = None
) -> Measurement:
    """Measure how far a policy has drifted from its reference.

    Writes ``measurement.json``, ``tokens/``, ``sequences/``, ``alternatives.parquet`` and ``report.html`` into
    ``job.out``. A run that was interrupted or killed is resumed with ``resume=True``: shards that are on disk are not
    scored again, and the result is the same.

    Several processes can measure one run: each calls this function with the same job and its ``ranks``. All return
    the measurement, which the first rank makes and writes.

    Args:
        job: what to measure, and how.
        reporter: receives the progress, on the first rank.
        ranks: the processes that share the work, such as ``launched_ranks()``; None for this one alone.

    Returns:
        The measurement, as in ``measurement.json``.

    Raises:
        SourceError: if the prompts, text or responses cannot be read.
        ModelError: if a model cannot be loaded, or the two cannot be compared.
        EndpointError: if a server cannot be reached, fails for good, or gives no log-probabilities of prompts.
        NonFiniteError: if a model gives NaN or infinite logits.
        RunFolderError: if ``job.out`` cannot be written or resumed.
        RankError: if another rank fails, is lost, or measures something else.
        ClusterError: if the Ray cluster cannot be reached, or its workers fail, are lost or measure something else.
        OptionError, CannotRunError, MissingExtraError: if an option is unsupported or a dependency is missing.
        ChangedInputError: if a file of the source or of a model is written to during the run.
        Interrupted: on KeyboardInterrupt, with the options that resume the run.

    Warns:
        TrackerWarning: if a tracker of ``job.report_to`` does not get the measurement, which is on disk then.
    """
    if job.shard is not None:
        raise OptionError(f"--shard {job.shard} scores a part of a run; call measure_part, and then merge")
    if job.out is None and (ranks is None or ranks.world_size == 1):
        job = replace(job, out=default_out())
    measurement = _measure(job, reporter, ranks)
    if ranks is None or ranks.is_first:
        for sentence in send_measurement(job.report_to, measurement, folder_of(job)):
            warnings.warn(sentence, TrackerWarning, stacklevel=2)
    return measurement


def _measure(job: MeasureJob, reporter: ProgressReporter | None, ranks: RankGroup | None) -> Measurement:
    """``measure`` without trackers."""
    with opened_run(job, reporter, ranks) as run:
        start = monotonic()
        with _engine(run) as local_engine:
            if is_mirrored(job, run.ranks) and not run.ranks.is_first:
                run.ranks.add("done")
                follow(local_engine)
            else:
                with mirrored(local_engine, job, run.ranks) as engine:
                    shards = run_shards(run, engine)
                    with turns_of(run.pair, engine.temperature):
                        if run.ranks.is_first:
                            return _write_measurement(run, engine, shards, start)
        return decode(Measurement, run.ranks.broadcast("measurement"))


def _write_measurement(run: OpenRun, engine: Engine, shards: DealtShards, start: float) -> Measurement:
    """Make the measurement of a run whose shards are on disk, write it with the report, and give it to all ranks."""
    if engine.float32_gap_reloads:
        run.reporter.note("the reference is loaded a second time, in float32, for dtype_gap")
    finished_run = FinishedRun(
        job=run.job,
        pair=run.pair,
        folder=run.folder,
        engine=engine,
        source_sha256=run.source_sha256,
        source_notes=(*run.source_notes, *shards.notes),
        checks=shards.checks,
    )
    measurement = make_measurement(finished_run, seconds=lambda: monotonic() - start)
    for sentence in measurement.notes:
        if sentence not in (*run.pair.notes, *finished_run.source_notes, *run.job.without_effect()):
            run.reporter.note(sentence)
    if run.job.at_most is not None:
        measurement = replace(
            measurement, gate=gate_of_measurement(measurement, run.job.at_most, run.job.gated_statistic)
        )
    require_unchanged_files()
    run.folder.write_measurement(measurement)
    write_report(run.folder.root)
    run.ranks.broadcast("measurement", measurement.to_dict())
    return measurement


def measure_part(
    job: MeasureJob, reporter: ProgressReporter | None = None, ranks: RankGroup | None = None
) -> ArrayTask:
    """Score one of the parts of a run, ``job.shard``, into a folder of its own in ``job.out``.

    ``merge`` makes the run of all parts. Arguments and errors as for ``measure``.

    Returns:
        What was scored, as in the ``part.json`` of the folder.
    """
    if job.shard is None:
        raise OptionError("measure_part scores a part of a run; set --shard, such as 3/8, or call measure")
    with opened_run(job, reporter, ranks) as run:
        with _engine(run) as engine:
            shards = run_shards(run, engine)
        if not run.ranks.is_first:
            return decode(ArrayTask, run.ranks.broadcast("part"))
        number, count = job.part
        task = ArrayTask(number=number, count=count, shards=shards.total)
        task.write(run.folder.root)
        run.ranks.broadcast("part", {"number": number, "count": count, "shards": shards.total})
        return task


@contextmanager
def opened_run(
    job: MeasureJob, reporter: ProgressReporter | None, ranks: RankGroup | None
) -> Generator[OpenRun]:
    """Context in which the models of a job are loaded and its folder is locked, on all ranks."""
    ranks = ranks if ranks is not None else RankGroup()
    reporter = reporter if reporter is not None and ranks.is_first else NullProgressReporter()
    with ranks.running(), ExitStack() as stack:
        stack.enter_context(watching_files())
        check_ranks_can_share(job, ranks)
        stack.enter_context(process_group(job, ranks))
        folder = RunFolder(folder_of(job), writer=ranks.rank)
        is_resumed = job.resume or (ranks.is_first and ranks.has_begun_before(str(folder.root.absolute())))
        if ranks.is_first:
            require_trackers(job.report_to)
            folder.check(resume=is_resumed)
            folder.require_unlocked()
        for sentence in job.without_effect():
            reporter.note(sentence)
        with shared_source_sha256(job, ranks) as digest:
            workers = stack.enter_context(ray_engine(job, reporter.note)) if job.engine == "ray" else None
            pair = workers.pair if workers is not None else load_models(on_device_of_rank(job, ranks), digest)
        kind, name = job.source
        source_notes = (
            *describe_source(kind, name, job),
            *sampler_notes(job, pair.policy),
        )
        for sentence in (*pair.notes, *source_notes):
            reporter.note(sentence)
        header = header_of(job, pair, digest)
        require_same_on_all_ranks(job, header, ranks)
        stack.enter_context(_opened_folder(folder, header, ranks, resume=is_resumed))
        if workers is None:
            threads = stack.enter_context(threads_for_scoring(pair, len(ranks.ranks_on_node)))
            if threads is not None:
                reporter.note(threads)
        stack.enter_context(_resumable(job.out or folder.root))
        yield OpenRun(
            job=job,
            pair=pair,
            folder=folder,
            reporter=reporter,
            ranks=ranks,
            source_sha256=digest,
            workers=workers,
            source_notes=source_notes,
        )


@contextmanager
def _resumable(out: str | Path) -> Generator[None]:
    """Context of work that an interruption leaves resumable in ``out``."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise Interrupted(
            f"{str(stop) or 'interrupted'}; finished shards are on disk: resume with --resume --out {out}"
        ) from stop


def folder_of(job: MeasureJob) -> Path:
    """The run folder of a job: ``--out``, or the folder of a part in it."""
    out = Path(job.out if job.out is not None else default_out()).expanduser()
    if job.shard is None:
        return out
    number, count = job.part
    return out / f"shard-{number}-of-{count}"


@contextmanager
def _opened_folder(
    folder: RunFolder, header: RunHeader, ranks: RankGroup, *, resume: bool
) -> Generator[None]:
    """Context in which the folder is locked: the first rank opens it, then the others join.

    Raises:
        RunFolderError: if it cannot be written, or a rank on another machine does not see it.
    """
    if ranks.is_first:
        with folder.writing(header, resume=resume):
            ranks.record_begun(str(folder.root.absolute()))
            ranks.broadcast("open", True)
            yield
        return
    ranks.broadcast("open")
    deadline = monotonic() + VISIBLE_S

    def is_visible_or_late() -> bool:
        return (folder.root / HEADER).exists() or monotonic() > deadline

    ranks.wait_for(is_visible_or_late)
    if not (folder.root / HEADER).exists():
        raise RunFolderError(
            f"{folder.root}/{HEADER} of rank 0 on {ranks.nodes[0]} is not there on {ranks.nodes[ranks.rank]}; --out "
            "must lie on a disk that all machines share"
        )
    with folder.joining(header):
        yield


@contextmanager
def _engine(run: OpenRun) -> Generator[Engine]:
    """Context with the engine that scores the run's shards: the workers, or the models in this process."""
    if run.workers is not None:
        yield run.workers
        return
    with filled_cache(run.job, run.pair) as cache:
        yield engine_for(run.job, run.pair, cache, run.reporter, NUM_ALTERNATIVES)


def on_device_of_rank(job: MeasureJob, ranks: RankGroup) -> MeasureJob:
    """The job with a GPU for each rank of a machine, where it names none."""
    several = len(ranks.ranks_on_node) > 1
    if not several or job.device not in ("auto", "cuda") or job.device_map is not None:
        return job
    if not torch.cuda.is_available():
        return job
    place = ranks.ranks_on_node.index(ranks.rank)
    return replace(job, device=f"cuda:{place % torch.cuda.device_count()}")
