"""Runs a trainer of TRL to the end, from the last checkpoint when resuming."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from kleash.extras import import_extra, suppress_library_output
from kleash.jobs import TrainJob
from kleash.launch_environment import launched_rank
from kleash.sandbox.process import sandboxed_templates
from kleash.store import TrainingResult
from kleash.store.checksums import Checksums
from kleash.store.training_folder import DAMAGED, checkpoint_number, last_checkpoint
from kleash.training.checkpoints import POLICY
from kleash.training.run_log import RunLog
from kleash.training.runner import Trainer, run_job
from kleash.training.with_trl.step_logger import StepLogger
from kleash.version import __version__


@contextmanager
def suppress_output() -> Iterator[None]:
    """Context without progress bars and warnings of transformers, datasets and kleash's callbacks."""
    utils = import_extra("datasets.utils", "trl")
    bars = utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    callbacks = logging.getLogger("kleash.integrations.trainer")
    level = callbacks.level
    callbacks.setLevel(logging.ERROR)
    try:
        with suppress_library_output(), sandboxed_templates():  # TRL renders chat templates
            yield
    finally:
        callbacks.setLevel(level)
        if not bars:
            utils.enable_progress_bars()


def silent_trainer(trainer: Trainer) -> Callable[..., TrainingResult]:
    """Return ``trainer`` with the output of the libraries suppressed.

    Without a run log, on rank 0, the returned function runs the whole job (``run_job``): that makes the run folder and
    the run log, and calls it again with the log. On other ranks there is no run log, and it only trains.
    """

    @wraps(trainer)
    def train_silently(job: TrainJob, run_log: RunLog | None = None) -> TrainingResult:
        if run_log is None and launched_rank() == 0:
            return run_job(job, train_silently)
        with suppress_output():
            return trainer(job, run_log)

    return train_silently


def run_trainer(
    trainer: Any, step_logger: StepLogger, job: TrainJob, dtypes: Mapping[str, str]
) -> TrainingResult:
    """Train to the end, from the last finished checkpoint if the job resumes, and save the policy to ``policy/``.

    A run that has taken all its steps, or that the hacking monitor has stopped, takes no further step.
    """
    root = Path(str(job.out))
    checkpoint = last_checkpoint(root) if job.resume else None
    if checkpoint is not None:
        Checksums.read(checkpoint).check_all(advice=DAMAGED)
        taken = checkpoint_number(checkpoint) or 0
        if (
            step_logger.was_stopped(taken) or taken >= trainer.args.max_steps
        ):  # transformers would take one more
            trainer.args.max_steps, trainer.args.num_train_epochs = -1, 0
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.save_model(str(root / POLICY))
    trainer.accelerator.wait_for_everyone()
    beta = getattr(trainer, "beta", None) if hasattr(job, "beta") else None
    outcome = step_logger.outcome
    return TrainingResult(
        kleash=__version__,
        algorithm=job.algorithm,
        steps=outcome.step,
        stopped=outcome.stopped,
        metrics=outcome.metrics,
        beta=beta,
        policy=str(root / POLICY),
        out=str(root),
        dtypes=dtypes,
    )
