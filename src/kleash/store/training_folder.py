"""The folder and the result of a training run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from kleash.errors import RunFolderError
from kleash.store.atomic import require_utf8
from kleash.store.checksums import CHECKSUMS, Checksums, write_checked
from kleash.store.job_folder import JobFolder
from kleash.store.steps import STEPS, StepRecord, read_steps
from kleash.store.summary import MeasuredResult

RESULT = "training.json"
CHECKPOINTS = "checkpoints"
POLICY = "policy"
"""The folder of the trained model or adapter, in that of the run and in PPO's checkpoints."""
MAX_LISTED = 20
"""Alerts of a run, or events, that a page or a summary lists: the last ones; ``steps.jsonl`` has all."""
CHECKPOINT_NAME = re.compile("checkpoint-([0-9]+)", re.ASCII)
DAMAGED = (
    "delete the checkpoint, and --resume goes on from the one before it, or begins again if none is kept"
)
"""What to do if a checkpoint is damaged."""


def checkpoint_number(path: Path) -> int | None:
    """The step of the trainer in the name of a finished checkpoint, which has checksums; None for other paths."""
    name = CHECKPOINT_NAME.fullmatch(path.name)
    return int(name[1]) if name is not None and (path / CHECKSUMS).exists() else None


def last_checkpoint(root: Path) -> Path | None:
    """The newest finished checkpoint of a run's folder; None if there is none."""
    finished = {
        number: path
        for path in (root / CHECKPOINTS).glob("*")
        if (number := checkpoint_number(path)) is not None
    }
    return finished[max(finished)] if finished else None


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class TrainingResult(MeasuredResult):
    """``training.json``: the result of a training run."""

    views: ClassVar[str] = ".summary() and .to_dict()"

    kleash: str
    """The version that ran it."""
    algorithm: str
    """"ppo", "grpo", "rloo", "dpo" or "distill"; of another trainer, its name in small letters ("sft")."""
    steps: int
    """Steps that were taken, in all."""
    stopped: str | None = None
    """Why it ended before the last step, in words; None if it did not."""
    metrics: Mapping[str, float]
    """Of the last step, by kleash's names; with those of the responses that it learns from again."""
    held_out: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the last evaluation on held-out prompts, by kleash's names; empty without one."""
    best: str | None = None
    """The checkpoint that a trainer of transformers kept as the best of its evaluations; None if there is none."""
    target_per: str = "sequence"
    """What ``kl/target`` is of, where there is one: a "sequence" or a "token"."""
    beta: float | None = None
    """Where the leash ended."""
    policy: str
    """Folder of the trained model or adapter, which "kleash measure --policy" reads; empty if none was saved."""
    out: str
    """The run's folder."""
    dtypes: Mapping[str, str] = field(default_factory=dict[str, str])
    """In which dtypes the weights of the models were in memory, by role: policy, and reference or teacher."""
    alerts: tuple[str, ...] = ()
    """The alerts of the run, in order."""


@dataclass(frozen=True)
class TrainingFolder(JobFolder):
    """The files of one training run.

    ``run.json`` says what is run, ``steps.jsonl`` and ``samples.jsonl`` how it goes; the trainer's own are
    ``checkpoints/`` and ``policy/``; ``training.json`` and ``report.html`` come at the end.
    """

    leftovers: ClassVar[frozenset[str]] = frozenset({".lock", CHECKSUMS})

    def check(self, *, resume: bool) -> None:
        """Check, without changing anything, that a run may be written here; safetensors opens only names in UTF-8.

        Raises:
            RunFolderError: if not.
        """
        require_utf8(self.root)
        super().check(resume=resume)

    @property
    def begun(self) -> bool:
        """Whether a step has been taken, whatever became of it."""
        return (self.root / STEPS).exists() or any((self.root / CHECKPOINTS).glob("*"))

    def history(self) -> tuple[StepRecord, ...]:
        """The steps of the run.

        Raises:
            RunFolderError: if they are damaged, or those of a finished run are not all there.
        """
        steps, result = read_steps(self.root), self.result()
        last = steps[-1].step if steps else 0
        if result is not None and last != result.steps:
            raise RunFolderError(
                f"{self.root / STEPS} ends at step {last}, and the run finished after step {result.steps}; copy the "
                "whole folder again"
            )
        return steps

    def write_result(self, result: TrainingResult) -> None:
        """Write ``training.json``: with it the run is finished."""
        write_checked(self.root, self.root / RESULT, result.to_json())

    def result(self) -> TrainingResult | None:
        """The result of the run; None while it has not finished.

        Raises:
            RunFolderError: if that is damaged, or gone.
        """
        return Checksums.read(self.root).read_if_written(
            TrainingResult,
            self.root / RESULT,
            "the result of a training run",
            "delete it, if it is there, and run again with --resume to make it anew",
        )
