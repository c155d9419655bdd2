"""A callback that adjusts the beta of a transformers ``Trainer`` to a target KL."""

import logging
from typing import Any

from kleash.errors import OptionError
from kleash.integrations.trainer.callback import AttachedCallback
from kleash.integrations.trainer.compat import ExportableState
from kleash.leash import Leash, beta_reason
from kleash.leash.controller_state import with_state

LOG = logging.getLogger(__name__)


class BetaController(AttachedCallback, ExportableState):
    """Adjusts ``trainer.beta`` during training by a controller of ``kleash.leash``.

    Each time the trainer logs ``metric`` (its own ``kl``, or a metric of a DriftMonitor), the controller is updated
    with it, and with its standard error if ``metric`` with ``_error`` is logged too (by DriftMonitor, and by the TRL
    trainers of kleash for ``kl/per_token`` and ``kl/per_sequence``). Its new beta is set on the trainer, where trainers
    that read ``self.beta`` at each step (TRL's GRPO, RLOO, DPO …) use it at once. ``beta`` is logged after each update;
    ``beta/event`` is 1 if the controller bounded or ignored the measurement, and the Python log says why. The state is
    part of the checkpoint and restored on resume.

    With several processes the metric must be the same on all of them, as logged metrics are.
    """

    def __init__(self, controller: Leash, *, metric: str) -> None:
        """Create the callback; ``attach`` adds it to a trainer.

        Args:
            controller: the initial controller; the trainer's beta is set to its beta.
            metric: name of the logged KL, in nats per token or per sequence as ``controller.per``.
        """
        self.controller, self.metric = controller, metric
        self.since = 0
        """The step of the last update of the controller; 0 before the first."""
        self.reason: str | None = None
        """The reason for the last change of beta; None if the last measurement did not change it."""

    def attach(self, trainer: Any) -> "BetaController":
        """Add this callback to the trainer and set its beta; returns itself.

        Raises:
            OptionError: if the trainer has no beta; if that or the controller's is 0; if the trainer has a
                BetaController already; or if it would recreate its callbacks on resume.
        """
        beta = getattr(trainer, "beta", None)
        if not isinstance(beta, int | float):
            raise OptionError(f"{type(trainer).__name__} has no number 'beta' to steer")
        if 0 in (beta, self.controller.beta):
            raise OptionError(
                "a beta is 0, which no factor raises, and with which TRL loads no reference and no KL is trained; give "
                "the trainer's configuration and the controller one above 0"
            )
        if any(isinstance(callback, BetaController) for callback in trainer.callback_handler.callbacks):
            raise OptionError("this trainer has a BetaController already; one beta is steered by one")
        if trainer.args.restore_callback_states_from_checkpoint:
            raise OptionError(
                "restore_callback_states_from_checkpoint makes new callbacks that know no trainer; leave it False: "
                "BetaController reads its state from the checkpoint itself"
            )
        super().attach(trainer)
        trainer.beta = self.controller.beta
        return self

    def state(self) -> dict[str, Any]:
        """The state that is saved in the checkpoint."""
        return {"args": {}, "attributes": {"controller": self.controller.to_dict(), "since": self.since}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Restore the state from the checkpoint if training resumes."""
        super().on_train_begin(args, state, control, **more)
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step > 0 and isinstance(saved, dict):
            self.controller = with_state(self.controller, saved["attributes"]["controller"])
            self.since = saved["attributes"]["since"]
            self.trainer.beta = self.controller.beta

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Update the controller with the logged KL."""
        kl = logs.get(self.metric)
        if kl is None or state.global_step == self.since:
            return
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        drawn = (
            (state.global_step - self.since) * batch / getattr(args, "num_iterations", 1)
        )  # TRL reuses each
        before, error = self.controller, logs.get(f"{self.metric}_error")
        self.controller = before.after(kl, sequences=max(1, round(drawn)), standard_error=error)
        self.reason = beta_reason(before, self.controller, kl)
        if self.reason is not None and state.is_world_process_zero:
            LOG.info("step %d: %s", state.global_step, self.reason)
        self.since = state.global_step
        self.trainer.beta = self.controller.beta
        if self.controller.event is not None and state.is_world_process_zero:
            LOG.warning("beta at step %d: %s", state.global_step, self.controller.event)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log beta after a change."""
        if 0 < self.since == state.global_step:
            event = self.controller.event is not None
            self.log_metrics(control, {"beta": self.controller.beta, "beta/event": float(event)})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Warn if the metric was never logged."""
        if state.global_step > 0 and self.since == 0 and state.is_world_process_zero:
            LOG.warning(
                "nothing called %r was logged in %d steps, so beta was never steered; logged were %s",
                self.metric,
                state.global_step,
                ", ".join(sorted({name for entry in state.log_history for name in entry})),
            )
