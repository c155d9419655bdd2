"""``install``: replaces verl's KL penalty and controllers in this process, and adds the exact KL to its engine."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from torch import Tensor

from kleash.divergences import find_divergence
from kleash.estimators.sampled import with_k2_gradient
from kleash.extras import Wrappers, replace_everywhere, wrap_after_import
from kleash.integrations.verl import penalty
from kleash.integrations.verl.compat import (
    CORE,
    ENGINE,
    LOSSES,
    RAY_TRAINER,
    TOP_K_LOSSES,
    TRAINER,
    UTILS,
    apply_kl_penalty,
    import_core,
    need_reference_policy,
)
from kleash.integrations.verl.distillation import compute_topk_loss
from kleash.integrations.verl.exact import ExactKL
from kleash.integrations.verl.kl_controller import get_kl_controller, load_checkpoint, save_checkpoint
from kleash.masking import select_and_call

EXACT_KL = ExactKL()
"""The exact KL of this process."""


def _kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """The penalty of a name; "exact" in verl's loss is the KL that its engine has computed, with ``+`` by k2."""
    value = EXACT_KL.micro_batch_kl
    if value is None or not penalty.is_exact(kl_penalty):
        return penalty.kl_penalty(logprob, ref_logprob, kl_penalty)
    return with_k2_gradient(value, logprob, ref_logprob) if kl_penalty.endswith("+") else value


PENALTY_ARGUMENTS = ("logprob", "ref_logprob", "kl_penalty")
REPLACEMENTS: Wrappers = MappingProxyType(
    {
        "kl_penalty_forward": (PENALTY_ARGUMENTS, _kl_penalty),
        "kl_penalty": (PENALTY_ARGUMENTS, _kl_penalty),
        "get_kl_controller": (("kl_ctrl",), get_kl_controller),
    }
)
"""What is replaced in ``core_algos``."""
_CHECKPOINTS = {
    "_save_checkpoint": (("self",), save_checkpoint),
    "_load_checkpoint": (("self",), load_checkpoint),
}
_AVERAGED = ("loss_mat", "loss_mask")
WRAPPERS: Mapping[str, Wrappers] = MappingProxyType(
    {
        CORE: {"agg_loss": (_AVERAGED, partial(select_and_call, _AVERAGED))},
        UTILS: {"need_reference_policy": (("config",), need_reference_policy)},
        TRAINER: {f"PPOTrainer.{name}": wrapper for name, wrapper in _CHECKPOINTS.items()},
        RAY_TRAINER: {
            "apply_kl_penalty": (("data", "kl_ctrl", "kl_penalty"), apply_kl_penalty),
            **{f"RayPPOTrainer.{name}": wrapper for name, wrapper in _CHECKPOINTS.items()},
        },
    }
)
"""Module -> what is wrapped in it."""
EXACT_WRAPPERS: Mapping[str, Wrappers] = MappingProxyType(
    {
        ENGINE: {
            "FSDPEngineWithLMHead.forward_step": (
                ("micro_batch", "loss_function", "forward_only"),
                EXACT_KL.forward_step,
            ),
            "FSDPEngineWithLMHead.prepare_model_outputs": (
                ("output", "output_args", "micro_batch", "logits_processor_func"),
                EXACT_KL.prepare_model_outputs,
            ),
        },
        LOSSES: {"ppo_loss": (("config", "model_output", "data", "dp_group"), EXACT_KL.ppo_loss)},
    }
)
"""Module -> what is wrapped in it besides, for the exact KL."""


def install(*, exact: bool = False, top_k_distillation: str | None = None) -> None:
    """Replace verl's KL penalty and controllers in this process and, with ``exact``, add the exact KL to its loss.

    - ``kl_penalty_forward``, which verl's ``kl_penalty`` looks up when it is called: without clamp, otherwise the same
      numbers; and ``kl_penalty``, for the gradient of ``+``.
    - ``agg_loss`` and ``apply_kl_penalty`` multiply by the mask: they get 0 at masked tokens, which may be NaN.
    - ``get_kl_controller``, which verl's trainers look up when they call it: ``algorithm.kl_ctrl.type`` may be "pid",
      "dual" or "ziegler" besides verl's "fixed" and "adaptive" (Ziegler's, here with bounds). Their methods
      ``_save_checkpoint`` and ``_load_checkpoint`` save and load the controller's state too.
    - ``need_reference_policy``: a warning where the configuration trains no KL.
    - with ``exact``: the FSDP engine and ``ppo_loss``, for ``kl_loss_type=exact``. Every pass of the reference then
      outputs its final hidden states, ``[tokens, dim]``, which verl passes to the update with its data.
    - with ``top_k_distillation``: the loss of ``distillation_loss.loss_mode=forward_kl_topk`` under FSDP, with the rest
      of the vocabulary as one token and in the direction that is named.

    Each process of verl needs it: put the call into a module that ``VERL_USE_EXTERNAL_MODULES`` names. A second call
    changes nothing.

    Args:
        exact: whether to wrap the engine for the exact KL.
        top_k_distillation: a name of ``DIVERGENCES``, of D(teacher || student): "kl", or "reverse_kl" for KL(student ||
            teacher); None for verl's own loss.

    Raises:
        UnknownNameError: if there is no such divergence.
        MissingExtraError: if verl, or something that it imports, is not installed.
        CannotRunError: if this verl lacks a function or argument that is replaced; the message names it.
    """
    import_core()
    wrapped = {**WRAPPERS, **(EXACT_WRAPPERS if exact else {})}
    if top_k_distillation is not None:
        find_divergence(top_k_distillation)
        arguments = ("student_logits", "teacher_topk_log_probs", "teacher_topk_ids", "config", "data_format")
        wrapped[TOP_K_LOSSES] = {
            "compute_forward_kl_topk": (arguments, partial(compute_topk_loss, top_k_distillation))
        }
    wrap_after_import(CORE, REPLACEMENTS, put=replace_everywhere)
    for module, wrappers in wrapped.items():
        wrap_after_import(module, wrappers)
