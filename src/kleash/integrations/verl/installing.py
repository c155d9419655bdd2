"""Putting kleash into verl's place, at the seams that it has."""

import sys
from importlib import import_module
from typing import Any

from torch import Tensor

from kleash.errors import MissingExtraError
from kleash.extras import call_after_import, require_attributes, warn_if_untested
from kleash.integrations.verl import controllers, penalty
from kleash.integrations.verl.exact import ExactKL
from kleash.losses import require_log_probabilities

__all__ = ["install"]

CORE = "verl.trainer.ppo.core_algos"
ENGINE = "verl.workers.engine.fsdp.transformer_impl"
LOSSES = "verl.workers.utils.losses"
SEAMS: dict[str, tuple[str, ...]] = {
    f"{CORE}:kl_penalty_forward": ("logprob", "ref_logprob", "kl_penalty"),
    f"{CORE}:get_kl_controller": ("kl_ctrl",),
}
ENGINE_SEAMS = {
    f"{ENGINE}:FSDPEngine.disable_adapter": ("self",),
    f"{ENGINE}:FSDPEngineWithLMHead.forward_step": ("micro_batch", "loss_function", "forward_only"),
    f"{ENGINE}:FSDPEngineWithLMHead.prepare_model_outputs": (
        *("output", "output_args", "micro_batch", "logits_processor_func"),
    ),
    "verl.workers.utils.padding:no_padding_2_padding": ("tensor", "data"),
}
LOSS_SEAMS = {
    f"{LOSSES}:ppo_loss": ("config", "model_output", "data", "dp_group"),
}


def install(*, exact: bool = False, look_at_first_batch: bool = True) -> None:
    """Let verl compute its KL here, in this process: the penalty, its controllers and, if asked for, the exact KL.

    - ``kl_penalty_forward``, which verl's ``kl_penalty`` looks up when it is called: no clamp, and no other change
      to its numbers. The ``+`` stays verl's own.
    - ``get_kl_controller``, which verl's trainers look up likewise: ``algorithm.kl_ctrl.type`` may be "pid",
      "dual" or "ziegler" besides verl's "fixed" and "adaptive" (Ziegler's, here with bounds), and its state is
      saved with verl's checkpoints.
    - with ``exact``: the FSDP engine and ``ppo_loss``, for ``kl_loss_type=exact``. Every reference pass then
      keeps its final hidden states, ``[tokens, dim]``, which travel to the update in verl's data.

    Each process of verl needs it: put it into a module that ``VERL_USE_EXTERNAL_MODULES`` names. A second call
    changes nothing.

    Args:
        exact: whether to take hold of the engine for the exact KL.
        look_at_first_batch: what verl hands over first must be able to be log-probabilities, or a
            NotProbabilitiesError says what it is instead. NaN is left alone, since verl does not say which tokens
            count. False for tests that feed it any numbers.

    Raises:
        MissingExtraError: if verl, or something that it imports, is not installed.
        CannotRunError: if this verl lacks what kleash takes hold of; it says what.
    """
    core = _imported(CORE)
    warn_if_untested("verl", at_least="0.9", below="0.10")
    require_attributes("verl", SEAMS)
    engine = _exact(core) if exact else getattr(core.kl_penalty_forward, "kleash", None)
    _replace(core, "kl_penalty_forward", _penalty(engine, look_at_first_batch))
    _replace(core, "get_kl_controller", _controller)


def _imported(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{str(error.name).partition('.')[0]} is not installed; "
            "run: pip install --no-deps verl, and pip install what it imports"
        ) from error


def _replace(owner: Any, name: str, function: Any) -> None:
    setattr(owner, name, function)


def _penalty(exact: ExactKL | None, look: bool) -> Any:
    unseen = ["the first batch"] if look else []

    def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
        if unseen:
            for side, values in (("logprob", logprob), ("ref_logprob", ref_logprob)):
                require_log_probabilities(values, ~values.isnan(), side)
            unseen.clear()
        if exact is not None and exact.in_flight is not None and penalty.NAMES.get(kl_penalty) == "exact":
            return exact.in_flight
        return penalty.kl_penalty(logprob, ref_logprob, kl_penalty)

    vars(kl_penalty_forward)["kleash"] = exact
    return kl_penalty_forward


def _controller(kl_ctrl: Any) -> controllers.KLController:
    controllers.keep_in_checkpoints()
    return controllers.get_kl_controller(kl_ctrl)


def _exact(core: Any) -> ExactKL:
    """Wrap the engine and the loss as soon as they are imported, once in a process."""
    existing: ExactKL | None = getattr(core.kl_penalty_forward, "kleash", None)
    if existing is not None:
        return existing
    exact = ExactKL()

    def take_engine(module: Any) -> None:
        require_attributes("verl", ENGINE_SEAMS)
        base, language_model = module.FSDPEngine, module.FSDPEngineWithLMHead
        _replace(base, "disable_adapter", exact.disable_adapter(base.disable_adapter))
        for method in ("forward_step", "prepare_model_outputs"):
            _replace(language_model, method, getattr(exact, method)(getattr(language_model, method)))

    def take_loss(module: Any) -> None:
        require_attributes("verl", LOSS_SEAMS)
        original, wrapped = module.ppo_loss, exact.ppo_loss(module.ppo_loss)
        for name, holder in list(sys.modules.items()):
            if name.startswith("verl.") and vars(holder).get("ppo_loss") is original:
                _replace(holder, "ppo_loss", wrapped)

    call_after_import(ENGINE, take_engine)
    call_after_import(LOSSES, take_loss)
    return exact
