"""The folder of a training run."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kleash.errors import RunFolderError
from kleash.records.atomic import TEMPORARY, cannot_write, write_atomically
from kleash.records.codec import decode, to_json
from kleash.records.folder import RunHeader, check_root, read_header, require_same
from kleash.records.locking import folder_lock
from kleash.records.steps import STEPS
from kleash.records.training_result import TrainingResult

BEFORE_A_RUN = frozenset({".lock", f"{TEMPORARY}run.json"})
RESULT = "training.json"


@dataclass(frozen=True)
class TrainingFolder:
    """The files of one training run.

    ``run.json`` says what is run, ``steps.jsonl`` and ``samples.jsonl`` how it goes; the trainer's own are
    ``checkpoints/`` and ``policy/``; ``training.json`` and ``report.html`` come at the end.
    """

    root: Path

    @contextmanager
    def writing(self, header: RunHeader, *, resume: bool) -> Generator["TrainingFolder"]:
        """Hold the folder for this process alone, begun afresh or gone on with.

        Raises:
            RunFolderError: if it holds something already and ``resume`` is false, if another run
                wrote what it holds, or if another process is writing it.
        """
        self.check(resume=resume)
        with folder_lock(self.root, "wait for it, or give another --out"):
            self.check(resume=resume)
            if self.begun:
                require_same(self.root, read_header(self.root), header)
            else:
                write_atomically(self.root / "run.json", to_json(header))
            yield self

    def check(self, *, resume: bool) -> None:
        """See, without touching anything, whether a run may be written here.

        Raises:
            RunFolderError: if not.
        """
        check_root(self.root, resume=resume, begun=self.begun, leftovers=BEFORE_A_RUN)

    @property
    def begun(self) -> bool:
        """Whether a step has been taken."""
        return (self.root / STEPS).exists()

    def header(self) -> RunHeader:
        """What the run in this folder is.

        Raises:
            RunFolderError: if it is none, or damaged.
        """
        return read_header(self.root)

    def write_result(self, result: TrainingResult) -> None:
        """Write ``training.json``: with it the run is finished."""
        write_atomically(self.root / RESULT, result.to_json())

    def take_back_result(self) -> None:
        """Take ``training.json`` away, if it is there: a finished run that goes on has not finished.

        Raises:
            RunFolderError: if it cannot be taken away.
        """
        try:
            (self.root / RESULT).unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(self.root / RESULT, error) from error

    def result(self) -> TrainingResult | None:
        """What the run came to; None while it has not finished.

        Raises:
            RunFolderError: if that is damaged.
        """
        path = self.root / RESULT
        if not path.exists():
            return None
        try:
            return decode(TrainingResult, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RunFolderError(f"{path} cannot be read as the result of a training run: {error}") from error
