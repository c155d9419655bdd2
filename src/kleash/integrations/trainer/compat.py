"""transformers' Trainer beyond its documented interface: the versions known, and what is read and changed.

Known: transformers 5; another version is a warning. Importing this module checks the methods and arguments that
are used; one that is missing is a ``CannotRunError`` that names it. Of torch, ``LRScheduler._last_lr`` is changed, the
learning rate that transformers logs; without it, only the logged value would be wrong.
"""

from inspect import signature
from typing import Any

from kleash.errors import ModelError
from kleash.extras import import_extra, require_attributes, warn_if_untested

import_extra("transformers.trainer", "models")
warn_if_untested("transformers", at_least="5.9", below="6")
require_attributes(
    "transformers",
    {
        "transformers:Trainer.log": ("logs",),
        "transformers:Trainer.add_callback": ("callback",),
        "transformers.trainer_callback:ExportableState.state": (),
        "transformers.trainer_callback:TrainerState": ("stateful_callbacks", "log_history"),
    },
)

from transformers import Trainer, TrainerCallback  # noqa: E402 (after the check)
from transformers.trainer_callback import ExportableState  # noqa: E402

__all__ = [
    "ExportableState",
    "Trainer",
    "TrainerCallback",
    "halve_learning_rate",
    "makes_trl_passes",
    "moves_reference",
    "tokenizer_of",
]


def moves_reference(trainer: Any) -> bool:
    """Whether TRL moves the trainer's reference: by ``sync_ref_model``, or a BEMACallback with ``update_ref_model``."""
    callbacks = trainer.callback_handler.callbacks
    return getattr(trainer.args, "sync_ref_model", False) or any(
        getattr(each, "update_ref_model", False) for each in callbacks
    )


def makes_trl_passes(trainer: Any) -> bool:
    """Whether the passes over a trainer's responses are those of TRL's GRPO and RLOO, from which they are measured.

    Those of ms-swift's GRPO take other batches, and those of Unsloth's give no log-probabilities in the loss.
    """
    parameters = signature(trainer._get_per_token_logps_and_entropies).parameters
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
    return "compute_efficient" not in parameters and ("attention_mask" in parameters or takes_any)


def halve_learning_rate(trainer: Any) -> None:
    """Halve the learning rate of the optimiser and of the scheduler, also the one that is logged."""
    scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)  # inside Accelerate's
    for name in ("base_lrs", "_init_lrs", "_last_lr"):  # of torch, of transformers' GreedyLR, and of both
        setattr(scheduler, name, [rate / 2 for rate in getattr(scheduler, name, ())])
    for group in trainer.optimizer.param_groups:
        group["lr"] /= 2


def tokenizer_of(trainer: Any) -> Any:
    """The tokenizer of a trainer, which may be a part of its processor; raises ModelError if there is none."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    if tokenizer is None:
        raise ModelError("the trainer has no processing_class; give it the policy's tokenizer")
    return tokenizer
