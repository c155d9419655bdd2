"""Checkpoints of PPO: Accelerate's state in a folder that has its name once it is complete and sealed by checksums."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kleash.errors import RunFolderError
from kleash.store.atomic import remove_folder, remove_leftovers, sync_folder, temporary_name, writing
from kleash.store.checksums import Checksums, seal_folder
from kleash.store.codec import to_json
from kleash.store.training_folder import DAMAGED, POLICY, checkpoint_number, last_checkpoint
from kleash.training.networks import ActorCritic
from kleash.training.response_metrics import of_first_process

PROGRESS = "progress.json"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """``progress.json``: the state of a run besides weights and optimiser. The rest follows from seed and step."""

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


def save(folder: Path, progress: TrainingState, accelerator: Any, networks: ActorCritic) -> None:
    """Write the checkpoint of a step, and remove earlier ones. A collective.

    It is written under a temporary name. What a kill leaves of it is removed by the next call, before more is written.

    Raises:
        RunFolderError: if it cannot be written; the earlier checkpoint is kept.
    """
    checkpoint = folder / f"checkpoint-{progress.step}"  # transformers' name
    with writing(checkpoint):
        if accelerator.is_main_process:
            remove_leftovers(folder)
        unfinished = folder / of_first_process(temporary_name())
        try:
            accelerator.save_state(str(unfinished))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                networks.save_policy(unfinished / POLICY)
                (unfinished / PROGRESS).write_text(to_json(progress), encoding="utf-8")
                seal_folder(unfinished)
                for path in unfinished.rglob("*"):
                    sync_folder(path)
                unfinished.rename(checkpoint)
                sync_folder(folder)
                for path in folder.iterdir():
                    if path != checkpoint and checkpoint_number(path) is not None:
                        remove_folder(path)
            accelerator.wait_for_everyone()
        finally:  # where it has not been renamed
            shutil.rmtree(unfinished, ignore_errors=True)


def restore_last(folder: Path, accelerator: Any) -> TrainingState | None:
    """Restore weights and optimiser from the last checkpoint in a folder; None if there is none yet.

    All its files are verified.

    Raises:
        RunFolderError: if no checkpoint has checksums (each is sealed before it has its name), or the last is damaged.
    """
    checkpoint = of_first_process(last_checkpoint(folder.parent))
    if checkpoint is None:
        if any(folder.glob("checkpoint-*/")):
            raise RunFolderError(f"the checkpoint in {folder} has lost its checksums; {DAMAGED}")
        return None
    checksums = Checksums.read(checkpoint)
    progress = checksums.read_record(TrainingState, checkpoint / PROGRESS, "the progress of a run", DAMAGED)
    checksums.check_all(advice=DAMAGED)
    accelerator.load_state(str(checkpoint))
    return progress
