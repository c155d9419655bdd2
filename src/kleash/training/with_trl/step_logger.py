"""A callback that writes TRL's logs to the run log, and carries out the response to its alerts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kleash.errors import NonFiniteError
from kleash.extras import import_extra
from kleash.integrations.trainer import BetaController
from kleash.integrations.trainer.callback import AttachedCallback
from kleash.integrations.trainer.compat import halve_learning_rate
from kleash.jobs import TrainJob
from kleash.store import Sample, read_steps
from kleash.store.checksums import seal_folder
from kleash.training.job_schedule import tightened
from kleash.training.response_metrics import gather_object
from kleash.training.run_log import Advice, RunLog, stopped_by

TRL_METRICS = {
    "beta": "beta",
    "grad_norm": "policy/gradient_norm",
    "learning_rate": "policy/learning_rate",
    "clip_ratio/region_mean": "policy/clip_share",
    "frac_reward_zero_std": "reward/zero_std_share",
    "rewards/accuracies": "pairs/accuracy",
    "rewards/margins": "pairs/margin",
    "step_time": "time/step",
}
"""Metric of TRL -> the metric of kleash with the same meaning."""


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """Metrics of a step besides those that TRL logs, and samples of its responses."""

    metrics: Mapping[str, float]
    samples: tuple[Sample, ...] = ()


@dataclass(kw_only=True)
class Outcome:
    """The last step of the run, its metrics, and why the run ended early, if it did."""

    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    stopped: str | None = None


class StepLogger(AttachedCallback):
    """Writes each step to the run log, on rank 0, and carries out the response to alerts, on all processes."""

    def __init__(
        self,
        job: TrainJob,
        run_log: RunLog | None,
        *,
        trl_steps_per_step: int = 1,
        metric_names: Mapping[str, str] = TRL_METRICS,
        pop_measurement: Callable[[], StepMeasurement | None] = lambda: None,
        notes: Sequence[str] = (),
    ) -> None:
        """Create the callback; ``attach`` adds it to a trainer.

        Args:
            job: its ``on_hacking`` is the response to alerts.
            run_log: the run log on rank 0; None on other ranks.
            trl_steps_per_step: steps of TRL in a step of the run.
            metric_names: metric of TRL -> metric of kleash.
            pop_measurement: returns the measurement of the step that was just taken, if there is one.
            notes: notes about the models, shown when training starts.
        """
        self.job, self.run_log, self.metric_names = job, run_log, dict(metric_names)
        self.trl_steps_per_step = trl_steps_per_step
        self.pop_measurement, self.notes = pop_measurement, tuple(notes)
        self.outcome = Outcome()

    def attach(self, trainer: Any) -> "StepLogger":
        """Add this callback to the trainer and remove the one that prints logs; returns itself."""
        trainer.remove_callback(import_extra("transformers.trainer_callback", "trl").PrinterCallback)
        super().attach(trainer)
        return self

    def was_stopped(self, trl_step: int) -> bool:
        """Whether the hacking monitor stopped the run at this step of TRL; if so, sets the outcome. A collective."""
        step, stopped = trl_step // self.trl_steps_per_step, None
        if self.run_log is not None and self.job.on_hacking == "stop":
            records = read_steps(self.run_log.folder)
            alerts = next((record.alerts for record in records if record.step == step), ())
            stopped = stopped_by(alerts, step) if alerts else None
        self.outcome.stopped = _of_first_process(stopped)
        return self.outcome.stopped is not None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Open the run log at the step from which training starts."""
        super().on_train_begin(args, state, control, **more)
        self.outcome.step = state.global_step // self.trl_steps_per_step
        if self.run_log is not None:
            self.run_log.begin(self.outcome.step)
            for note in self.notes:
                self.run_log.note(note)
            if self.outcome.step:
                self.run_log.note(f"going on after step {self.outcome.step}")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Record a step; logs without a loss are ignored.

        Raises:
            NonFiniteError: if the loss is NaN or infinite.
        """
        if logs is None or "loss" not in logs:
            return
        step = state.global_step // self.trl_steps_per_step
        if not abs(logs["loss"]) < float("inf"):
            raise NonFiniteError(
                f"the loss of step {step} is {logs['loss']}; lower --learning-rate, or look at the last checkpoint "
                f"in {args.output_dir}"
            )
        measurement = self.pop_measurement()
        metrics = {
            name: float(logs[trl_name])
            for trl_name, name in self.metric_names.items()
            if logs.get(trl_name) is not None
        }
        if measurement is not None:
            metrics |= measurement.metrics
        target = getattr(self.job, "target_nats", None)
        if target is not None:
            metrics["kl/target"] = target
        advice = None
        if self.run_log is not None:
            samples = () if measurement is None else measurement.samples
            controller = self._controller()
            event = None if controller is None else controller.controller.event
            reason = None if controller is None else controller.reason
            advice = self.run_log.step(step, metrics, samples, [] if event is None else [event], reason)
        self.outcome.step, self.outcome.metrics = step, metrics
        self._carry_out(_of_first_process(advice) or Advice(), control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the checksums of a new checkpoint, once every process has written its part."""
        self.trainer.accelerator.wait_for_everyone()
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.trainer.accelerator.process_index == 0 and checkpoint.is_dir():
            seal_folder(checkpoint)

    def _controller(self) -> BetaController | None:
        callbacks = self.trainer.callback_handler.callbacks
        return next((callback for callback in callbacks if isinstance(callback, BetaController)), None)

    def _carry_out(self, advice: Advice, control: Any) -> None:
        match advice.act:
            case "stop":
                self.outcome.stopped = stopped_by(advice.alerts, self.outcome.step)
                control.should_training_stop = control.should_save = True
            case "halve-lr":
                halve_learning_rate(self.trainer)
            case "tighten":
                controller, job = self._controller(), cast("Any", self.job)
                if controller is not None:
                    controller.controller = tightened(controller.controller, job)
                    self.trainer.beta = controller.controller.beta
            case _:
                pass


def _of_first_process(value: Any) -> Any:
    """The object of rank 0. A collective."""
    return gather_object([value])[0]
