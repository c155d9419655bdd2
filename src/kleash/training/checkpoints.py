"""Checkpoints of PPO: Accelerate's state in a folder that has its name once it is complete and sealed by checksums."""

import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kleash.errors import RunFolderError
from kleash.extras import import_extra
from kleash.store.atomic import cannot_write, remove_folder, remove_leftovers, sync_folder, temporary_name
from kleash.store.checksums import Checksums, seal_folder
from kleash.store.codec import to_json
from kleash.store.training_folder import DAMAGED, POLICY, checkpoint_number, last_checkpoint
from kleash.training.networks import ActorCritic
from kleash.training.response_metrics import of_first_process

PROGRESS = "progress.json"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """``progress.json``: the state of a run besides weights and generators. The rest follows from seed and step."""

    step: int = 0
    """The last completed step."""
    leash: Mapping[str, Any]
    """The controller's state after that step."""
    learning_rate: float
    """The learning rate of the next step."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """The metrics of the last step."""
    stopped: str | None = None
    """Why the run ended early, if it did."""
    processes: int = 1


def save(folder: Path, progress: TrainingState, accelerator: Any, networks: ActorCritic) -> None:
    """Write the checkpoint of a step, with Accelerate's state, and remove earlier ones. A collective.

    Raises:
        RunFolderError: if it cannot be written.
    """
    checkpoint = folder / f"checkpoint-{progress.step}"  # the name that transformers gives it
    with replaced_folder(checkpoint, accelerator) as unfinished:
        accelerator.save_state(str(unfinished))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            networks.save_policy(unfinished / POLICY)
            state = replace(progress, processes=accelerator.num_processes)
            (unfinished / PROGRESS).write_text(to_json(state), encoding="utf-8")
            seal_folder(unfinished)
    _remove_earlier(folder, progress.step, accelerator)


def _remove_earlier(folder: Path, step: int, accelerator: Any) -> None:
    """Remove the checkpoints before a step, and what killed processes left."""
    if accelerator.is_main_process:
        remove_leftovers(folder)
        for path in folder.iterdir():
            if (checkpoint_number(path) or step) < step:
                remove_folder(path)


@contextmanager
def replaced_folder(final: Path, accelerator: Any) -> Iterator[Path]:
    """Context in which the processes write a folder under a temporary name; complete, it takes the place of ``final``.

    A kill leaves the previous one.

    Raises:
        RunFolderError: if it cannot be written.
    """
    unfinished = final.with_name(of_first_process(temporary_name()))
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        yield unfinished
        if accelerator.is_main_process:
            for path in unfinished.rglob("*"):
                sync_folder(path)
            if final.exists():
                remove_folder(final)
            unfinished.rename(final)
            sync_folder(final.parent)
        accelerator.wait_for_everyone()
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise error if isinstance(error, RunFolderError) else cannot_write(final, error) from error


def restore_last(folder: Path, accelerator: Any) -> TrainingState | None:
    """Restore weights, optimiser and generators from the last checkpoint in a folder; None if there is none yet.

    All its files are verified. Earlier checkpoints that a kill left are removed.

    Raises:
        RunFolderError: if no checkpoint has checksums (each is sealed before it has its name), if the last is damaged
            or of another number of processes, or if a random generator is not restored.
    """
    checkpoint = last_checkpoint(folder.parent)
    if checkpoint is None:
        if any(folder.glob("checkpoint-*/")):
            raise RunFolderError(f"the checkpoint in {folder} has lost its checksums; {DAMAGED}")
        return None
    checksums = Checksums.read(checkpoint)
    progress = checksums.read_record(TrainingState, checkpoint / PROGRESS, "the progress of a run", DAMAGED)
    checksums.check_all(advice=DAMAGED)
    if progress.processes != accelerator.num_processes:
        raise RunFolderError(
            f"{checkpoint} is of {progress.processes} processes, each with generators of its own, and there are "
            f"{accelerator.num_processes}; go on with as many as before"
        )
    accelerator.load_state(str(checkpoint))
    name = f"random_states_{accelerator.process_index}.pkl"
    saved = import_extra("accelerate.utils", "train").load(checkpoint / name)
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:  # Accelerate goes on where it cannot restore a generator
        tensors = [saved["torch_manual_seed"], *saved.get("torch_cuda_manual_seed", [])]
        np.testing.assert_equal(
            [random.getstate(), np.random.get_state(), *map(np.asarray, [torch.get_rng_state(), *devices])],  # noqa: NPY002
            [saved["random_state"], saved["numpy_random_seed"], *map(np.asarray, tensors)],
        )
    except (AssertionError, LookupError) as error:
        raise RunFolderError(
            f"the random generators in {checkpoint} cannot be restored; {DAMAGED}"
        ) from error
    _remove_earlier(folder, progress.step, accelerator)
    return progress
