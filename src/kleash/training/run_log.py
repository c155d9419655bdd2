"""The log of a training run: writes each step to disk, terminal and trackers, and monitors reward hacking."""

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from kleash.errors import RunFolderError, TrackerWarning, summarise_error
from kleash.jobs import TrainJob
from kleash.registry import options_given
from kleash.reports.trackers import Tracker, open_trackers
from kleash.reports.training import step_warnings
from kleash.store import HackingAlert, Sample, StepRecord, TrainingResult, read_steps
from kleash.store.checksums import HashSoFar, remove_checked
from kleash.store.file_hashes import require_unchanged_files
from kleash.store.metrics import spelt, with_errors
from kleash.store.steps import STEPS, append_step, keep_steps, means_by_prompt, read_prompt_means
from kleash.store.training_folder import RESULT
from kleash.training.hacking_monitor import HackingMonitor, distinct, repetition
from kleash.uncertainty import clustered_mean

SAMPLES_KEPT = 4
"""Responses per step in ``samples.jsonl``."""
RESPONSE_EVENTS: Mapping[str | None, tuple[str, ...]] = MappingProxyType(
    {
        "halve-lr": ("the learning rate is halved in response to an alert",),
        "tighten": ("beta is doubled in response to an alert, at most to its largest value",),
    }
)
"""Response to an alert -> what the run log says of it; that the run is stopped is in its result."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The response to a step's alerts that the trainer has to carry out."""

    alerts: tuple[HackingAlert, ...] = ()
    """The alerts of the hacking monitor."""
    act: str | None = None
    """"stop", "halve-lr" or "tighten" (beta is doubled), as the job's ``on_hacking`` says when there is
    an alert; None: go on."""


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What a run log knows of a run that is no job of ``kleash train``."""

    target_nats: float | None = None
    """The KL that a controller steers to."""
    target_per: str = TrainingResult.target_per
    """"sequence" or "token"."""
    beta_max: float = math.inf
    """The largest beta."""
    on_hacking: str = "warn"
    """The response to alerts: "warn", "stop", "halve-lr" or "tighten"."""
    report_to: tuple[str, ...] = ()
    """Trackers."""
    metric_names: str = "kleash"
    """How trackers see the metrics spelt."""
    described: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The settings of the run, for its header and the trackers."""

    def settings(self) -> dict[str, Any]:
        """The settings of the run."""
        return dict(self.described)


class Display(Protocol):
    """What shows the progress of a run: an object with these methods, as the command's progress line."""

    def note(self, sentence: str) -> None:
        """Show a note."""

    def working(self, step: int, activity: str) -> None:
        """Show what is done in a step that is not finished."""

    def stepped(self, record: StepRecord) -> None:
        """Show a finished step."""


class NullDisplay(Display):
    """Shows nothing."""


class RunLog:
    """Records the steps of a run; exists on rank 0 only.

    ::

        run_log = RunLog(folder, job)
        run_log.begin(checkpoint_step)      # 0 for a new run
        for step in range(checkpoint_step + 1, job.steps + 1):
            ...
            advice = run_log.step(step, metrics, samples, events)
        run_log.close()

    Every step is a line of ``steps.jsonl``, on disk when ``step`` returns; a few of its responses are lines of
    ``samples.jsonl``, and its means by prompt a line of ``prompts.jsonl``. When a run resumes from a checkpoint,
    ``begin`` removes later and incomplete lines.
    """

    def __init__(
        self,
        folder: Path,
        job: TrainJob | LogOptions,
        *,
        display: Display | None = None,
        monitor: HackingMonitor | None = None,
    ) -> None:
        """Set up the log; files are opened by ``begin``.

        Args:
            folder: the run's folder, which exists.
            job: its target, its response to alerts and its trackers are used; ``LogOptions`` where there is no job.
            display: shows the steps.
            monitor: other thresholds than those of ``HackingMonitor``; its target is the job's.
        """
        self.folder, self.job = folder, job
        self.display = NullDisplay() if display is None else display  # pyrefly: ignore[bad-instantiation]
        self.monitor = replace(
            monitor if monitor is not None else HackingMonitor(),
            target_nats=getattr(job, "target_nats", None),
            target_per=getattr(job, "target_per", TrainingResult.target_per),
        )
        self.history: list[StepRecord] = []
        """The steps so far."""
        self._best: Mapping[str, float] = {}
        """Held-out prompt -> mean reward in the best evaluation so far."""
        self._hashes: dict[str, HashSoFar] = {}
        """File -> hash of its lines so far."""
        self._trackers: list[Tracker] = []

    def begin(self, step: int, notes: Sequence[str] = ()) -> None:
        """Start after ``step``, the step of the checkpoint; 0 for a new run. Models and prompts are read by then.

        Args:
            step: the last one that stays in the log.
            notes: what is shown, such as the notes about the models.

        Raises:
            ChangedInputError: if a file of models or prompts is no longer the one whose hash is in the run's header.
            RunFolderError: if the files of the run cannot be read or written, or lack steps before ``step``.
            MissingExtraError: if a tracker is not installed.
        """
        require_unchanged_files()
        keep_steps(self.folder, step)
        self._hashes = {}
        self.history = list(read_steps(self.folder))
        for evaluation in read_prompt_means(self.folder):
            self._change_from_best(evaluation.means)
        last = self.history[-1].step if self.history else 0
        # a training of attach may have begun without its log
        if last != step and (self.history or not isinstance(self.job, LogOptions)):
            raise RunFolderError(
                f"{self.folder / STEPS} ends at step {last}, and the checkpoint is of step {step}; copy the whole "
                "folder again, or begin again in another --out"
            )
        self._trackers = open_trackers(self.job.report_to, self.job.settings(), self.folder, after=step)
        if step >= getattr(self.job, "steps", math.inf):
            notes = (*notes, f"nothing is left to do after step {step}; give more --steps")
        elif step:
            notes = (*notes, f"going on after step {step}")
        elif getattr(self.job, "resume", False):
            notes = (*notes, f"{self.folder} has no checkpoint to go on from: training begins at step 1")
        for note in notes:
            self.display.note(note)
        self.display.working(step + 1, "starting")

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        samples: Sequence[Sample] = (),
        events: Sequence[str] = (),
        beta_reason: str | None = None,
        held_out: Sequence[Sample] = (),
        by_prompt: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Advice:
        """Write and show a step; returns the response to its alerts.

        Args:
            step: its number, from 1.
            metrics: by kleash's names. ``kl/target``, ``response/repetition``, ``response/distinct`` and
                ``eval/reward_change``, with its number of prompts, are added.
            samples: all its responses; some are kept.
            events: what else happened, in words.
            beta_reason: why beta is moved after this step, where it is.
            held_out: the responses of an evaluation after the step.
            by_prompt: metric -> hash of a prompt -> mean, of responses that are neither of these.

        Raises:
            UnknownNameError: if ``METRICS`` does not have a metric.
            RunFolderError: if the disk is full.
        """
        texts = [sample.response for sample in samples]
        text_metrics = (
            {"response/repetition": repetition(texts), "response/distinct": distinct(texts)} if texts else {}
        )
        means = {**means_by_prompt(samples, held_out), **(by_prompt or {})}
        target = options_given(**{"kl/target": self.monitor.target_nats})
        known = {**metrics, **target, **text_metrics, **self._change_from_best(means)}
        values = {name: float(value) for name, value in known.items()}
        named = {spelt(name, self.job.metric_names): value for name, value in values.items()}  # or raises
        record = StepRecord(step=step, metrics=values, events=tuple(events), beta_reason=beta_reason)
        alerts = self.monitor.check([*self.history, record])
        if isinstance(self.job, LogOptions):
            alerts = tuple(replace(alert, sentence=as_keywords(alert.sentence)) for alert in alerts)
        advice = self.advice(alerts)
        record = replace(record, alerts=alerts, events=(*events, *RESPONSE_EVENTS.get(advice.act, ())))
        remove_checked(self.folder, self.folder / RESULT)  # a finished run that goes on has not finished
        append_step(self.folder, record, spread_sample(samples), means, self._hashes)
        warnings = step_warnings(values)
        if warnings and not any(step_warnings(earlier.metrics) for earlier in self.history):
            for warning in warnings:
                self.display.note(warning)
        self.history.append(record)
        for tracker in tuple(self._trackers):
            self._try(
                tracker,
                partial(tracker.log, named, step),
                f"did not get step {step} and gets no further ones",
            )
        self.display.stepped(record)
        return advice

    def _change_from_best(self, means: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Metrics of the paired change of the held-out reward from the best evaluation so far; empty without one.

        Args:
            means: metric -> prompt -> mean, of a step. Its rewards are the best so far unless they have fallen.
        """
        rewards, best = means.get("eval/reward", {}), self._best
        changes = np.array([rewards[prompt] - best[prompt] for prompt in rewards if prompt in best])
        change = clustered_mean(changes, np.arange(len(changes)), unit="none") if len(changes) else None
        if rewards and (change is None or change.value > 0):
            self._best = rewards
        return (
            {}
            if change is None
            else {"eval/prompts": float(change.clusters), **with_errors({"eval/reward_change": change})}
        )

    def advice(self, alerts: tuple[HackingAlert, ...]) -> Advice:
        """The response to the alerts of a step, as the job's ``on_hacking`` says; some alerts only inform."""
        acts = any(alert.acts for alert in alerts) and self.job.on_hacking != "warn"
        return Advice(alerts=alerts, act=self.job.on_hacking if acts else None)

    def close(self) -> None:
        """Close the trackers."""
        for tracker in tuple(self._trackers):
            self._try(tracker, tracker.close, "may lack the last steps")
        self._trackers = []

    def _try(self, tracker: Tracker, call: Callable[[], None], consequence: str) -> None:
        """Call a tracker; one that fails is left out from then on, and the training continues."""
        try:
            call()
        except Exception as error:  # any exception of the tracker's own code
            self._trackers.remove(tracker)
            warnings.warn(
                f"the tracker {tracker.name} {consequence} ({summarise_error(error)}); all steps are in "
                f"{self.folder / STEPS}",
                TrackerWarning,
                stacklevel=3,
            )


def as_keywords(sentence: str) -> str:
    """The options of the command line in a sentence, as the arguments of ``attach`` and TRL are called.

    Not each step of a trainer is measured: TRL's default is to log every tenth.
    """
    renamed = sentence.replace("--samples-per-prompt", "num_generations").replace("--target-per", "per")
    renamed = re.sub("([0-9]+) steps", r"\1 measurements", renamed)
    return re.sub("--[a-z-]+", lambda flag: flag[0][2:].replace("-", "_"), renamed)


def stopped_by(alerts: Sequence[HackingAlert], step: int) -> str:
    """The sentence about a run that the hacking monitor stopped."""
    return f"the hacking monitor stopped it after step {step}: {alerts[0].sentence}"


def spread_sample(samples: Sequence[Sample]) -> list[Sample]:
    """A few of a step's responses, evenly spaced."""
    count = min(SAMPLES_KEPT, len(samples))
    return [samples[at * len(samples) // count] for at in range(count)]
