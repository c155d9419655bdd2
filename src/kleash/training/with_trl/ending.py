"""Running one of TRL's trainers from wherever a run stands to its end."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kleash.extras import need
from kleash.models.quiet import quiet
from kleash.records import TrainingResult, TrainJob
from kleash.training.with_trl.arguments import CHECKPOINTS
from kleash.training.with_trl.journalling import Journalling
from kleash.version import __version__

POLICY = "policy"
STATE = "trainer_state.json"
"""What transformers writes into a checkpoint last."""


@contextmanager
def silently() -> Iterator[None]:
    """Inside, neither transformers nor datasets show bars or warn, nor our callbacks: the journal shows it all."""
    utils = need("datasets.utils", "trl")
    bars = utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    callbacks = logging.getLogger("kleash.integrations.trainer")
    level = callbacks.level
    callbacks.setLevel(logging.ERROR)
    try:
        with quiet():
            yield
    finally:
        callbacks.setLevel(level)
        if not bars:
            utils.enable_progress_bars()


def run(trainer: Any, journalling: Journalling, job: TrainJob, dtypes: Mapping[str, str]) -> TrainingResult:
    """Train to the end, from the last whole checkpoint if the job goes on, and leave the policy in ``policy/``.

    A run that has taken all its steps, or that the watch has stopped, takes no more.
    """
    root = Path(str(job.out))
    checkpoint = last_checkpoint(root) if job.resume else None
    if checkpoint is not None:
        stopped, taken = journalling.was_stopped(step_of(checkpoint)), step_of(checkpoint)
        if stopped or taken >= trainer.args.max_steps:  # of which transformers would take one more
            trainer.args.max_steps, trainer.args.num_train_epochs = -1, 0
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.save_model(str(root / POLICY))
    trainer.accelerator.wait_for_everyone()
    beta = getattr(trainer, "beta", None) if hasattr(job, "beta") else None
    outcome = journalling.outcome
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


def last_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint that was written to its end; None if there is none."""
    whole = [path.parent for path in (root / CHECKPOINTS).glob(f"checkpoint-*/{STATE}")]
    return max(whole, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """TRL's steps that a checkpoint stands after."""
    return int(checkpoint.name.rpartition("-")[2])
