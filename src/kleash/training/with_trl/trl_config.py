"""Translates a job's options to the arguments of TRL's configurations."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from kleash.errors import OptionError
from kleash.extras import import_extra
from kleash.jobs import TrainJob
from kleash.models.pair_loading import resolve_device, resolve_dtype

CHECKPOINTS = "checkpoints"
PROMPT_COLUMN = "kleash_prompt"
"""Column of the data set with the index of the prompt."""
FIXED_ARGUMENTS = MappingProxyType(
    {
        "save_total_limit": 2,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
    }
)


def shared_arguments(job: TrainJob, *, rows: int, row_tokens: int, updates: int = 1) -> dict[str, Any]:
    """The arguments that all of TRL's configurations have in common.

    The rows of a step are divided into micro-batches of equal size, with as many rows as ``batch_tokens`` allows, whose
    gradients are accumulated.

    Args:
        job: the training job.
        rows: responses (or pairs) of a step, over all processes.
        row_tokens: largest number of tokens of a row.
        updates: optimiser updates per step.

    Raises:
        OptionError: if the rows cannot be divided evenly among the processes.
        CannotRunError: if the device does not exist.
    """
    device = resolve_device(job.device, None)
    processes = import_extra("accelerate", "trl").PartialState(cpu=device.type == "cpu").num_processes
    if rows % processes:
        raise OptionError(
            f"{rows} rows a step cannot be divided evenly among {processes} processes; give a multiple"
        )
    rows_per_process = rows // processes
    batch_size = largest_divisor(rows_per_process, at_most=max(1, job.batch_tokens // row_tokens))
    return {
        "output_dir": str(Path(str(job.out)) / CHECKPOINTS),
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": rows_per_process // batch_size,
        "max_steps": job.steps * updates,
        "logging_steps": updates,
        "save_strategy": "steps",
        "save_steps": job.checkpoint_every * updates,
        "learning_rate": job.learning_rate,
        "max_grad_norm": job.max_gradient_norm,
        "seed": job.seed % 2**32,
        "bf16": resolve_dtype(job.dtype, device) == torch.bfloat16,
        "use_cpu": device.type == "cpu",
        "gradient_checkpointing": device.type != "cpu",
        **FIXED_ARGUMENTS,
    }


def largest_divisor(number: int, *, at_most: int) -> int:
    """The largest divisor of ``number`` that is at most ``at_most``; at least 1."""
    return next(divisor for divisor in range(min(at_most, number), 0, -1) if number % divisor == 0)
