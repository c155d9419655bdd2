"""Differences between training runs, paired by prompt, from their files."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from kleash.errors import RunFolderError
from kleash.registry import grouped
from kleash.store.comparison import (
    KLS,
    PAIRED,
    SHOWN,
    ComparedTraining,
    RunDifference,
    TrainingComparison,
)
from kleash.store.job_folder import RunHeader
from kleash.store.metrics import metric_of, number_of
from kleash.store.steps import STEPS, PromptRecord, StepRecord, read_prompt_means
from kleash.store.training_folder import TrainingFolder, TrainingResult
from kleash.uncertainty import Estimate, clustered_mean, paired_difference
from kleash.version import __version__

NOT_COMPARED = {"steps", "report_to", "seed"}
"""Options that do not make a run another one."""
DEFAULT = "the default"


@dataclass(frozen=True, kw_only=True)
class _TrainingRun:
    folder: Path
    name: str
    header: RunHeader
    history: Sequence[StepRecord]
    prompts: Sequence[PromptRecord]
    result: TrainingResult | None

    def by_prompt(self, metric: str, steps: range) -> dict[str, float]:
        """Hash of a prompt -> mean of a metric over those of the steps that have it."""
        means = [record.means.get(metric, {}) for record in self.prompts if record.step in steps]
        values = grouped(item for each in means for item in each.items())
        return {prompt: fmean(each) for prompt, each in values.items()}


def compare_training(folders: Sequence[Path], names: Sequence[str]) -> TrainingComparison:
    """The differences of training runs from the first one over the second half of the steps that all have taken.

    Rewards and KL are means over prompts of each prompt's mean over these steps. Two runs are paired by the prompts
    that both answered, so that what makes a prompt easy cancels. The errors are those of responses and prompts: runs
    of another seed may differ by more.

    Args:
        folders: of two or more training runs, finished or not.
        names: short names of the runs.

    Raises:
        RunFolderError: if a folder holds no step, or is damaged.
    """
    runs = [_read(folder, name) for folder, name in zip(folders, names, strict=True)]
    last = min(run.history[-1].step for run in runs)
    steps = range(last // 2 + 1, last + 1)
    compared = tuple(_compared(run, runs[0], steps) for run in runs)
    references = [run.header.fingerprints.get("reference") for run in runs]
    return TrainingComparison(
        kleash=__version__,
        first_step=steps.start,
        last_step=last,
        runs=compared,
        differences=tuple(_difference(run, runs[0], steps) for run in runs[1:]),
        warnings=(
            *(
                f"{name} has another reference than {names[0]}"
                for name, reference in zip(names, references, strict=True)
                if None not in (reference, references[0]) and reference != references[0]
            ),
            *(
                f"{run.name} has no KL to a reference in these steps"
                for run in compared
                if run.numbers.keys().isdisjoint(KLS)
            ),
        ),
    )


def _read(folder: Path, name: str) -> _TrainingRun:
    """A run with what of its files is compared."""
    files = TrainingFolder(folder)
    header, history = files.header(), files.history()
    if not history:
        raise RunFolderError(f"{folder / STEPS} has no step yet; compare runs that have taken one")
    return _TrainingRun(
        folder=folder,
        name=name,
        header=header,
        history=history,
        prompts=tuple(read_prompt_means(folder)),
        result=files.result(),
    )


def _compared(run: _TrainingRun, first: _TrainingRun, steps: range) -> ComparedTraining:
    """A run's entry in the comparison: its means over the compared steps, and where its settings differ from the first.

    A metric of ``PAIRED`` that is known by prompt is the mean over prompts, with its error; another, and one of
    ``SHOWN``, the mean over steps. Settings of two runs to which kleash was attached lack what is the default of their
    algorithm.
    """
    numbers = {
        metric: clustered_mean(
            np.array([*values.values()]),
            np.arange(len(values)),
            unit=_unit(metric),
            lower=0.0 if _unit(metric) == "nats" else None,  # no exact KL is below 0
        )
        for metric in PAIRED
        if (values := run.by_prompt(metric, steps))
    }
    in_steps = [record.metrics for record in run.history if record.step in steps]
    numbers |= {
        metric: replace(number_of({metric: fmean(values)}, metric), unit=_unit(metric))
        for metric in (*PAIRED, *SHOWN)
        if metric not in numbers
        and (values := [metrics[metric] for metrics in in_steps if metric in metrics])
    }
    settings, first_settings = run.header.settings, first.header.settings
    is_attached = "trainer" in settings.keys() & first_settings.keys() and (
        settings["algorithm"] == first_settings["algorithm"]  # a leashed trainer has the defaults of TRL's
    )
    return ComparedTraining(
        name=run.name,
        folder=str(run.folder),
        algorithm=str(settings.get("algorithm", "")),
        steps=run.history[-1].step,
        target_per=str(settings.get("target_per", TrainingResult.target_per)),
        numbers=numbers,
        settings={
            option: f"{settings.get(option, DEFAULT)} for {first_settings.get(option, DEFAULT)}"
            for option in {**settings, **first_settings}
            if (is_attached or option in settings.keys() & first_settings.keys())
            and option not in NOT_COMPARED
            if settings.get(option, DEFAULT) != first_settings.get(option, DEFAULT)
        },
        alerts=sum(len(record.alerts) for record in run.history),
        ended="running or interrupted" if run.result is None else run.result.stopped or "finished",
    )


def _difference(run: _TrainingRun, first: _TrainingRun, steps: range) -> RunDifference:
    """The differences of a run from the first one, over the prompts that both have answered."""
    differences: dict[str, Estimate] = {}
    answered, answered_first, paired = set[str](), set[str](), set[str]()
    for metric in PAIRED:
        means, first_means = (each.by_prompt(metric, steps) for each in (run, first))
        if shared := sorted(means.keys() & first_means.keys()):
            paired |= set(shared)
            minuend, subtrahend = (
                np.array([side[prompt] for prompt in shared]) for side in (means, first_means)
            )
            counts = np.ones(len(shared))
            differences[metric] = paired_difference(minuend, counts, subtrahend, counts, unit=_unit(metric))
        answered |= means.keys()
        answered_first |= first_means.keys()
    return RunDifference(
        name=run.name,
        minus=first.name,
        shared_prompts=len(paired),
        only_here=len(answered - paired),
        only_there=len(answered_first - paired),
        differences=differences,
        warnings=(
            f"{run.name} and {first.name} share no prompt's number in these steps, so they are not compared in pairs",
        )
        if answered and answered_first and not paired
        else (),
    )


def _unit(metric: str) -> str:
    """The unit of a metric's estimate: rewards have none."""
    unit = metric_of(metric).unit
    return "none" if unit == "reward" else unit
