"""``train``: runs a training job with the trainer of its algorithm."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from kleash.errors import OptionError
from kleash.jobs import TrainJob
from kleash.store import TrainingResult
from kleash.training.run_log import Display
from kleash.training.runner import run_job

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
    if job.algorithm not in TRAINERS:
        raise OptionError(f"nothing trains a {type(job).__name__}; give a job of {', '.join(TRAINERS)}")
    module, _, function = TRAINERS[job.algorithm].partition(":")
    return run_job(job, getattr(import_module(f"kleash.training.{module}"), function), display)
