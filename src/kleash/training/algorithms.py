"""``train``: runs a training job with the trainer of its algorithm."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType

from kleash.errors import Interrupted, KleashError, OptionError
from kleash.jobs import DPOJob, TrainJob
from kleash.jobs.train import OnlineJob
from kleash.launch_environment import launched_rank
from kleash.measuring.run import default_out
from kleash.models import describe_source
from kleash.models.threads import threads_for
from kleash.store import TrainingFolder, TrainingResult
from kleash.store.atomic import cannot_write, is_disk_full
from kleash.store.file_hashes import watching_files
from kleash.training.header_and_result import finish, header_of, interrupted, models_of
from kleash.training.library_fields import refused_fields, set_fields
from kleash.training.run_log import Display, RunLog

TRAINERS: Mapping[str, str] = MappingProxyType(
    {
        "ppo": "ppo:train_ppo",
        "grpo": "with_trl.online:train_online",
        "rloo": "with_trl.online:train_online",
        "dpo": "with_trl.preferences:train_dpo",
        "distill": "with_trl.distillation:train_distill",
    }
)
"""Algorithm of a job -> module and function that trains by it, imported when it is needed."""


def train(job: TrainJob, display: Display | None = None) -> TrainingResult:
    """Train a policy with a KL term to its reference.

    Writes ``steps.jsonl``, ``samples.jsonl``, ``checkpoints/``, ``policy/``, ``training.json`` and ``report.html``
    into ``job.out``. An interrupted run continues with ``resume=True`` from the last checkpoint. With several processes
    (``accelerate launch``) each calls this; rank 0 writes.

    Args:
        job: the training job.
        display: shown every step.

    Returns:
        The result, as in ``training.json``.

    Raises:
        SourceError: if the prompts or pairs cannot be read.
        ModelError: if a model cannot be loaded.
        NonFiniteError: if a loss or a reward is NaN.
        RunFolderError: if ``job.out`` cannot be written or resumed.
        OptionError, UnknownNameError, CannotRunError, MissingExtraError: if an option is unsupported or a
            dependency is missing.
        Interrupted: at Ctrl-C.
    """
    if not isinstance(job, OnlineJob | DPOJob):
        raise OptionError(f"nothing trains a {type(job).__name__}; give a job of {', '.join(TRAINERS)}")
    trainer = refused_fields(job)(resolve_name(f"kleash.training.{TRAINERS[job.algorithm]}"))
    out = Path(job.out if job.out is not None else default_out()).expanduser()
    job = replace(job, out=str(out))
    with watching_files(), threads_for([*models_of(job).values()], device=job.device) as notes:
        if launched_rank() != 0:
            return trainer(job, None)
        set_fields(job)  # whose errors come before the folder is made
        folder = TrainingFolder(out)
        folder.check(resume=job.resume)
        with (
            folder.writing(header_of(job), resume=job.resume),
            closing(RunLog(folder.root, job, display=display)) as run_log,
        ):
            for note in (*notes, *describe_source(job.source_kind, job.source, job)):
                run_log.display.note(note)
            try:
                return finish(folder, run_log, trainer(job, run_log))
            except KeyboardInterrupt as stop:
                raise Interrupted(
                    interrupted(folder.root, run_log.history[-1].step if run_log.history else 0)
                ) from stop
            except Exception as error:
                if isinstance(error, KleashError) or not is_disk_full(error):
                    raise
                raise cannot_write(folder.root, error) from error
