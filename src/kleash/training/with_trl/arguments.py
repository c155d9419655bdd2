"""A job's options as TRL's configurations spell them."""

import math
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from kleash.errors import OptionError
from kleash.extras import import_extra
from kleash.jobs import TrainJob
from kleash.models.pair_loading import resolve_device, resolve_dtype
from kleash.training.model_options import require_trainable

CHECKPOINTS = "checkpoints"
PROMPT_COLUMN = "kleash_prompt"
"""Column of the data set: which prompt it is."""
ALWAYS = MappingProxyType(
    {
        "save_total_limit": 2,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
    }
)


def shared_arguments(job: TrainJob, *, rows: int, row_tokens: int, updates: int = 1) -> dict[str, Any]:
    """What every one of TRL's configurations is given.

    A step's rows go through the model in micro-batches of equal size, as many rows at once as ``batch_tokens``
    allows, whose gradients are added up.

    Args:
        job: the options.
        rows: responses (or pairs) of a step, over all processes.
        row_tokens: the most tokens of one.
        updates: updates that are made of a step.

    Raises:
        OptionError: if the rows cannot be shared out to the processes, or nothing can be trained in the dtype.
        CannotRunError: if the device is not there.
    """
    place = resolve_device(job.device, None)
    require_trainable(job.dtype)
    processes = import_extra("accelerate", "trl").PartialState(cpu=place.type == "cpu").num_processes
    if rows % processes:
        raise OptionError(
            f"{rows} rows a step cannot be shared out to {processes} processes evenly; give a multiple"
        )
    rows_per_process = rows // processes
    at_once = largest_divisor(rows_per_process, at_most=max(1, job.batch_tokens // row_tokens))
    return {
        "output_dir": str(Path(str(job.out)) / CHECKPOINTS),
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": rows_per_process // at_once,
        "max_steps": job.steps * updates,
        "logging_steps": updates,
        "save_strategy": "steps",
        "save_steps": job.checkpoint_every * updates,
        "learning_rate": job.learning_rate,
        "max_grad_norm": job.max_gradient_norm,
        "seed": job.seed % 2**32,
        "bf16": resolve_dtype(job.dtype, place) == torch.bfloat16,
        "use_cpu": place.type == "cpu",
        "gradient_checkpointing": place.type != "cpu",
        **ALWAYS,
    }


def largest_divisor(number: int, *, at_most: int) -> int:
    """The largest divisor of ``number`` that is not above ``at_most`` (at least 1)."""
    divisors = [
        divisor
        for small in range(1, math.isqrt(number) + 1)
        if number % small == 0
        for divisor in (small, number // small)
        if divisor <= at_most
    ]
    return max(divisors, default=1)
