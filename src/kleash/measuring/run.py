"""The measuring job: load the models, score shard by shard, write the files."""

import shlex
import warnings
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import chain, count
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from kleash.arguments import with_parameters_of
from kleash.engines import Engine
from kleash.errors import Interrupted, OptionError, TrackerWarning
from kleash.jobs import MeasureJob
from kleash.launch_environment import launched_world_size, local_world_size
from kleash.measuring.estimand import sampler_note
from kleash.measuring.keywords import job_of_keywords, measure_parameters, pair_in_memory
from kleash.measuring.largest_drift import NUM_ALTERNATIVES, first_texts, shorten_text
from kleash.measuring.measurement import make_measurement
from kleash.measuring.model_pair import engine_for, header_of, load_models
from kleash.measuring.progress import LOADING, ProgressReporter
from kleash.measuring.ray_workers import ray_engine
from kleash.measuring.shard_scoring import OpenRun, run_shards
from kleash.measuring.shards import ShardPlan, hash_source
from kleash.measuring.shared_weights import follow, is_first_of_weights, is_mirrored, mirrored, process_group
from kleash.models import Pair, describe_source, generate, read_prompts, turns_of
from kleash.models.network_loading import PARALLEL_MAPS
from kleash.models.threads import threads_for_scoring
from kleash.reports import write_report
from kleash.reports.gate_verdicts import with_gate
from kleash.reports.trackers import require_trackers, send_result
from kleash.store import Measurement, RunFolder
from kleash.store.file_hashes import require_unchanged_files, watching_files
from kleash.store.measurement import PromptDrift

WITH_RESPONSES = 20
"""Prompts, those with the largest KL, that ``--show-reference`` shows with responses."""


def default_out(parent: str = "kleash-runs") -> str:
    """The folder of a job without ``--out``, in ``parent``, named by date and time; within one second also by number.

    Raises:
        OptionError: if a launcher started several processes, which would make up several names.
    """
    if launched_world_size() > 1:
        raise OptionError("several processes must agree on one folder; give --out")
    name = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return str(next(path for path in map(Path(parent).joinpath, names) if not path.exists()))


@with_parameters_of(measure_parameters)
def measure(
    job: MeasureJob | None = None, reporter: ProgressReporter | None = None, **options: Any
) -> Measurement:
    """Measure how far a policy has drifted from its reference.

    Writes ``measurement.json``, ``tokens/``, ``sequences/``, ``alternatives.parquet`` and ``report.html`` into
    ``job.out``. A run that was interrupted or killed is resumed with ``resume=True``: shards that are on disk are not
    scored again, and the result is the same.

    Any number of processes that call this with the same job measure one run: each scores shards that no other has.
    All return the measurement, which one of them makes and writes.

    >>> measurement = kleash.measure(prompts=["The sea was calm", "A boat"], max_new_tokens=4, out="drift")
    >>> measurement.counts.prompts  # of the pair that ships with kleash; policy= and reference= name others
    2

    Args:
        job: what to measure, and how; None for the options.
        reporter: receives the progress.
        options: the fields of ``MeasureJob``, which ``kleash measure --help`` describes. ``prompts``, ``text`` or
            ``responses`` may be a list of texts, messages or records, a ``datasets.Dataset`` or a data frame, which is
            written into the run's folder as ``source.jsonl``. ``policy`` and ``reference`` may be transformers or PEFT
            models in memory, with ``tokenizer``; the reference of a PEFT model is its base if none is given. Such a run
            has one process and cannot be resumed.

    Returns:
        The measurement, as in ``measurement.json``.

    Raises:
        SourceError: if the prompts, text or responses cannot be read.
        ModelError: if a model cannot be loaded, or the two cannot be compared.
        EndpointError: if a server cannot be reached, fails for good, or gives no log-probabilities of prompts.
        NonFiniteError: if a model gives NaN or infinite logits.
        RunFolderError: if ``job.out`` cannot be written or resumed, or another run is in it.
        RankError: if another rank that has a part of the models is lost.
        ClusterError: if the Ray cluster cannot be reached, or its workers fail, are lost or measure something else.
        OptionError, CannotRunError, MissingExtraError: if an option is unsupported or a dependency is missing.
        ChangedInputError: if a file of the source or of a model is written to during the run.
        Interrupted: on KeyboardInterrupt, with the options that resume the run.

    Warns:
        TrackerWarning: if a tracker of ``job.report_to`` does not get the measurement, which is on disk then.
    """
    with (
        pair_in_memory(options) as (names, pair),
        job_of_keywords(MeasureJob, job, names, default_out) as measure_job,
    ):
        return measure_together(measure_job, reporter, pair)[0]


def measure_together(
    job: MeasureJob,
    reporter: ProgressReporter | None = None,
    pair: Pair | None = None,
    *,
    makes_anew: bool = True,
) -> tuple[Measurement, bool]:
    """``measure``, with whether this process made the measurement of the shards, rather than another one.

    Args:
        job: what to measure, and how.
        reporter: receives the progress.
        pair: the models, of which one is in memory; None to load those of the job.
        makes_anew: whether a measurement that is there when this process begins is made again; otherwise it is taken
            for one that another process of the same work has just made.
    """
    if job.out is None:
        job = replace(job, out=default_out())
    with opened_run(job, reporter if reporter is not None else ProgressReporter(), pair) as run:
        measurement = _measurement_of(run if makes_anew else replace(run, measurement_before=None))
    if measurement is None:
        return Measurement.read(run.folder.root), False
    for sentence in send_result(job.report_to, measurement, run.folder.root):
        warnings.warn(sentence, TrackerWarning, stacklevel=3)
    return measurement, True


def _measurement_of(run: OpenRun) -> Measurement | None:
    """Score the shards of a run; return its measurement, or None if another process makes it."""
    start = monotonic()
    is_first = is_first_of_weights(run.job)
    with engine_for(run.job, run.pair, run.reporter, NUM_ALTERNATIVES, run.workers) as local_engine:
        if is_mirrored(run.job) and not is_first:
            follow(local_engine)
            return None
        with mirrored(local_engine) if is_mirrored(run.job) else nullcontext(local_engine) as engine:
            source = run_shards(run, engine)
            with turns_of(run.pair, engine.traits.temperature):
                return _made_measurement(run, engine, source, start) if is_first else None


def _made_measurement(run: OpenRun, engine: Engine, source: ShardPlan, start: float) -> Measurement | None:
    """The measurement of a run whose shards are on disk: made and written by the first process that gets here.

    None for any other.
    """
    with run.folder.making_result(
        partial(run.reporter.note, "another process makes the measurement; waiting for it")
    ):
        if run.folder.measurement_version() not in (None, run.measurement_before):
            return None
        run.reporter.note("all sequences are scored; the intervals and the report follow")
        reference = run.pair.reference
        if reference.network is not None and reference.dtype not in (torch.float32, torch.float64):
            run.reporter.note("a reference from files is loaded a second time, in float32, for dtype_gap")
        measurement = make_measurement(run, engine, source, seconds=lambda: monotonic() - start)
        if run.job.show_reference:
            measurement = replace(measurement, prompts=_with_responses(run, measurement.prompts))
        noted = (*run.pair.notes, *run.source_notes, *source.notes, *run.job.without_effect())
        run.reporter.note_all(sentence for sentence in measurement.notes if sentence not in noted)
        measurement = with_gate(measurement, run.job.at_most, run.job.gated_statistic)
        require_unchanged_files()
        run.folder.write_measurement(measurement)
        write_report(run.folder.root)
        return measurement


def _with_responses(run: OpenRun, prompts: Sequence[PromptDrift]) -> tuple[PromptDrift, ...]:
    """The prompts, of which the first have the policy's first response and one that the reference draws.

    The reference draws as the policy did, with the numbers of the same seed. Nothing is measured on it.
    """
    job, shown = run.job, {prompt.prompt_id for prompt in prompts[:WITH_RESPONSES]}
    source = read_prompts(job.source[1], run.pair, limit=job.limit, reading=job)
    reference = replace(run.pair.reference, context_length=run.pair.context_length)
    drawn = {
        sequence.prompt_id: shorten_text(sequence.response_text)
        for sequence in generate(
            reference,
            [prompt for prompt in source if prompt.prompt_id in shown],
            replace(job, samples_per_prompt=1),
            batch_tokens=job.batch_tokens,
        )
    }
    first = first_texts(run.folder, shown, ["response"])
    return tuple(
        replace(
            prompt,
            policy_response=first.get(prompt.prompt_id),
            reference_response=drawn.get(prompt.prompt_id),
        )
        for prompt in prompts
    )


@contextmanager
def opened_run(job: MeasureJob, reporter: ProgressReporter, pair: Pair | None = None) -> Generator[OpenRun]:
    """Context in which this process takes part in a run: its models are loaded, and are those of the folder."""
    with ExitStack() as stack:
        stack.enter_context(watching_files())
        if job.device_map in PARALLEL_MAPS:
            stack.enter_context(process_group(job))
        require_trackers(job.report_to)
        folder = stack.enter_context(RunFolder(Path(str(job.out)).expanduser()).joined(resume=job.resume))
        measurement_before = folder.measurement_version()
        reporter.note_all(job.without_effect())
        digest = hash_source(job)
        described = () if job.has_base_logits else describe_source(*job.source, job)
        is_resumable = pair is None
        if is_resumable:
            reporter.note(LOADING)
        workers = stack.enter_context(ray_engine(job, reporter)) if job.engine == "ray" else None
        if pair is None:
            pair = workers.pair if workers is not None else load_models(job, digest)
        source_notes = tuple(filter(None, (*described, sampler_note(job, pair.policy))))
        reporter.note_all((*pair.notes, *source_notes))
        header = (
            header_of(job, pair, digest)
            if workers is None
            else replace(workers.loaded.header, source_sha256=digest)
        )
        folder.begin(
            header,
            on_wait=lambda: reporter.note(f"waiting for a process that has the lock of {folder.root}"),
        )
        if workers is None:
            reporter.note_all(stack.enter_context(threads_for_scoring(pair, local_world_size())))
        if is_resumable:
            stack.enter_context(resumable(folder.root))
        yield OpenRun(
            job=job,
            pair=pair,
            folder=folder,
            reporter=reporter,
            source_sha256=digest,
            workers=workers,
            source_notes=source_notes,
            measurement_before=measurement_before,
        )


@contextmanager
def resumable(out: Path, how: str = "what is finished is on disk: resume with --resume") -> Generator[None]:
    """Context of work that an interruption leaves resumable in ``out``; ``how``, in words before the folder.

    Of contexts in each other the outermost says how: that of the command.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        cause = stop.__cause__ if isinstance(stop, Interrupted) else stop
        raise Interrupted(f"{str(cause) or 'interrupted'}; {how} --out {shlex.quote(str(out))}") from cause
