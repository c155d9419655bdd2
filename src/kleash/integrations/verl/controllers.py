"""Beta controllers behind verl's interface, and their state in verl's checkpoints."""

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, SupportsFloat

from kleash.errors import OptionError, RunFolderError
from kleash.leash import StatefulController, beta_from_dict
from kleash.registry import look_up
from kleash.store.atomic import write_atomically
from kleash.store.codec import parse_json

__all__ = ["CONTROLLER_FILE", "CONTROLLER_TYPES", "KLController", "get_kl_controller", "keep_in_checkpoints"]

CONTROLLER_TYPES: Mapping[str, str] = MappingProxyType(
    {"fixed": "fixed", "adaptive": "ziegler", "ziegler": "ziegler", "pid": "pid", "dual": "dual"}
)
"""``algorithm.kl_ctrl.type`` -> kind of controller; "adaptive" is verl's own name of Ziegler's."""

CONTROLLER_FILE = "kl_controller.json"
"""What it is saved as, in verl's ``global_step_N`` folder."""

TRAINERS = {"verl.trainer.ppo.v1.trainer_base": "PPOTrainer", "verl.trainer.ppo.ray_trainer": "RayPPOTrainer"}
OF_VERL = ("_target_", "type", "kl_coef", "horizon", "target_kl")


class KLController(StatefulController):
    """What verl calls a KL controller, ``value`` and ``update``, around one of kleash's, which is a value.

    verl hands over the mean over responses of the mean over their tokens, so ``leash`` counts nats per token.
    """

    def update(self, current_kl: SupportsFloat, n_steps: int) -> None:
        """Take the KL of this batch of ``n_steps`` responses, in nats per token."""
        super().update(current_kl, n_steps)


def get_kl_controller(kl_ctrl: Any) -> KLController:
    """The controller of ``algorithm.kl_ctrl``, as ``verl.trainer.ppo.core_algos.get_kl_controller`` makes it.

    Args:
        kl_ctrl: verl's own ``type`` (a name of ``CONTROLLER_TYPES``), ``kl_coef`` (the beta to begin with),
            ``target_kl`` in nats per token, ``horizon`` (Ziegler's alone); and any other field of
            the controller, such as ``beta_min``, ``beta_max``, ``largest_step``, ``integral``.

    Raises:
        UnknownNameError: if there is no such type.
        OptionError: if a field is unknown or a number means nothing.
    """
    settings = {str(name): value for name, value in _items(kl_ctrl)}
    kind = look_up(CONTROLLER_TYPES, settings.get("type", "fixed"), "type of KL controller")
    record = {name: value for name, value in settings.items() if name not in OF_VERL}
    if "per" in record:
        raise OptionError("per is given, and verl measures its KL per token; leave it out")
    record |= {"kind": kind, "beta": settings["kl_coef"], "per": "token"}
    if kind != "fixed":
        record["target_nats"] = settings["target_kl"]
    if kind == "ziegler":
        record["horizon"] = settings["horizon"]
    return KLController(beta_from_dict(record))


def _items(kl_ctrl: Any) -> Any:
    return kl_ctrl.items() if isinstance(kl_ctrl, Mapping) else vars(kl_ctrl).items()


def keep_in_checkpoints() -> None:
    """Let those of verl's trainers that are imported save their controller with, and load it from, checkpoints.

    verl itself saves none: after a resume its coefficient begins anew at ``kl_coef``. Before a trainer saves, the
    state goes into the step's folder, as ``CONTROLLER_FILE``; after it has loaded, it is read from there.
    """
    for module, name in TRAINERS.items():
        trainer: Any = getattr(sys.modules.get(module), name, None)
        if trainer is not None and not hasattr(trainer._save_checkpoint, "kleash"):
            trainer._save_checkpoint = _saving(trainer._save_checkpoint)
            trainer._load_checkpoint = _loading(trainer._load_checkpoint)


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        controller = getattr(self, "kl_ctrl_in_reward", None)
        if isinstance(controller, KLController):
            folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / CONTROLLER_FILE, json.dumps(controller.leash.to_dict(), indent=1))
        return original(self, *args, **kwargs)

    vars(save)["kleash"] = True
    return save


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        controller = getattr(self, "kl_ctrl_in_reward", None)
        if isinstance(controller, KLController) and self.global_steps > 0:
            _load_state(controller, _folder(self.config.trainer, self.global_steps))
        return result

    return load


def _folder(settings: Any, step: int) -> Path:
    """The folder that verl has resumed from."""
    resume_path = settings.resume_from_path if settings.resume_mode == "resume_path" else None
    return Path(resume_path or Path(settings.default_local_dir) / f"global_step_{step}").absolute()


def _load_state(controller: KLController, folder: Path) -> None:
    """Go on with what was saved; a fixed beta is the configuration's."""
    path = folder / CONTROLLER_FILE
    if controller.leash.to_dict()["kind"] == "fixed":
        return
    if not path.exists():
        warnings.warn(
            f"{path} does not exist, so the KL controller begins anew at {controller.value}", stacklevel=3
        )
        return
    try:
        controller.load_state(dict(parse_json(path.read_bytes())))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunFolderError(
            f"{path} cannot be read as the state of a KL controller: {error}; take it away, and the controller begins "
            "anew"
        ) from error
