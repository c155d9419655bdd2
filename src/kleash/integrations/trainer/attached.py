"""A transformers callback that knows its trainer, and logs through it."""

from typing import Any

from kleash.errors import OptionError
from kleash.extras import import_extra, require_attributes, warn_if_untested

import_extra("transformers.trainer", "models")
warn_if_untested("transformers", at_least="4.57", below="6")
require_attributes(
    "transformers",
    {
        "transformers:Trainer.log": ("logs",),
        "transformers:Trainer.add_callback": ("callback",),
        "transformers.trainer_callback:ExportableState.state": (),
        "transformers.trainer_callback:TrainerState": ("stateful_callbacks", "log_history"),
    },
)

from transformers import Trainer, TrainerCallback  # noqa: E402 (after it is known to be there)
from transformers.trainer_callback import ExportableState  # noqa: E402

__all__ = ["Attached", "ExportableState"]


class Attached(TrainerCallback):
    """A callback that knows its trainer, since the events do not tell it."""

    trainer: Any = None

    def attach(self, trainer: Any) -> Any:
        """Join the trainer's callbacks; returns itself.

        Raises:
            OptionError: if it is attached already.
        """
        if self.trainer is not None:
            raise OptionError(f"this {type(self).__name__} is attached already; make one for each trainer")
        self.trainer = trainer
        trainer.add_callback(self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See that there is a trainer."""
        self.require_trainer()

    def require_trainer(self) -> None:
        """See that there is a trainer.

        Raises:
            OptionError: if it was attached to none.
        """
        if self.trainer is None:
            name = type(self).__name__
            raise OptionError(f"this {name} knows no trainer; call {name}(…).attach(trainer)")

    def say(self, control: Any, numbers: dict[str, float]) -> None:
        """Log through the trainer, as transformers' own ``Trainer`` does it.

        Not through a subclass's ``log``, which would hand out, and clear, what it has gathered for its next one;
        and without taking back that the trainer was about to log.
        """
        about_to = control.should_log
        Trainer.log(self.trainer, dict(numbers))
        control.should_log = about_to
