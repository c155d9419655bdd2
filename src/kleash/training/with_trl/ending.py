"""Running one of TRL's trainers from wherever a run stands to its end."""

from collections.abc import Iterator
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
    """Inside, neither transformers nor datasets show bars or warn; the journal shows what happens."""
    utils = need("datasets.utils", "trl")
    bars = utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        with quiet():
            yield
    finally:
        if not bars:
            utils.enable_progress_bars()


def run(trainer: Any, journalling: Journalling, job: TrainJob) -> TrainingResult:
    """Train to the end, from the last whole checkpoint if the job goes on, and leave the policy in ``policy/``."""
    root = Path(str(job.out))
    checkpoint = last_checkpoint(root) if job.resume else None
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
    )


def last_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint that was written to its end; None if there is none."""
    whole = [path.parent for path in (root / CHECKPOINTS).glob(f"checkpoint-*/{STATE}")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
