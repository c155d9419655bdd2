"""Runs a trainer of TRL with the options of a job to the end, from the last checkpoint when resuming."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kleash.errors import OptionError
from kleash.extras import import_extra, suppress_library_output, warn_if_untested
from kleash.jobs import TrainJob
from kleash.models.pair_loading import resolve_device, resolve_dtype
from kleash.sandbox.process import sandboxed_templates
from kleash.store import TrainingResult
from kleash.store.checksums import Checksums
from kleash.store.training_folder import CHECKPOINTS, DAMAGED, POLICY, checkpoint_number, last_checkpoint
from kleash.training.networks import Networks
from kleash.training.response_metrics import of_first_process
from kleash.training.run_log import RunLog
from kleash.training.step_logger import StepLogger

PROMPT_COLUMN = "kleash_prompt"
"""Column of the data set with the index of the prompt."""


@contextmanager
def suppress_output() -> Iterator[None]:
    """Context or decorator without progress bars and warnings of transformers, datasets and kleash's callbacks.

    That TRL has another version than kleash's commands are tested with is a warning before.
    """
    utils = import_extra("datasets.utils", "trl")
    warn_if_untested("trl", at_least="1.16", below="1.17")
    callbacks = logging.getLogger("kleash.integrations.trainer")
    with (
        suppress_library_output(),
        sandboxed_templates(),  # since TRL renders chat templates
        ExitStack() as restored,
    ):
        if not utils.are_progress_bars_disabled():
            restored.callback(utils.enable_progress_bars)
            utils.disable_progress_bars()
        restored.callback(callbacks.setLevel, callbacks.level)
        callbacks.setLevel(logging.ERROR)
        yield


def run_trainer(
    trainer: Any,
    job: TrainJob,
    run_log: RunLog | None,
    networks: Networks,
    *,
    notes: Sequence[str] = (),
    **options: Any,
) -> TrainingResult:
    """Train to the end, from the last finished checkpoint if the job resumes, and save the policy to ``policy/``.

    A run that has taken all its steps, or that the hacking monitor has stopped, takes no further step.

    Args:
        trainer: of TRL, with its other callbacks.
        job: the training job; ``out`` is set.
        run_log: records the steps; None on ranks other than 0.
        networks: those of the trainer.
        notes: what is shown when training starts, beside the notes about the models.
        options: further arguments of the ``StepLogger`` that writes to the run log.
    """
    step_logger = StepLogger(job, run_log, notes=(*networks.pair.notes, *notes), **options).attach(trainer)
    trainer.remove_callback(import_extra("transformers.trainer_callback", "trl").PrinterCallback)
    root = Path(str(job.out))
    checkpoint = of_first_process(last_checkpoint(root) if job.resume else None)
    if checkpoint is not None:
        Checksums.read(checkpoint).check_all(advice=DAMAGED)
        taken = checkpoint_number(checkpoint) or 0
        if (
            step_logger.was_stopped(taken) or taken >= trainer.args.max_steps
        ):  # transformers would take one more
            trainer.args.max_steps, trainer.args.num_train_epochs = -1, 0
    if job.lora_rank:
        # PEFT would read the base's config.json each time, which may have changed, to see if tokens were added.
        trainer.model.save_pretrained = partial(trainer.model.save_pretrained, save_embedding_layers=False)
    # else the policy would be saved in the parts that the processes have
    if trainer.is_deepspeed_enabled:
        config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        config.setdefault("zero_optimization", {})["stage3_gather_16bit_weights_on_model_save"] = True
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(root / POLICY))
    trainer.accelerator.wait_for_everyone()
    return step_logger.result(job.algorithm, policy=str(root / POLICY), out=str(root), dtypes=networks.dtypes)


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
    batch_size = even_batch(rows_per_process, max(1, job.batch_tokens // row_tokens))
    return {
        "output_dir": str(Path(str(job.out)) / CHECKPOINTS),
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": rows_per_process // batch_size,
        "max_steps": job.steps * updates,
        "logging_steps": updates,
        "save_strategy": "steps",
        "save_steps": job.checkpoint_every * updates,
        "learning_rate": job.learning_rate,
        "seed": job.seed % 2**32,
        "bf16": resolve_dtype(job.dtype, device) == torch.bfloat16,
        "use_cpu": device.type == "cpu",
        "gradient_checkpointing": device.type != "cpu",
        "save_total_limit": 2,
        "lr_scheduler_type": "constant_with_warmup",
        "report_to": "none",
        "disable_tqdm": True,
    }


def even_batch(rows: int, most: int) -> int:
    """The largest size of batches, up to ``most``, that divides the rows evenly."""
    return next((size for size in range(min(rows, most), 1, -1) if rows % size == 0), 1)


def held_out_arguments(job: TrainJob, *, rows: int, best: str, updates: int = 1) -> dict[str, Any]:
    """The arguments by which held-out rows are evaluated with each checkpoint, of which the best is kept.

    Args:
        job: the training job.
        rows: held-out rows of a batch on one process.
        best: the metric of the evaluation that tells the best checkpoint: a loss, or a reward.
        updates: optimiser updates per step.
    """
    return {
        "eval_strategy": "steps",
        "eval_steps": job.checkpoint_every * updates,
        "per_device_eval_batch_size": rows,
        "metric_for_best_model": best,
        "greater_is_better": not best.endswith("loss"),
    }
