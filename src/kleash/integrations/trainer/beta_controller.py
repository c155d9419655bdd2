"""What steers the beta of a transformers ``Trainer`` while it runs."""

import logging
from typing import Any

from kleash.errors import OptionError
from kleash.integrations.trainer.attached import Attached, ExportableState
from kleash.leash import Leash, beta_from_dict, beta_reason

LOG = logging.getLogger(__name__)


class BetaController(Attached, ExportableState):
    """Steers ``trainer.beta`` while training runs, by any of ``kleash.leash``'s controllers.

    Whenever the trainer logs ``metric`` (its own ``kl``, or what a DriftMonitor logs), the controller is told and
    the next beta set; trainers that read ``self.beta`` at each step (TRL's GRPO, RLOO, DPO …) follow at
    once. ``beta`` is logged after each change, ``beta/event`` is 1 where the controller bounded or ignored
    something, and the words go to the log. Its state is part of the checkpoint, and is there again on resume.

    In a run of several processes the metric must be the same on all of them, as what trainers log is.
    """

    def __init__(self, controller: Leash, *, metric: str, attribute: str = "beta") -> None:
        """Say what steers, and by which of the logged numbers.

        Args:
            controller: where it starts; the trainer's beta is set to its beta.
            metric: the name under which the KL is logged, per what ``controller.per`` says.
            attribute: what the trainer calls its beta.
        """
        self.controller, self.metric, self.attribute = controller, metric, attribute
        self._since = 0
        self._changed = False
        self.reason: str | None = None
        """Why beta was last moved, in words; None where the last measurement left it alone."""

    def attach(self, trainer: Any) -> "BetaController":
        """Join the trainer's callbacks and set its beta; returns itself.

        Raises:
            OptionError: if the trainer has no beta, or one of 0, without a reference; if it has a
                BetaController already; or if it would rebuild its callbacks on resume.
        """
        beta = getattr(trainer, self.attribute, None)
        if not isinstance(beta, int | float):
            raise OptionError(f"{type(trainer).__name__} has no number {self.attribute!r} to steer")
        if beta == 0:
            raise OptionError(
                f"the trainer was made with {self.attribute} 0 and so without a reference; give its configuration "
                f"the controller's {self.controller.beta:g}"
            )
        if any(isinstance(callback, BetaController) for callback in trainer.callback_handler.callbacks):
            raise OptionError("this trainer has a BetaController already; one beta is steered by one")
        if getattr(trainer.args, "restore_callback_states_from_checkpoint", False):
            raise OptionError(
                "restore_callback_states_from_checkpoint makes new callbacks that know no trainer; leave it False: "
                "BetaController reads its state from the checkpoint itself"
            )
        super().attach(trainer)
        setattr(trainer, self.attribute, self.controller.beta)
        return self

    def state(self) -> dict[str, Any]:
        """What the checkpoint holds of it."""
        return {"args": {}, "attributes": {"controller": self.controller.to_dict(), "since": self._since}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Go on where the checkpoint was written, if training resumes from one."""
        super().on_train_begin(args, state, control, **more)
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step > 0 and isinstance(saved, dict):
            self.controller = beta_from_dict(saved["attributes"]["controller"])
            self._since = saved["attributes"]["since"]
            setattr(self.trainer, self.attribute, self.controller.beta)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Tell the controller what was measured."""
        measured = (logs or {}).get(self.metric)
        if measured is None or state.global_step == self._since:
            return
        steps = state.global_step - self._since
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        sequences = round(steps * batch / getattr(args, "num_iterations", 1))  # TRL learns from each so often
        before = self.controller
        self.controller = before.after(measured, sequences=max(1, sequences))
        self.reason = beta_reason(before, self.controller, measured)
        if self.reason is not None:
            LOG.info("step %d: %s", state.global_step, self.reason)
        self._since, self._changed = state.global_step, True
        setattr(self.trainer, self.attribute, self.controller.beta)
        if self.controller.event is not None:
            LOG.warning("beta at step %d: %s", state.global_step, self.controller.event)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the beta of the steps to come."""
        if self._changed:
            self._changed = False
            event = float(self.controller.event is not None)
            self.say(control, {"beta": self.controller.beta, "beta/event": event})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say so if the metric never came."""
        if state.global_step > 0 and self._since == 0:
            logged = sorted({name for entry in state.log_history for name in entry})
            LOG.warning(
                "nothing called %r was logged in %d steps, so beta was never steered; logged were %s",
                self.metric,
                state.global_step,
                ", ".join(logged),
            )
