"""OpenRLHF's KL by its own functions and arguments: true values, no clamp, masks that hold, beta in bounds."""

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, SupportsFloat

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.errors import OptionError, ShapeError
from kleash.estimators import sampled_kl
from kleash.extras import call_after_import, require_attributes, warn_if_untested
from kleash.kl_rules import CONTRACTS, refusal, term_spec
from kleash.leash import FixedBeta, StatefulController, beta_from_dict, shape_rewards
from kleash.precision import at_least_float32

__all__ = ["KLController", "compute_approx_kl", "compute_reward", "install"]

UTILS = "openrlhf.models.utils"
CONTROLLERS = "openrlhf.trainer.ppo_utils.kl_controller"
TRAINER = "openrlhf.trainer.ppo_trainer"
STATE = "kleash_kl_controller"
UTILS_SEAMS = {
    f"{UTILS}:compute_approx_kl": (
        *("log_probs", "log_probs_base", "log_probs_old", "kl_estimator", "unbiased_gradient"),
    ),
    f"{UTILS}:compute_reward": ("r", "kl_coef", "kl", "action_mask", "reward_clip_range"),
}
CONTROLLER_SEAMS = {
    f"{CONTROLLERS}:AdaptiveKLController": ("init_kl_coef", "target", "horizon"),
    f"{CONTROLLERS}:FixedKLController": ("kl_coef",),
}


def compute_approx_kl(
    log_probs: Float[Tensor, "*tokens"],
    log_probs_base: Float[Tensor, "*tokens"],
    log_probs_old: Float[Tensor, "*tokens"] | None = None,
    kl_estimator: str = "k1",
    unbiased_gradient: bool = False,
    *,
    cap: float | None = None,
) -> Float[Tensor, "*tokens"]:
    """KL(policy || reference) in nats per token, as ``openrlhf.models.utils.compute_approx_kl`` is called.

    | kl_estimator | value, u = log_probs - log_probs_base | gradient as it is | with unbiased_gradient |
    | k1           | u                | averages to zero: refused     | w u |
    | k2           | u^2 / 2          | of KL(policy || reference)    | w u |
    | k3           | exp(-u) - 1 + u  | of KL(reference || policy)    | w u |

    OpenRLHF bounds every value to 10, where k2 and k3 have no gradient (and, for k3, none below u = -10); and w
    to 10. Here nothing is bounded but by ``cap``. ``w u`` is the gradient of KL(policy || reference), on-policy
    (w = 1) and off-policy. Where u is infinite, ``unbiased_gradient`` passes on no gradient.

    Args:
        log_probs: of the sampled tokens under the policy.
        log_probs_base: the same tokens under the reference, in the same shape.
        log_probs_old: the same under the policy that drew them: w = exp(log_probs - log_probs_old), detached;
            None for w = 1.
        kl_estimator: "k1", "k2" or "k3".
        unbiased_gradient: the gradient of the last column, whatever the value.
        cap: the most that w may be; None for no limit.

    Raises:
        OptionError: for k1 with a gradient and not ``unbiased_gradient``: it would train nothing.
        UnknownNameError: if there is no such estimator.
        ShapeError: if shapes differ.

    References:
        OpenRLHF 0.11.2, https://github.com/OpenRLHF/OpenRLHF
    """
    value = sampled_kl(log_probs, log_probs_base, kl_estimator)
    if not unbiased_gradient:
        contract = CONTRACTS[kl_estimator]
        # Without unbiased_gradient OpenRLHF backpropagates the estimator, whichever divergence that follows.
        term = term_spec(kl_estimator, contract, gradient="backpropagated", follows=contract.backpropagated)
        reason = refusal(term, _openrlhf_option)
        if reason is not None and value.requires_grad:
            raise OptionError(reason)
        return value
    log_ratio = at_least_float32(log_probs) - at_least_float32(log_probs_base)
    log_ratio = torch.where(log_ratio.isfinite(), log_ratio, 0.0)
    weight = _weight(log_ratio, log_probs, log_probs if log_probs_old is None else log_probs_old, cap)
    detached_ratio = log_ratio.detach()
    return value.detach() + weight * detached_ratio * (log_ratio - detached_ratio)


def _openrlhf_option(field: str, value: object) -> str:
    return "--algo.kl.unbiased_gradient" if (field, value) == ("gradient", "score") else f"{field} {value}"


def _weight(like: Tensor, log_probs: Tensor, log_probs_old: Tensor, cap: float | None) -> Tensor:
    if log_probs_old.shape != log_probs.shape:
        raise ShapeError(
            f"log_probs_old is {tuple(log_probs_old.shape)} and log_probs {tuple(log_probs.shape)}; give the same"
        )
    weight = (log_probs.detach().to(like.dtype) - log_probs_old.detach().to(like.dtype)).exp()
    return weight if cap is None else weight.clamp(max=cap)


def compute_reward(
    r: Float[Tensor, "sequences"],
    kl_coef: float,
    kl: Float[Tensor, "sequences steps"],
    action_mask: Bool[Tensor, "sequences steps"]
    | Integer[Tensor, "sequences steps"]
    | Float[Tensor, "sequences steps"],
    reward_clip_range: tuple[float, float] | None = None,
) -> Float[Tensor, "sequences steps"]:
    """The reward of each token, as ``openrlhf.models.utils.compute_reward`` is called: ``shape_rewards``.

    OpenRLHF charges masked tokens as well, which its logged return then counts; here they get exactly 0, and
    what stands there (NaN) is not read. A response without a token that counts gets no score.

    Args:
        r: the score of each response.
        kl_coef: beta; below 0 it is 0, as in OpenRLHF.
        kl: nats per token.
        action_mask: true (or 1) for the tokens that the policy chose.
        reward_clip_range: bounds for ``r``; None for none.
    """
    scores = r if not reward_clip_range else r.clamp(*reward_clip_range)
    return shape_rewards(scores, kl, action_mask > 0.5, beta=max(kl_coef, 0.0))


class KLController(StatefulController):
    """What OpenRLHF calls a KL controller, ``value`` and ``update``, around one of kleash's.

    OpenRLHF hands over a mean over tokens or over responses' means of them, so ``leash`` counts nats per token.
    """

    def update(self, current: SupportsFloat, n_steps: int) -> None:
        """Take the KL of this batch of ``n_steps`` responses, in nats per token."""
        super().update(current, n_steps)


def install(*, controller: Mapping[str, Any] | None = None, cap: float | None = None) -> None:
    """Let OpenRLHF compute its KL here, in this process.

    Its modules take ``compute_approx_kl``, ``compute_reward`` and the two controllers by name when they are imported:
    those that are imported already get kleash's, and those that come later find them. Nothing is imported for it,
    so that each process can have it: Ray's ``worker_process_setup_hook`` runs it first thing in every worker.

    Args:
        controller: what ``--algo.kl.target`` makes: kind and options, as ``beta_from_dict`` takes them, without
            beta, target and what it counts per; None for Ziegler's with its bounds, of OpenRLHF's own horizon.
            Its state travels in OpenRLHF's checkpoints.
        cap: the most that an importance weight of ``unbiased_gradient`` may be.

    Raises:
        MissingExtraError: if OpenRLHF is not installed.
        CannotRunError: if this OpenRLHF lacks what kleash takes hold of; it says what, once it is imported.
        OptionError, UnknownNameError: if there is no such controller.
    """
    warn_if_untested("openrlhf", at_least="0.11", below="0.12")
    adaptive = _adaptive(dict(controller or {"kind": "ziegler"}))
    adaptive(0.1, 1.0, 1000)

    @wraps(compute_approx_kl)
    def approximate(*args: Any, **kwargs: Any) -> Tensor:
        return compute_approx_kl(*args, **{"cap": cap, **kwargs})

    def take_utils(module: Any) -> None:
        require_attributes("openrlhf", UTILS_SEAMS)
        _replace(module, "compute_approx_kl", approximate)
        _replace(module, "compute_reward", compute_reward)

    def take_controllers(module: Any) -> None:
        require_attributes("openrlhf", CONTROLLER_SEAMS)
        _replace(module, "AdaptiveKLController", adaptive)
        _replace(module, "FixedKLController", _fixed)

    call_after_import(UTILS, take_utils)
    call_after_import(CONTROLLERS, take_controllers)


def _replace(owner: Any, name: str, function: Any) -> None:
    """In the module that defines it and in every one of OpenRLHF's that has imported it by name."""
    original = getattr(owner, name)
    for title, module in list(sys.modules.items()):
        if title.startswith("openrlhf.") and vars(module).get(name) is original:
            setattr(module, name, function)


def _adaptive(controller_settings: Mapping[str, Any]) -> Callable[..., KLController]:
    def adaptive(init_kl_coef: float, target: float, horizon: int) -> KLController:
        """A controller that steers, as OpenRLHF asks for one."""
        openrlhf_settings = {"beta": init_kl_coef, "target_nats": target, "per": "token"}
        duplicates = controller_settings.keys() & openrlhf_settings
        if duplicates:
            raise OptionError(
                f"{', '.join(duplicates)} is OpenRLHF's to give; leave it out of the controller"
            )
        if controller_settings.get("kind") == "ziegler":
            openrlhf_settings["horizon"] = horizon
        _keep_in_checkpoints()
        return KLController(beta_from_dict(openrlhf_settings | dict(controller_settings)))

    return adaptive


def _fixed(kl_coef: float) -> KLController:
    return KLController(FixedBeta(beta=kl_coef, per="token"))


def _keep_in_checkpoints() -> None:
    """Let the trainer, if it is imported, put its controller's state among those that it saves and loads."""
    trainer: Any = getattr(sys.modules.get(TRAINER), "BasePPOTrainer", None)
    if trainer is None or hasattr(trainer.save_logs_and_checkpoints, "kleash"):
        return
    save, restore = trainer.save_logs_and_checkpoints, trainer.restore_best_checkpoint_state

    @wraps(save)
    def saving(self: Any, global_step: int, logs_dict: Any = None, client_states: Any = None) -> None:
        states = {} if client_states is None else client_states
        states[STATE] = self.kl_ctl.leash.to_dict()
        save(self, global_step, logs_dict, states)

    @wraps(restore)
    def restoring(self: Any, checkpoint_states: Any) -> None:
        restore(self, checkpoint_states)
        self.kl_ctl.load_state((checkpoint_states or {}).get(STATE, {}))

    vars(saving)["kleash"] = True
    trainer.save_logs_and_checkpoints, trainer.restore_best_checkpoint_state = saving, restoring
