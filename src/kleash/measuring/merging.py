"""Making one run of the parts that array tasks scored."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kleash.errors import ModelError, RunFolderError, SourceError
from kleash.jobs import MeasureJob
from kleash.jobs.option_groups import is_endpoint
from kleash.measuring.progress import NullProgressReporter, ProgressReporter
from kleash.measuring.run import measure
from kleash.models import find_source
from kleash.models.checkpoints.resolution import find_checkpoint
from kleash.reports.trackers import require_trackers
from kleash.store import ArrayTask, Measurement, RunFolder
from kleash.store.array_task import part_folders
from kleash.store.job_folder import OtherRunError, RunHeader, describe_differences
from kleash.store.worker_log import append_worker_lines, read_worker_lines
from kleash.version import __version__


def merge(
    out: Path,
    reporter: ProgressReporter | None = None,
    *,
    at_most: float | None = None,
    direction: str | None = None,
    report_to: Sequence[str] = (),
) -> Measurement:
    """Make one run of the parts that ``measure_part`` scored into ``out``, with the numbers of a single process.

    Copies the shards, verified by their checksums, and makes the measurement as a resumed run does: the models are
    loaded for the noise floor and the texts of tokens, and no shard is scored. An interrupted merge is started again.

    Args:
        out: the folder with the parts, which becomes that of the run.
        reporter: receives the progress.
        at_most: the limit of a gate in nats per token, as in ``MeasureJob``; None for no gate.
        direction: which KL the limit is for, as in ``MeasureJob``.
        report_to: names of trackers that get the numbers, as in ``MeasureJob``.

    Returns:
        The measurement, as in ``measurement.json``.

    Raises:
        RunFolderError: if parts are missing, unfinished, damaged, of different runs or of another version, or their
            models or source have changed.
        SourceError, ModelError: if these are not there, such as under a relative path of another working folder.
        OptionError: if ``at_most`` is not a limit, or a tracker is not known.
        MissingExtraError: if a tracker is not installed.
        And what ``measure`` raises.
    """
    reporter = reporter if reporter is not None else NullProgressReporter()
    require_trackers(report_to)
    folders = part_folders(out)
    tasks = [ArrayTask.read(folder) for folder in folders]
    headers = [RunFolder(folder).header() for folder in folders]
    _require_one_run(folders, tasks, headers)
    job = replace(_job_of(headers[0], out), at_most=at_most, direction=direction, report_to=tuple(report_to))
    _require_inputs(job)
    run = RunFolder(out)
    with (
        _other_run_described(
            f"{out} holds another run than its parts", "move the parts into a folder of their own"
        ),
        run.writing(headers[0], resume=True),
    ):
        on_disk = set(run.finished_shards())
        for folder, task in zip(folders, tasks, strict=True):
            part = RunFolder(folder)
            part.require_shards(task.shards, task.indices)
            to_copy = [index for index in task.indices if index not in on_disk]
            lines = read_worker_lines(folder)
            append_worker_lines(out, [lines[index] for index in to_copy if index in lines])
            run.copy_shards(to_copy, part)
        run.require_shards(tasks[0].shards)
    reporter.note(f"{tasks[0].shards} shards of {len(folders)} parts are in {out}")
    with _other_run_described(
        f"the parts in {out} were scored with other inputs", "put these back, or score the parts again"
    ):
        return measure(job, reporter)


@contextmanager
def _other_run_described(subject: str, advice: str) -> Generator[None]:
    """Context in which a folder that holds another run is an error with advice for a merge, which has no ``--out``."""
    try:
        yield
    except OtherRunError as error:
        raise RunFolderError(f"{subject}: {'; '.join(error.differences)}; {advice}, then merge") from error


def _require_inputs(job: MeasureJob) -> None:
    """Check that the source and the models of a job are there, before anything is copied.

    Raises:
        SourceError, ModelError: if one is not.
    """
    kind, name = job.source
    advice = "relative paths are those of the tasks: merge in the folder in which they ran"
    try:
        find_source(name, kind, job)
    except SourceError as error:
        raise SourceError(f"{error}; {advice}") from error
    models = [(job.policy, job.revision_policy)]
    if job.reference_cache is None:
        models.append((job.reference, job.revision_reference))
    try:
        for model, revision in models:
            if not is_endpoint(model):
                find_checkpoint(model, revision)
    except ModelError as error:
        raise ModelError(f"{error}; {advice}") from error


def _require_one_run(folders: list[Path], tasks: list[ArrayTask], headers: list[RunHeader]) -> None:
    """Raise RunFolderError unless all parts are of one run."""
    for folder, task, header in zip(folders, tasks, headers, strict=True):
        first = {**headers[0].described(), "the number of shards": tasks[0].shards}
        this = {**header.described(), "the number of shards": task.shards}
        differences = [
            *describe_differences(first, this, f"in {folders[0].name}"),
            *headers[0].probe_differences(header),
        ]
        if differences:
            raise RunFolderError(
                f"{folder} is of another run: {'; '.join(differences)}; score it again with the same options, files "
                "and version"
            )


def _job_of(header: RunHeader, out: Path) -> MeasureJob:
    """The job whose parts these are, writing to ``out``.

    Raises:
        RunFolderError: if another version of kleash scored the parts, whose numbers this one would not resume.
    """
    if header.kleash != __version__:
        raise RunFolderError(
            f"the parts in {out} were scored by kleash {header.kleash} and this is kleash {__version__}; merge with "
            "that version"
        )
    settings: dict[str, Any] = dict(header.settings)
    return MeasureJob(**settings, out=str(out), resume=True)
