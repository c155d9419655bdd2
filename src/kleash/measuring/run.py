"""The measuring job: load the models, score shard by shard, write the files."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from time import monotonic

from kleash.engines import Engine, LocalEngine
from kleash.errors import Interrupted
from kleash.jobs import MeasureJob
from kleash.measuring.largest_drift import (
    MAX_SEQUENCES,
    NUM_ALTERNATIVES,
    TopEntries,
    alternatives_of_shard,
)
from kleash.measuring.measurement import FinishedRun, make_measurement
from kleash.measuring.model_pair import filled_cache, load_models
from kleash.measuring.progress import NullProgressReporter, ProgressReporter
from kleash.measuring.sequence_clusters import SequenceClusters
from kleash.measuring.shards import SourceChecks, hash_source, plan_shards
from kleash.models import SAMPLER, Pair, find_checkpoint
from kleash.models.checkpoints.resolution import GENERATION_CONFIG
from kleash.models.threads import threads_for_scoring
from kleash.reports import write_report
from kleash.reports.gate_verdicts import gate_of_measurement
from kleash.store import Measurement, Number, RunFolder, RunHeader
from kleash.version import __version__

MIN_CLUSTERS = 64
"""``until_relative_error`` does not stop a run before so many: an error estimated from fewer can be small by chance."""


def default_out() -> str:
    """The folder of a run without ``--out``, named by date and time."""
    return str(Path("kleash-runs") / datetime.now().strftime("%Y-%m-%d-%H%M%S"))


def measure(job: MeasureJob, reporter: ProgressReporter | None = None) -> Measurement:
    """Measure how far a policy has drifted from its reference.

    Writes ``measurement.json``, ``tokens/``, ``sequences/``, ``alternatives.parquet`` and ``report.html`` into
    ``job.out``. A run that was interrupted or killed is resumed with ``resume=True`` after its last finished shard,
    with the same result.

    Args:
        job: what to measure, and how.
        reporter: receives the progress.

    Returns:
        The measurement, as in ``measurement.json``.

    Raises:
        SourceError: if the prompts, text or responses cannot be read.
        ModelError: if a model cannot be loaded, or the two cannot be compared.
        NonFiniteError: if a model gives NaN or infinite logits.
        RunFolderError: if ``job.out`` cannot be written or resumed.
        OptionError, CannotRunError, MissingExtraError: if an option is unsupported or a dependency is missing.
        Interrupted: on Ctrl-C, with the command that resumes the run.
    """
    reporter = reporter if reporter is not None else NullProgressReporter()
    folder = RunFolder(Path(job.out if job.out is not None else default_out()).expanduser())
    folder.check(resume=job.resume)
    for sentence in job.without_effect():
        reporter.note(sentence)
    digest = hash_source(job)
    pair = load_models(job, digest)
    for sentence in pair.notes:
        reporter.note(sentence)
    header = RunHeader(
        kleash=__version__,
        settings=job.settings(),
        source_sha256=digest,
        fingerprints=_fingerprints(job, pair),
        sampler=SAMPLER,
    )
    with folder.writing(header, resume=job.resume), threads_for_scoring(pair) as threads:
        if threads is not None:
            reporter.note(threads)
        try:
            return _measure(job, pair, folder, digest, reporter)
        except KeyboardInterrupt as stop:
            raise Interrupted(
                f"interrupted; finished shards are on disk: resume with --resume --out {folder.root}"
            ) from stop


def _fingerprints(job: MeasureJob, pair: Pair) -> dict[str, str]:
    """Fingerprints of both models, and of the policy's generation settings if it generates."""
    models = {"policy": pair.policy.fingerprint, "reference": pair.reference.fingerprint}
    if job.source[0] != "prompts":
        return models
    generation = find_checkpoint(job.policy, job.revision_policy).generation_fingerprint()
    return {**models, f"policy {GENERATION_CONFIG}": generation}


def _measure(
    job: MeasureJob, pair: Pair, folder: RunFolder, digest: str, reporter: ProgressReporter
) -> Measurement:
    """Run the shards of a locked run folder, and write the measurement and the report."""
    start = monotonic()
    with filled_cache(job, pair) as cache:
        engine = LocalEngine(
            pair=pair, job=job, cache=cache, on_tokens=reporter.add_generated, top=NUM_ALTERNATIVES
        )
        checks = run_shards(job, pair, folder, engine, reporter)
    if engine.float32_gap_reloads:
        reporter.note("the reference is loaded a second time, in float32, for dtype_gap")
    run = FinishedRun(job=job, pair=pair, folder=folder, engine=engine, source_sha256=digest, checks=checks)
    measurement = make_measurement(run, seconds=lambda: monotonic() - start)
    if job.at_most is not None:
        measurement = replace(measurement, gate=gate_of_measurement(measurement, job.at_most))
    folder.write_measurement(measurement)
    write_report(folder.root)
    return measurement


def run_shards(
    job: MeasureJob, pair: Pair, folder: RunFolder, engine: Engine, reporter: ProgressReporter
) -> SourceChecks:
    """Score and write the shards that are not on disk, until all are or ``until_relative_error`` is reached.

    Returns:
        The checks of the source over all shards.
    """
    finished = folder.finished_shards()
    sequences = SequenceClusters(on_text=job.source[0] == "text", is_one_model=pair.is_one_model)
    parts = folder.token_parts(list(SequenceClusters.COLUMNS))
    largest, checks = TopEntries(size=MAX_SEQUENCES), SourceChecks(temperature=job.temperature)
    if finished:
        reporter.note(f"resuming after {finished} finished shards in {folder.root}")
    plan = plan_shards(job, pair)
    reporter.set_total(plan.sequences)
    for shard in plan.shards:
        checks.add(shard.sequences)
        if shard.index < finished:
            part = next(parts)
            sequences.add(part)
            largest.add_sequences(part)
        else:
            result = engine.run(shard)
            largest.add_sequences(result.tokens)
            alternatives = alternatives_of_shard(largest, result.tokens, result.likeliest)
            folder.write_shard(shard.index, result.tokens, result.sequences, alternatives)
            sequences.add(result.tokens)
            reporter.add_scored(len(result.sequences["prompt_id"]), len(result.tokens["token_id"]))
        kl = sequences.kl()
        reporter.update_kl(Number.of(kl))
        target = job.until_relative_error
        if target is not None and kl.clusters >= MIN_CLUSTERS and kl.relative_error <= target:
            break
    return checks
