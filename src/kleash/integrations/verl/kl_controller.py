"""Beta controllers with verl's interface, and their state in verl's checkpoints."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kleash.leash import CONTROLLERS, StatefulController
from kleash.leash.controller_state import controller_of
from kleash.registry import look_up
from kleash.store.checksums import Checksums, write_checked
from kleash.store.codec import parse_json, to_json

CONTROLLER_TYPES: Mapping[str, str] = MappingProxyType(
    {**{kind: kind for kind in CONTROLLERS}, "adaptive": "ziegler"}
)
"""``algorithm.kl_ctrl.type`` -> kind of controller; "adaptive" is verl's name for Ziegler's."""

CONTROLLER_FILE = "kl_controller.json"
"""File of the controller's state in verl's ``global_step_N`` folder."""

VERL_FIELDS: Mapping[str, str] = MappingProxyType(
    {"kl_coef": "beta", "target_kl": "target_nats", "horizon": "horizon"}
)
"""Field of ``algorithm.kl_ctrl`` -> kleash's name of it."""
KLController = StatefulController
"""A beta controller with verl's interface, ``value`` and ``update``; the target of its ``leash`` is in nats per token,
since verl passes the mean over responses of their mean over tokens."""


def get_kl_controller(kl_ctrl: Any) -> KLController:
    """The controller of ``algorithm.kl_ctrl``; replaces ``verl.trainer.ppo.core_algos.get_kl_controller``.

    Args:
        kl_ctrl: verl's ``type`` (a key of ``CONTROLLER_TYPES``), ``kl_coef`` (the initial beta), ``target_kl`` in nats
            per token, ``horizon`` (only of Ziegler's); and any other field of the controller, such as ``beta_min``,
            ``beta_max``, ``largest_step``, ``integral``.

    Raises:
        UnknownNameError: if there is no such type.
        OptionError: if a field is unknown, or one that verl sets; or if a number is out of range.
    """
    settings: Mapping[str, Any] = kl_ctrl if isinstance(kl_ctrl, Mapping) else vars(kl_ctrl)
    kind = look_up(CONTROLLER_TYPES, settings.get("type", "fixed"), "type of KL controller")
    named = {VERL_FIELDS[name]: settings[name] for name in VERL_FIELDS if name in settings}
    options = {name: x for name, x in settings.items() if name not in ("_target_", "type", *VERL_FIELDS)}
    leash = controller_of({"kind": kind, "per": "token", **named}, options, framework="verl")
    if leash.beta == 0:
        warnings.warn(
            "algorithm.kl_ctrl.kl_coef is 0, so the rewards have no KL penalty; give it a coefficient above 0, or set "
            "algorithm.use_kl_in_reward to False",
            stacklevel=3,
        )
    return KLController(leash)


def save_checkpoint(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Write the state of the controller, and save the checkpoint: ``_save_checkpoint`` of verl's trainers.

    verl saves no controller, so that after a resume its coefficient starts again at ``kl_coef``. The state is written
    to ``CONTROLLER_FILE`` in the folder of the step, before the trainer writes the rest.
    """
    controller = getattr(trainer, "kl_ctrl_in_reward", None)
    if isinstance(controller, KLController):
        folder = Path(trainer.config.trainer.default_local_dir) / f"global_step_{trainer.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        write_checked(folder, folder / CONTROLLER_FILE, to_json(controller.state_dict()))
    return original(trainer, *args, **kwargs)


def load_checkpoint(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Load the checkpoint, and restore the state of the controller: ``_load_checkpoint`` of verl's trainers.

    A fixed beta is that of the configuration.

    Raises:
        RunFolderError: if the state is not as it was written.
    """
    result = original(trainer, *args, **kwargs)
    controller, settings = getattr(trainer, "kl_ctrl_in_reward", None), trainer.config.trainer
    if trainer.global_steps > 0 and isinstance(controller, KLController):
        folder = (
            Path(settings.resume_from_path)
            if settings.resume_mode == "resume_path"
            else Path(settings.default_local_dir) / f"global_step_{trainer.global_steps}"
        )
        path, saved = folder / CONTROLLER_FILE, b"{}"
        if path.exists():
            saved = Checksums.read(folder).read_bytes(path, "remove it to start the controller anew")
        controller.load_state_dict(parse_json(saved))
    return result
