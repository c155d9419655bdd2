"""The folder of a training run."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kleash.errors import RunFolderError
from kleash.records.atomic import cannot_write, remove_leftovers, require_utf8
from kleash.records.checksums import CHECKSUMS, Checksums, record_removal, write_checked
from kleash.records.folder import RunHeader, begin_header, check_root, read_header, require_same
from kleash.records.locking import folder_lock
from kleash.records.steps import STEPS, StepRecord, read_steps
from kleash.records.training_result import TrainingResult

BEFORE_A_RUN = frozenset({".lock", CHECKSUMS})
RESULT = "training.json"
CHECKPOINTS = "checkpoints"


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
            remove_leftovers(self.root)
            if not self.begun:
                begin_header(self.root, header)
            yield self

    def check(self, *, resume: bool) -> None:
        """See, without touching anything, whether a run may be written here.

        Raises:
            RunFolderError: if not.
        """
        require_utf8(self.root)
        check_root(self.root, resume=resume, begun=self.begun, leftovers=BEFORE_A_RUN)

    @property
    def begun(self) -> bool:
        """Whether a step has been taken, whatever became of it."""
        return (self.root / STEPS).exists() or any((self.root / CHECKPOINTS).glob("*"))

    def header(self) -> RunHeader:
        """What the run in this folder is.

        Raises:
            RunFolderError: if it is none, or damaged.
        """
        return read_header(self.root)

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

    def unlink_result(self) -> None:
        """Take ``training.json`` away, if it is there: a finished run that goes on has not finished.

        Raises:
            RunFolderError: if it cannot be taken away.
        """
        path = self.root / RESULT
        if not path.exists():
            return
        record_removal(self.root, path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(path, error) from error

    def result(self) -> TrainingResult | None:
        """What the run came to; None while it has not finished.

        Raises:
            RunFolderError: if that is damaged, or gone.
        """
        path = self.root / RESULT
        checksums = Checksums.read(self.root)
        if not path.exists():
            if checksums.expects(path):
                raise RunFolderError(
                    f"{path} is missing, and the run wrote it; run again with --resume to make it anew, or copy the "
                    "whole folder again"
                )
            return None
        return checksums.read_record(
            TrainingResult,
            path,
            "the result of a training run",
            "delete it and run again with --resume to make it anew",
        )
