"""A transformers callback that has a reference to its trainer and logs through it."""

from typing import Any

from kleash.errors import OptionError
from kleash.integrations.trainer.compat import Trainer, TrainerCallback


class AttachedCallback(TrainerCallback):
    """A callback that is added to a trainer by ``attach``, since events do not pass the trainer."""

    trainer: Any = None

    def attach(self, trainer: Any) -> Any:
        """Add this callback to the trainer; returns itself.

        Raises:
            OptionError: if it is attached already.
        """
        if self.trainer is not None:
            raise OptionError(f"this {type(self).__name__} is attached already; make one for each trainer")
        self.trainer = trainer
        trainer.add_callback(self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check that the callback is attached."""
        self.require_trainer()

    def require_trainer(self) -> None:
        """Check that the callback is attached.

        Raises:
            OptionError: if it is not.
        """
        if self.trainer is None:
            name = type(self).__name__
            raise OptionError(f"this {name} knows no trainer; call {name}(…).attach(trainer)")

    def log_metrics(self, control: Any, metrics: dict[str, float]) -> None:
        """Log through the ``log`` method of transformers' own ``Trainer``.

        A subclass's ``log`` (TRL's) would also log, and clear, the metrics that it has collected for its next log.
        ``control.should_log`` is left as it was.
        """
        should_log = control.should_log
        Trainer.log(self.trainer, dict(metrics))
        control.should_log = should_log
