"""Beta controllers with verl's interface, and their state in verl's checkpoints."""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, SupportsFloat

from kleash.errors import OptionError, RunFolderError
from kleash.leash import CONTROLLERS, FixedBeta, StatefulController, beta_from_dict
from kleash.registry import look_up
from kleash.store.atomic import write_atomically
from kleash.store.checksums import check_of
from kleash.store.codec import parse_json

CONTROLLER_TYPES: Mapping[str, str] = MappingProxyType(
    {**{kind: kind for kind in CONTROLLERS}, "adaptive": "ziegler"}
)
"""``algorithm.kl_ctrl.type`` -> kind of controller; "adaptive" is verl's name for Ziegler's."""

CONTROLLER_FILE = "kl_controller.json"
"""File of the controller's state in verl's ``global_step_N`` folder."""

CHECK = "check"
"""Field of that file that proves that the others are as they were written."""

VERL_FIELDS = ("_target_", "type", "kl_coef", "horizon", "target_kl")


class KLController(StatefulController):
    """A beta controller with verl's interface, ``value`` and ``update``.

    verl passes the mean over responses of their mean over tokens, so the target of ``leash`` is in nats per token.
    """

    def update(
        self, current_kl: SupportsFloat, n_steps: int, standard_error: SupportsFloat | None = None
    ) -> None:
        """Update beta with the KL of a batch of ``n_steps`` responses, in nats per token.

        ``n_steps`` is verl's name for the number of responses; only the names differ from the base class.
        """
        super().update(current_kl, n_steps, standard_error)


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
    settings: dict[str, Any] = dict(kl_ctrl if isinstance(kl_ctrl, Mapping) else vars(kl_ctrl))
    kind = look_up(CONTROLLER_TYPES, settings.get("type", "fixed"), "type of KL controller")
    record = {name: value for name, value in settings.items() if name not in VERL_FIELDS}
    duplicates = sorted(record.keys() & {"kind", "beta", "target_nats", "per"})
    if duplicates:
        raise OptionError(
            f"verl sets {', '.join(duplicates)}: by type, kl_coef and target_kl, in nats per token; leave it out"
        )
    record |= {"kind": kind, "beta": settings["kl_coef"], "per": "token"}
    if kind == "fixed" and settings["kl_coef"] == 0:
        warnings.warn(
            "algorithm.kl_ctrl.kl_coef is 0, so the rewards have no KL penalty; give it a coefficient above 0, or set "
            "algorithm.use_kl_in_reward to False",
            stacklevel=3,
        )
    if kind != "fixed":
        record["target_nats"] = settings["target_kl"]
    if kind == "ziegler":
        record["horizon"] = settings["horizon"]
    return KLController(beta_from_dict(record))


def save_checkpoint(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Write the state of the controller, and save the checkpoint: ``_save_checkpoint`` of verl's trainers.

    verl saves no controller, so that after a resume its coefficient starts again at ``kl_coef``. The state is written
    to ``CONTROLLER_FILE`` in the folder of the step, before the trainer writes the rest.
    """
    controller = getattr(trainer, "kl_ctrl_in_reward", None)
    if isinstance(controller, KLController):
        folder = Path(trainer.config.trainer.default_local_dir) / f"global_step_{trainer.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        state = controller.leash.to_dict()
        write_atomically(
            folder / CONTROLLER_FILE, json.dumps({**state, CHECK: check_of(state)}, indent=1) + "\n"
        )
    return original(trainer, *args, **kwargs)


def load_checkpoint(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Load the checkpoint, and restore the state of the controller: ``_load_checkpoint`` of verl's trainers.

    A fixed beta is that of the configuration.
    """
    result = original(trainer, *args, **kwargs)
    controller = getattr(trainer, "kl_ctrl_in_reward", None)
    if (
        trainer.global_steps > 0
        and isinstance(controller, KLController)
        and not isinstance(controller.leash, FixedBeta)
    ):
        _load_state(controller, trainer)
    return result


def _load_state(controller: KLController, trainer: Any) -> None:
    """Restore the state of a controller from the folder that the trainer resumes from."""
    settings = trainer.config.trainer
    folder = (
        Path(settings.resume_from_path)
        if settings.resume_mode == "resume_path"
        else Path(settings.default_local_dir) / f"global_step_{trainer.global_steps}"
    )
    path = folder.absolute() / CONTROLLER_FILE
    if not path.exists():
        warnings.warn(
            f"{path} does not exist, so the KL controller begins anew at {controller.value}", stacklevel=4
        )
        return
    try:
        state: dict[str, Any] = dict(parse_json(path.read_bytes()))
        if state.pop(CHECK, None) != check_of(state):
            raise ValueError("its check does not fit its values, so it is damaged")
        controller.load_state(state)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunFolderError(
            f"{path} cannot be read as the state of a KL controller: {error}; remove it to start the controller anew"
        ) from error
