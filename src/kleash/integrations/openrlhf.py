"""OpenRLHF's KL functions without clamps, with masked rewards, and beta controllers with bounds.

``install`` replaces ``compute_approx_kl`` and ``compute_reward`` of ``openrlhf.models.utils`` and the two controllers
of ``openrlhf.trainer.ppo_utils.kl_controller``, in every module of OpenRLHF that has imported them by name; its
``masked_mean`` and ``aggregate_loss`` get values of 0 where they are masked. It wraps
``save_logs_and_checkpoints`` and ``restore_best_checkpoint_state`` of both PPO trainers,
``ActorPPOTrainer.training_step`` and ``RemoteExperienceMaker.make_experience``. Known: OpenRLHF 0.11; another version
is a warning. A function or argument that is missing is a ``CannotRunError`` that names it.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.errors import OptionError
from kleash.estimators import sampled_kl
from kleash.estimators.sampled import with_k2_gradient
from kleash.estimators.weights import require_valid_cap
from kleash.extras import (
    Wrappers,
    replace_everywhere,
    warn_if_untested,
    wrap_after_import,
)
from kleash.kl_rules import CONTRACTS
from kleash.leash import FixedBeta, StatefulController, shape_rewards
from kleash.leash.controller_state import controller_of
from kleash.masking import select_and_call

__all__ = ["KLController", "compute_approx_kl", "compute_reward", "install"]

UTILS = "openrlhf.models.utils"
ACTOR = "openrlhf.trainer.ray.ppo_actor"
STATE = "kleash_kl_controller"
"""Name of the controller's state among the client states of a checkpoint."""
KLController = StatefulController
"""A beta controller with OpenRLHF's interface, ``value`` and ``update``; the target of its ``leash`` is in nats per
token, since OpenRLHF passes a mean over tokens, or over responses of such means."""


@validated
def compute_approx_kl(
    log_probs: Float[Tensor, "*tokens"],
    log_probs_base: Float[Tensor, "*tokens"],
    log_probs_old: Float[Tensor, "*tokens"] | None = None,
    kl_estimator: str = "k1",
    unbiased_gradient: bool = False,
    *,
    cap: float | None = None,
) -> Float[Tensor, "*tokens"]:
    """KL(policy || reference) in nats per token; replaces ``openrlhf.models.utils.compute_approx_kl``.

    | kl_estimator | value, u = log_probs - log_probs_base | gradient | with unbiased_gradient |
    | k1           | u                | averages to zero: refused     | w u |
    | k2           | u^2 / 2          | of KL(policy || reference)    | w u |
    | k3           | exp(-u) - 1 + u  | of KL(reference || policy)    | w u |

    OpenRLHF clamps every value to 10, where k2 and k3 have no gradient (k3 also none below u = -10), and w to 10. Here
    only ``cap`` bounds w. ``w u`` is the gradient of KL(policy || reference), on-policy (w = 1) and off-policy. Where u
    is infinite, the gradient of ``unbiased_gradient`` is 0.

    Args:
        log_probs: of the sampled tokens under the policy.
        log_probs_base: the same tokens under the reference, in the same shape.
        log_probs_old: the same under the policy that drew them: w = exp(log_probs - log_probs_old), detached;
            None for w = 1.
        kl_estimator: "k1", "k2" or "k3".
        unbiased_gradient: whether to take the gradient of the last column.
        cap: largest w; None for no limit.

    Raises:
        OptionError: for k1 with a gradient and without ``unbiased_gradient``, which would train nothing; if ``cap`` is
            not above 0.
        UnknownNameError: if there is no such estimator.
        ShapeError: if shapes differ.

    References:
        OpenRLHF 0.11.2, https://github.com/OpenRLHF/OpenRLHF
    """
    require_valid_cap(cap)
    value = sampled_kl(log_probs, log_probs_base, kl_estimator)
    if not unbiased_gradient:
        if value.requires_grad and CONTRACTS[kl_estimator].backpropagated == "zero":
            raise OptionError(
                f"{kl_estimator} backpropagated trains nothing: its gradient averages to zero; take "
                "--algo.kl.unbiased_gradient"
            )
        return value
    old = log_probs if log_probs_old is None else log_probs_old
    weight = (
        (log_probs.detach().to(value) - old.detach().to(value))
        .exp()
        .clamp(max=torch.inf if cap is None else cap)
    )
    return with_k2_gradient(value, log_probs, log_probs_base, weight)


def compute_reward(
    r: Float[Tensor, "sequences"],
    kl_coef: float,
    kl: Float[Tensor, "sequences steps"],
    action_mask: Bool[Tensor, "sequences steps"]
    | Integer[Tensor, "sequences steps"]
    | Float[Tensor, "sequences steps"],
    reward_clip_range: tuple[float, float] | None = None,
) -> Float[Tensor, "sequences steps"]:
    """The reward of each token, by ``shape_rewards``; replaces ``openrlhf.models.utils.compute_reward``.

    OpenRLHF subtracts the penalty from masked tokens as well, which its logged return then contains. Here masked tokens
    are not read (they may be NaN) and get exactly 0. A response without unmasked tokens gets no score.

    Args:
        r: the score of each response.
        kl_coef: beta; negative values are taken as 0, as in OpenRLHF.
        kl: nats per token.
        action_mask: true (or 1) for tokens that the policy generated.
        reward_clip_range: bounds of ``r``; None for no bounds.
    """
    scores = r.clamp(*reward_clip_range) if reward_clip_range else r
    return shape_rewards(scores, kl, action_mask > 0.5, beta=max(kl_coef, 0.0))


def install(*, controller: Mapping[str, Any] | None = None, cap: float | None = None) -> None:
    """Replace OpenRLHF's KL functions and controllers in this process.

    OpenRLHF's modules import them by name. Modules that are imported already get kleash's functions now, the others
    when they are imported. This call imports nothing, so that every process can run it: Ray's
    ``worker_process_setup_hook`` does so in each worker.

    Args:
        controller: the controller for ``--algo.kl.target``: kind and options as in ``beta_from_dict``, without beta,
            target and unit; None for Ziegler's rule with bounds and OpenRLHF's horizon. Its state is saved in
            OpenRLHF's checkpoints.
        cap: largest importance weight of ``unbiased_gradient``; None for no limit.

    Raises:
        MissingExtraError: if OpenRLHF is not installed.
        CannotRunError: if OpenRLHF lacks a function or argument, when its module is imported.
        OptionError, UnknownNameError: if there is no such controller or option, or ``cap`` is not above 0.
    """
    require_valid_cap(cap)
    warn_if_untested("openrlhf", at_least="0.11", below="0.12")
    adaptive = partial(_adaptive, dict(controller or {"kind": "ziegler"}))
    adaptive(0.1, 1.0, 1000)  # raises now if an option is invalid
    replacements: Mapping[str, Wrappers] = {
        UTILS: {
            "compute_approx_kl": (
                ("log_probs", "log_probs_base", "log_probs_old", "kl_estimator", "unbiased_gradient"),
                partial(compute_approx_kl, cap=cap),
            ),
            "compute_reward": (("r", "kl_coef", "kl", "action_mask", "reward_clip_range"), compute_reward),
        },
        "openrlhf.trainer.ppo_utils.kl_controller": {
            "AdaptiveKLController": (("init_kl_coef", "target", "horizon"), adaptive),
            "FixedKLController": (("kl_coef",), _fixed),
        },
    }
    for module, replaced in replacements.items():
        wrap_after_import(module, replaced, put=replace_everywhere)
    for module, wrapped in WRAPPED.items():
        wrap_after_import(module, wrapped)


def _adaptive(
    controller_options: Mapping[str, Any], init_kl_coef: float, target: float, horizon: int
) -> KLController:
    """A controller with a target, from the arguments of OpenRLHF's ``AdaptiveKLController``."""
    settings = {"beta": init_kl_coef, "target_nats": target, "per": "token", "horizon": horizon}
    return KLController(controller_of(settings, controller_options, framework="OpenRLHF"))


def _fixed(kl_coef: float) -> KLController:
    """A controller that keeps ``kl_coef``; warns if that is 0, with which OpenRLHF loads no reference."""
    if kl_coef == 0:
        warnings.warn(
            "--algo.kl.init_coef is 0, so OpenRLHF loads no reference and no KL is trained or measured; give it a "
            "coefficient above 0, or leave kleash out",
            stacklevel=2,
        )
    return KLController(FixedBeta(beta=kl_coef, per="token"))


def _save_with_controller(
    save: Callable[..., None],
    trainer: Any,
    global_step: int,
    logs_dict: Any,
    client_states: dict[str, Any],
) -> None:
    """Save as OpenRLHF, with the state of the controller among the states of the checkpoint.

    It is added to ``client_states`` itself, from which OpenRLHF then saves its best checkpoint.
    """
    client_states[STATE] = trainer.kl_ctl.state_dict()
    save(trainer, global_step, logs_dict, client_states)


def _restore_with_controller(restore: Callable[..., None], trainer: Any, checkpoint_states: Any) -> None:
    """Restore as OpenRLHF, and the controller from its state; a warning if the checkpoint has none."""
    restore(trainer, checkpoint_states)
    if checkpoint_states["global_step"] > 0:
        trainer.kl_ctl.load_state_dict(checkpoint_states.get(STATE, {}))


def _step_with_mean_kl(
    run: Callable[..., dict[str, Any]],
    trainer: Any,
    experience: Any,
    kl_ctl: float,
    step: int,
    loss_batch_info: Any = None,
) -> dict[str, Any]:
    """OpenRLHF's step; the KL that it returns is the mean over the tokens of its batch.

    OpenRLHF averages these by numbers of tokens, but returns the batch's part of the loss: the sum over its tokens,
    divided by the mean number of tokens in a batch.
    """
    info = loss_batch_info or resolve_name(f"{ACTOR}:get_loss_batch_info")(
        trainer.strategy,
        experience.action_mask,
        replay_buffer=trainer.replay_buffer,
        step=step,
        dynamic_batch=trainer.args.train.dynamic_batch_enable,
    )
    status = run(trainer, experience, kl_ctl, step, info)
    if trainer.args.algo.kl.use_loss:
        status["metrics"]["kl"] *= (
            info["batch_num_tokens"] / info["dp_size"] / max(status["num_action_tokens"], 1)
        )
    return status


def _make_with_mean_kl(make: Callable[..., list[Any]], maker: Any, samples_list: list[Any]) -> list[Any]:
    """OpenRLHF's experiences; a response without action tokens has the mean KL of the others.

    OpenRLHF gives it 0 / 0, and then averages over all responses, on several ranks and in batches of several sizes.
    """
    experiences = make(maker, samples_list)
    for name in ("kl", "logprobs_diff"):
        mean = torch.cat([x.info[name][x.action_mask.any(-1)] for x in experiences]).mean()
        for experience in experiences:
            has_tokens = experience.action_mask.any(-1)
            experience.info[name] = torch.where(has_tokens, experience.info[name], mean)
    return experiences


WRAPPED: Mapping[str, Wrappers] = {
    UTILS: {"masked_mean": (("tensor", "mask"), partial(select_and_call, ("tensor", "mask")))},
    "openrlhf.models.loss": {
        "aggregate_loss": (("loss", "loss_mask"), partial(select_and_call, ("loss", "loss_mask")))
    },
    ACTOR: {
        "ActorPPOTrainer.training_step": (
            ("experience", "kl_ctl", "step", "loss_batch_info"),
            _step_with_mean_kl,
        )
    },
    "openrlhf.trainer.ppo_utils.experience_maker": {
        "RemoteExperienceMaker.make_experience": (("samples_list",), _make_with_mean_kl)
    },
    "openrlhf.trainer.ppo_trainer": {
        f"{trainer}.{name}": (arguments, wrapper)
        # ray.remote has copied the methods of the first into the second; the asynchronous trainer inherits them later.
        for trainer in ("BasePPOTrainer", "PPOTrainer.__ray_metadata__.modified_class")
        for name, arguments, wrapper in (
            (
                "save_logs_and_checkpoints",
                ("global_step", "logs_dict", "client_states"),
                _save_with_controller,
            ),
            ("restore_best_checkpoint_state", ("checkpoint_states",), _restore_with_controller),
        )
    },
}
"""Module -> what is wrapped in it."""
