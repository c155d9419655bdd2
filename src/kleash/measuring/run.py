"""The measuring job from its options to its files."""

from datetime import datetime
from pathlib import Path
from time import monotonic

from kleash.engines import LocalEngine
from kleash.errors import Interrupted
from kleash.measuring.largest_drift import TOP, WORST_SEQUENCES, Largest, offer_sequences, top_rows
from kleash.measuring.measurement import Run, summarise
from kleash.measuring.model_pair import filled_cache, load_models
from kleash.measuring.progress import Nobody, Watcher
from kleash.measuring.rescoring import SourceChecks
from kleash.measuring.sequence_clusters import Ledger
from kleash.measuring.shards import plan, source_sha256
from kleash.models import SAMPLER, Pair, find_checkpoint
from kleash.models.checkpoints.resolution import GENERATION
from kleash.records import MeasureJob, Measurement, Number, RunFolder, RunHeader
from kleash.reports import write_report
from kleash.version import __version__

FEWEST_CLUSTERS = 64
"""``until_relative_error`` does not stop before so many: an error estimated from fewer can be small by luck."""


def default_out() -> str:
    """Where a run goes that was not told: a folder named by the date and the time."""
    return str(Path("kleash-runs") / datetime.now().strftime("%Y-%m-%d-%H%M%S"))


def measure(job: MeasureJob, watcher: Watcher | None = None) -> Measurement:
    """Measure how far a policy has drifted from its reference.

    Writes ``measurement.json``, ``tokens/``, ``sequences/``, ``alternatives.parquet`` and
    ``report.html`` into ``job.out``. Killed at any moment, it goes on with ``resume=True`` where the last
    finished shard ended, and comes to the same result.

    Args:
        job: what to measure, and how.
        watcher: told how it goes.

    Returns:
        The measurement, as it stands in ``measurement.json``.

    Raises:
        SourceError: if the prompts, text or responses cannot be read.
        ModelError: if a model cannot be loaded, or the two cannot be compared.
        NonFiniteError: if a model gives NaN or infinite logits.
        RunFolderError: if ``job.out`` cannot be written or gone on with.
        OptionError, CannotRunError, MissingExtraError: if the job asks for what cannot be.
        Interrupted: at Ctrl-C, saying what was kept.
    """
    watching = watcher if watcher is not None else Nobody()
    folder = RunFolder(Path(job.out if job.out is not None else default_out()).expanduser())
    folder.check(resume=job.resume)
    for note in job.without_effect():
        watching.said(note)
    digest = source_sha256(job)
    pair = load_models(job, digest)
    for note in pair.notes:
        watching.said(note)
    header = RunHeader(
        kleash=__version__,
        settings=job.settings(),
        source_sha256=digest,
        fingerprints=_fingerprints(job, pair),
        sampler=SAMPLER,
    )
    with folder.writing(header, resume=job.resume):
        try:
            return _measure(job, pair, folder, digest, watching)
        except KeyboardInterrupt as stop:
            raise Interrupted(
                f"interrupted; what was finished is kept: go on with --resume --out {folder.root}"
            ) from stop


def _fingerprints(job: MeasureJob, pair: Pair) -> dict[str, str]:
    """What stands for the models, and for where the policy's responses end if it is to answer."""
    models = {"policy": pair.policy.fingerprint, "reference": pair.reference.fingerprint}
    if job.source[0] != "prompts":
        return models
    ends = find_checkpoint(job.policy, job.revision_policy).generation_fingerprint()
    return {**models, f"policy {GENERATION}": ends}


def _measure(job: MeasureJob, pair: Pair, folder: RunFolder, digest: str, watching: Watcher) -> Measurement:
    began = monotonic()
    with filled_cache(job, pair) as cache:
        engine = LocalEngine(pair=pair, job=job, cache=cache, generated=watching.generated, top=TOP)
        checks = run_shards(job, pair, folder, engine, watching)
    if engine.runs_below_float32:
        watching.said("the reference is loaded once more, in float32, for dtype_gap")
    run = Run(job=job, pair=pair, folder=folder, engine=engine, source_sha256=digest, checks=checks)
    measurement = summarise(run, seconds=lambda: monotonic() - began)
    folder.write_measurement(measurement)
    write_report(folder.root)
    return measurement


def run_shards(
    job: MeasureJob, pair: Pair, folder: RunFolder, engine: LocalEngine, watching: Watcher
) -> SourceChecks:
    """Do the shards that are not there yet, until all are or the error is small enough; returns the source's checks."""
    finished = folder.finished_shards()
    ledger = Ledger(on_text=job.source[0] == "text", one_model=pair.is_one_model)
    parts = folder.token_parts(list(Ledger.READ))
    worst, checks = Largest(most=WORST_SEQUENCES), SourceChecks(temperature=job.temperature)
    if finished:
        watching.said(f"going on after {finished} finished shards in {folder.root}")
    planned = plan(job, pair)
    watching.planned(planned.sequences)
    for shard in planned.shards:
        checks.add(shard.sequences)
        if shard.index < finished:
            part = next(parts)
            ledger.add(part)
            offer_sequences(worst, part)
        else:
            result = engine.run(shard)
            offer_sequences(worst, result.tokens)
            top = top_rows(worst, result.tokens, result.likeliest)
            folder.write_shard(shard.index, result.tokens, result.sequences, top)
            ledger.add(result.tokens)
            watching.scored(len(result.sequences["prompt_id"]), len(result.tokens["token_id"]))
        sofar = ledger.kl()
        watching.shard_written(Number.of(sofar))
        wanted = job.until_relative_error
        if wanted is not None and sofar.clusters >= FEWEST_CLUSTERS and sofar.relative_error <= wanted:
            break
    return checks
