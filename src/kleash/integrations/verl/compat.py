"""verl beyond its documented interface: the versions known, and every function, method and attribute that is replaced.

Known: verl 0.9, and 0.8 without the exact KL; another version is a warning. What is replaced is checked first; a
function or argument that is missing is a ``CannotRunError`` that names it.

| of verl | replaced or read for |
|---|---|
| ``core_algos.kl_penalty_forward``, ``core_algos.get_kl_controller`` | the penalty, the controllers |
| ``core_algos.kl_penalty``, ``core_algos.agg_loss``, ``ray_trainer.apply_kl_penalty`` | masked tokens, padding |
| ``utils.need_reference_policy`` | a word where no KL is trained |
| ``PPOTrainer``, ``RayPPOTrainer``: ``_save_checkpoint``, ``_load_checkpoint`` | the state of the controller |
| ``FSDPEngineWithLMHead.forward_step``, ``.prepare_model_outputs`` | the exact KL |
| ``workers.utils.losses.ppo_loss`` and every module that imported it by name | the exact KL |
| ``workers.utils.padding.no_padding_2_padding`` | the positions of responses |
| ``trainer.distillation.fsdp.losses.compute_forward_kl_topk`` | the top-k distillation loss |
| ``utils.ulysses``: ``slice_input_tensor``, ``get_ulysses_sequence_parallel_world_size`` | a rank's positions |
"""

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kleash.errors import MissingExtraError
from kleash.extras import warn_if_untested

CORE = "verl.trainer.ppo.core_algos"
ENGINE = "verl.workers.engine.fsdp.transformer_impl"
LOSSES = "verl.workers.utils.losses"
TOP_K_LOSSES = "verl.trainer.distillation.fsdp.losses"
TRAINER = "verl.trainer.ppo.v1.trainer_base"
RAY_TRAINER = "verl.trainer.ppo.ray_trainer"
UTILS = "verl.trainer.ppo.utils"


def import_core() -> None:
    """Import verl's module ``core_algos``, and check its version.

    Raises:
        MissingExtraError: if verl, or something that it imports, is not installed.
    """
    try:
        import_module(CORE)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{str(error.name).partition('.')[0]} is not installed; "
            "run: pip install --no-deps verl, and pip install what it imports"
        ) from error
    warn_if_untested("verl", at_least="0.8", below="0.10")


def apply_kl_penalty(original: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """verl's function of this name, on the responses that have tokens; it reads 0 at masked tokens.

    verl's v1 trainer pads a batch by responses without tokens, which verl counts as measured, with a KL of 0.
    """
    is_counted = data.batch["response_mask"].bool()
    has_tokens = is_counted.any(-1)
    counted = data.select_idxs(has_tokens)
    for name in ("old_log_probs", "ref_log_prob"):
        counted.batch[name] = torch.where(is_counted[has_tokens], counted.batch[name], 0.0)
    counted, metrics = original(counted, *args, **kwargs)
    rewards = counted.batch["token_level_rewards"]
    scores = data.batch["token_level_scores"].to(rewards)
    data.batch["token_level_rewards"] = scores.index_put((has_tokens,), rewards)
    return data, metrics


def need_reference_policy(original: Callable[..., bool], config: Any) -> bool:
    """verl's function of this name, which its trainers ask first, with a warning where no KL is trained."""
    actor = config.actor_rollout_ref.actor
    has_loss = actor.use_kl_loss and getattr(actor, "kl_loss_coef", None) != 0
    if not (has_loss or config.algorithm.get("use_kl_in_reward", False)):
        warnings.warn(
            "kleash is installed in verl, and no KL is trained: set algorithm.use_kl_in_reward, or "
            "actor_rollout_ref.actor.use_kl_loss with a kl_loss_coef above 0",
            stacklevel=3,
        )
    return original(config)


def response_rows(packed: Tensor, data: Any) -> Tensor:
    """The rows of a packed tensor that predict responses, ``[batch, time, …]``, by verl's own function."""
    return import_module("verl.workers.utils.padding").no_padding_2_padding(packed, data)


def packed_positions(nested: Tensor) -> Tensor:
    """The positions of a nested tensor, one sequence after the other, ``[1, tokens, …]``: this rank's under Ulysses."""
    ulysses, packed = import_module("verl.utils.ulysses"), nested.values().unsqueeze(0)
    is_split = ulysses.get_ulysses_sequence_parallel_world_size() > 1
    return ulysses.slice_input_tensor(packed, dim=1) if is_split else packed
