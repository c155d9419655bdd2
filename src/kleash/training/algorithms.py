"""``train``: runs a training job with the trainer of its algorithm."""

from kleash.errors import OptionError
from kleash.jobs import DistillJob, DPOJob, GRPOJob, PPOJob, RLOOJob, TrainJob
from kleash.store import TrainingResult
from kleash.training.run_log import Display
from kleash.training.runner import Trainer, run_job


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
    return run_job(job, trainer_of(job), display)


def trainer_of(job: TrainJob) -> Trainer:
    """The training function of a job."""
    match job:
        case PPOJob():
            from kleash.training.ppo import train_ppo

            return train_ppo
        case GRPOJob():
            from kleash.training.with_trl.online import train_grpo

            return train_grpo
        case RLOOJob():
            from kleash.training.with_trl.online import train_rloo

            return train_rloo
        case DPOJob():
            from kleash.training.with_trl.preferences import train_dpo

            return train_dpo
        case DistillJob():
            from kleash.training.with_trl.distillation import train_distill

            return train_distill
        case _:
            raise OptionError(
                f"nothing trains a {type(job).__name__}; give a PPOJob, GRPOJob, RLOOJob, DPOJob or DistillJob"
            )
