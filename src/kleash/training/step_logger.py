"""A callback that writes what a trainer logs to the run log, and carries out the response to its alerts."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from kleash.errors import CannotRunError, NonFiniteError
from kleash.integrations.trainer import BetaController, DriftMonitor
from kleash.integrations.trainer.callback import AttachedCallback
from kleash.integrations.trainer.compat import halve_learning_rate, moves_reference
from kleash.jobs import TrainJob
from kleash.leash.controller_base import KL_UNITS
from kleash.store import Sample, TrainingFolder, TrainingResult, read_steps
from kleash.store.checksums import seal_folder
from kleash.store.job_folder import RunHeader
from kleash.store.metrics import METRICS, OTHER, PART
from kleash.training.header_and_result import finish
from kleash.training.job_schedule import tightened
from kleash.training.response_metrics import of_first_process
from kleash.training.run_log import RESPONSE_EVENTS, Advice, LogOptions, RunLog, stopped_by
from kleash.version import __version__

LOG = logging.getLogger(__name__)
TRL_METRICS = {
    metric.trl: name for name, metric in METRICS.items() if metric.trl is not None and metric.trl != "kl"
}
"""Metric of TRL -> the metric of kleash with the same meaning; TRL's "kl" is another one in each trainer."""
DUE = ("should_log", "should_evaluate", "should_save")
"""What transformers does after a step, by the names of ``TrainerControl``."""
PRICED = ("grpo", "rloo", "gmpo", "dpo", "kto")
"""Algorithms whose beta belongs to a KL."""


class StepLogger(AttachedCallback):
    """Writes each step to the run log, on rank 0, and carries out the response to alerts, on all processes.

    A step is written when the trainer logs its loss, with all that was logged since the step before: by the trainer,
    and by other callbacks, such as a DriftMonitor. Attach it after them.
    """

    def __init__(
        self,
        job: TrainJob | LogOptions,
        run_log: RunLog | None,
        *,
        trl_steps_per_step: int = 1,
        pop_metrics: Callable[[], Mapping[str, float]] = dict,
        recorder: Any = None,
        notes: Sequence[str] = (),
    ) -> None:
        """Create the callback; ``attach`` adds it to a trainer.

        Args:
            job: its target and its response to alerts are used.
            run_log: the run log on rank 0; None on other ranks.
            trl_steps_per_step: steps of TRL in a step of the run.
            pop_metrics: returns further metrics of the step that was just taken.
            recorder: a ``with_trl.ResponseRecorder`` of the trainer, if it learns from its own responses; or None.
            notes: notes about the models, shown when training starts.
        """
        self.job, self.run_log = job, run_log
        self.metric_names = dict(TRL_METRICS)
        """Metric of the trainer -> metric of kleash. Those of kleash keep their names, and others get ``OTHER``."""
        self.trl_steps_per_step = trl_steps_per_step
        self.pop_metrics, self.recorder = pop_metrics, recorder
        self.notes = [*notes, *([] if recorder is None or recorder.note is None else [recorder.note])]
        self.step = 0
        """The last step of the run."""
        self.metrics: dict[str, float] = {}
        """Those of the last step."""
        self.stopped: str | None = None
        """Why the run ended early, if it did."""
        self._logged: dict[str, float] = {}
        """Metrics since the last step that was written."""
        self._trl_step = 0
        """The trainer's step at that step."""
        self._evaluations = 0
        """The evaluations that the step awaits before it is written, one of each held-out set; below 0 after others."""
        self._due: dict[str, bool] = {}
        """What was due after the last step of an epoch."""

    def attach(self, trainer: Any) -> "StepLogger":
        """Add this callback to the trainer; returns itself."""
        super().attach(trainer)
        trainer.args.logging_nan_inf_filter = False  # which logs the mean loss so far in place of a NaN
        monitor = next(self._callbacks(DriftMonitor), None)
        if monitor is not None:
            # of other responses than the step's KL, which is in the run log as well
            is_other = self.recorder is not None and (self.recorder.is_exact or trainer.beta != 0)
            kl = "drift/kl" if is_other else "kl/exact"
            ends = [f"_per_{per}{suffix}" for per in KL_UNITS for suffix in ("", "_error")]
            names = {f"kl{end}": f"{kl}{end}" for end in ends} | {"seconds": "time/drift"}
            if self.recorder is None:
                names |= {"tokens_per_sequence": "response/length", "prompts": "response/prompts"}
            self.metric_names |= {f"{monitor.name}/{name}": metric for name, metric in names.items()}
        return self

    def was_stopped(self, trl_step: int) -> bool:
        """Whether the hacking monitor stopped the run at this step of TRL; if so, sets the outcome. A collective."""
        step, advice = trl_step // self.trl_steps_per_step, Advice()
        if self.run_log is not None:
            advice = self.run_log.advice(
                next((each.alerts for each in read_steps(self.run_log.folder) if each.step == step), ())
            )
        advice = of_first_process(advice)
        if advice.act == "stop":
            self.stopped = stopped_by(advice.alerts, step)
        return self.stopped is not None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Open the run log at the step from which training starts; an evaluation before the first is step 0."""
        super().on_train_begin(args, state, control, **more)
        self._trl_step, self.step = state.global_step, state.global_step // self.trl_steps_per_step
        self._evaluations = self._held_out_sets() * (args.eval_on_start and state.global_step == 0)
        if self.run_log is not None:
            self.run_log.begin(self.step, self.notes)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the beta of the step, which TRL's own trainers do not log."""
        for controller in self._callbacks(BetaController):
            self._logged["beta"] = controller.controller.beta

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Have the trainer log where it saves, evaluates or ends, and where a DriftMonitor has measured.

        A checkpoint is then of a step that is written, and a KL is written with the step that it is of.

        After the last step of an epoch all waits for ``on_epoch_end``, where more may be due.
        """
        control.should_log |= (
            control.should_save
            or control.should_evaluate
            or state.global_step >= state.max_steps
            or any(state.global_step % each.every == 0 for each in self._callbacks(DriftMonitor))
        )
        if control.should_training_stop or float(state.epoch).is_integer():
            self._due = {name: getattr(control, name) for name in DUE}
            vars(control).update(dict.fromkeys(DUE, False))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Have the trainer log, evaluate and save what is due after the last step of an epoch, or for the epoch.

        The last step of a training that was stopped is logged. The evaluation of an epoch that an alert ended is
        transformers' alone: its last step is written.
        """
        vars(control).update({name: self._due.pop(name, False) or getattr(control, name) for name in DUE})
        control.should_log |= control.should_save or control.should_evaluate or control.should_training_stop

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Collect what is logged, and record a step if the loss is.

        Raises:
            NonFiniteError: if the loss, or the gradient of the last update, is NaN or infinite.
        """
        named = {
            self.metric_names.get(name, name): value
            for name, value in sorted(logs.items(), key=lambda item: item[0] not in self.metric_names)
            if isinstance(value, Real) and name != "epoch"
        }  # kleash's own metrics have the last word
        self._logged |= {
            name if name in METRICS or name.startswith(PART) else f"{OTHER}{name}": float(value)
            for name, value in named.items()
            if self._evaluations > 0 or not name.startswith("eval")  # which is of no step that is written
        }
        if logs.get("loss") is None:
            return
        self.step = state.global_step // self.trl_steps_per_step
        # of float16, the scaler leaves out an update whose gradient is infinite
        for name in ("loss",) if args.fp16 else ("loss", "grad_norm"):
            if not abs(number := logs.get(name, 0.0)) < float("inf"):
                raise NonFiniteError(
                    f"the {name} of step {self.step} is {number}; "
                    + (
                        "no update was made before, so look at the data and at the models"
                        if self.step == 1
                        else f"lower the learning rate, or look at the last checkpoint in {args.output_dir}"
                    )
                )
        self._evaluations = control.should_evaluate * self._held_out_sets()
        if not self._evaluations:
            self._record(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Record the step that was evaluated, with the rewards and the KL of the evaluation's responses."""
        self._evaluations -= 1
        if self._evaluations > 0:  # the responses to all held-out sets are one evaluation
            return
        evaluation, responses = ({}, []) if self.recorder is None else self.recorder.pop_evaluation()
        if "eval/reward" in evaluation:  # without a KL penalty, for the best checkpoint
            metrics["eval_reward"] = evaluation["eval/reward"]
        if self._evaluations == 0:
            self._logged |= evaluation
            self._record(state, control, held_out=responses)

    def _record(self, state: Any, control: Any, *, held_out: Sequence[Sample] = ()) -> None:
        """Write the step to the run log, and carry out the response to its alerts. A collective."""
        metrics, self._logged = {**self._logged, **self.pop_metrics()}, {}
        advice = None
        if self.run_log is not None:
            samples, event = getattr(self.recorder, "samples", ()), getattr(self.recorder, "event", "")
            controller, events, reason = next(self._callbacks(BetaController), None), [event], None
            if controller is not None and controller.since > self._trl_step:
                events, reason = [event, controller.controller.event], controller.reason
            monitor: Any = next(self._callbacks(DriftMonitor), None)
            kl = "" if monitor is None else self.metric_names.get(f"{monitor.name}/kl_per_sequence", "")
            advice = self.run_log.step(
                self.step,
                metrics,
                samples,
                [each for each in events if each],
                reason,
                held_out,
                by_prompt={kl: monitor.last.by_prompt} if kl in metrics else None,
            )
        self.metrics, self._trl_step = metrics, state.global_step
        self._carry_out(of_first_process(advice) or Advice(), control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the checksums of a new checkpoint, once every process has written its part."""
        self.trainer.accelerator.wait_for_everyone()
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.trainer.accelerator.process_index == 0 and checkpoint.is_dir():
            seal_folder(checkpoint)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check that a step was taken: transformers, and TRL's samplers, which leave out what fills no batch, do not.

        Raises:
            CannotRunError: if none was.
        """
        if state.global_step == 0:
            raise CannotRunError(
                "the trainer took no step: max_steps or num_train_epochs is 0, or its data fill no batch; give more "
                "rows, or make its batches smaller (generation_batch_size, per_device_train_batch_size, "
                "gradient_accumulation_steps)"
            )

    def result(
        self, algorithm: str, *, policy: str, out: str, dtypes: Mapping[str, str] | None = None
    ) -> TrainingResult:
        """The result of the run so far."""
        return TrainingResult(
            kleash=__version__,
            algorithm=algorithm,
            steps=self.step,
            stopped=next(
                filter(None, (each.stopped for each in self._callbacks(StepLogger, DriftMonitor))), None
            ),
            metrics=self.metrics,
            beta=getattr(self.trainer, "beta", None) if algorithm in PRICED else None,
            policy=policy,
            out=out,
            dtypes=dtypes or {},
            best=self.trainer.state.best_model_checkpoint,
        )

    def _held_out_sets(self) -> int:
        """The number of held-out sets, of which transformers evaluates each by itself."""
        return len(self.trainer.eval_dataset) if isinstance(self.trainer.eval_dataset, dict) else 1

    def _callbacks(self, *kinds: type[Any]) -> Any:
        """An iterator over the trainer's callbacks of some kinds."""
        return (each for each in self.trainer.callback_handler.callbacks if isinstance(each, kinds))

    def _carry_out(self, advice: Advice, control: Any) -> None:
        """Do what the response to the step's alerts is, on this rank."""
        match advice.act:
            case "stop":
                self.stopped = stopped_by(advice.alerts, self.step)
                control.should_training_stop = control.should_save = True
            case "halve-lr":
                halve_learning_rate(self.trainer)
            case "tighten":
                controller = next(self._callbacks(BetaController))  # which "tighten" requires
                controller.controller = tightened(controller.controller, self.job)
                self.trainer.beta = controller.controller.beta


class FolderLog(StepLogger):
    """A StepLogger that makes the folder of its run when training begins, and its result and report when it ends."""

    result_of_run: TrainingResult | None = None
    """The result, once training has ended."""

    def __init__(self, folder: Path, options: LogOptions, algorithm: str, **more: Any) -> None:
        """Create the callback; ``attach`` adds it to a trainer.

        Args:
            folder: the run's folder.
            options: of the run log.
            algorithm: what is trained by, for the result.
            more: further arguments of ``StepLogger``.
        """
        super().__init__(options, None, **more)
        again = "go on with it with trainer.train(resume_from_checkpoint=True), or give a new trainer another out="
        self.folder, self.algorithm = TrainingFolder(folder, again), algorithm
        self._open = ExitStack()

    def __repr__(self) -> str:
        """What is trained, the folder, and how far the run is."""
        return f"run log of {self.algorithm} in {self.folder.root}, at step {self.step}"

    def attach(self, trainer: Any) -> "FolderLog":
        """Add this callback to the trainer, whose ``train`` closes the folder at its end, also by an error."""
        super().attach(trainer)
        trainer.train = partial(self._train, trainer.train)
        return self

    def _train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.run_log = self.stopped = None
        with self._open:
            return original(*args, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Open the folder, on rank 0; a run in it goes on if the trainer resumes from a checkpoint, or begins again.

        Raises:
            RunFolderError: if the folder holds another run, or one that the trainer does not resume.
        """
        if state.is_world_process_zero:
            resume, is_again = state.global_step > 0, self.run_log is not None
            if is_again:
                LOG.warning(
                    "the trainer begins again after step %d with a smaller batch (auto_find_batch_size) and the "
                    "weights of now; the steps that it had taken beyond are no longer in the run log",
                    state.global_step,
                )
                self._open.close()
            if resume and moves_reference(self.trainer):
                LOG.warning(
                    "TRL's checkpoints lack the reference, which moves here; until it moves again it is the one that "
                    "this run began with"
                )
            header = RunHeader(
                kleash=__version__, settings=self.job.settings(), source_sha256="", fingerprints={}
            )
            self._open.enter_context(self.folder.writing(header, resume=resume or is_again))
            self.run_log = self._open.enter_context(closing(RunLog(self.folder.root, self.job)))
        super().on_train_begin(args, state, control, **more)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the trainer's checkpoint as it is."""

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the result and the report, on rank 0."""
        super().on_train_end(args, state, control)
        if self.run_log is not None and self.run_log.history:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self.result_of_run = finish(
                self.folder,
                self.run_log,
                self.result(
                    self.algorithm,
                    policy=str(checkpoint) if checkpoint.is_dir() else "",
                    out=str(self.folder.root),
                ),
            )
        self._open.close()  # also where a callback attached this one, in a training that has begun

    def _carry_out(self, advice: Advice, control: Any) -> None:
        """Also log alerts and response, as ``BetaController`` does its events: ``kleash train`` shows its own."""
        sentences = [f"alert at step {self.step}: {alert.sentence}" for alert in advice.alerts]
        sentences += [
            f"step {self.step}: {event}"
            for event in (getattr(self.recorder, "event", ""), *RESPONSE_EVENTS.get(advice.act, ()))
            if event
        ]
        for sentence in sentences if self.run_log is not None else ():  # once for all processes
            LOG.warning(sentence)
        super()._carry_out(advice, control)
