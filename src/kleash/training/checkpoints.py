"""Checkpoints of a training run: which is the newest, and writing and reading those of PPO."""

import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kleash.errors import RunFolderError, summarise_error
from kleash.extras import import_extra
from kleash.leash import Leash, beta_from_dict
from kleash.store.atomic import cannot_write, remove_folder, remove_leftovers, sync_folder, temporary_name
from kleash.store.checksums import Checksums, seal_folder
from kleash.store.codec import to_json
from kleash.store.training_folder import CHECKPOINTS
from kleash.training.actor_critic import ActorCritic
from kleash.training.ppo_setup import Run

STATE, PROGRESS, POLICY = "state.safetensors", "progress.json", "policy"
NAME = re.compile(r"(?:step|checkpoint)-([0-9]+)", re.ASCII)
"""Of the folders of kleash's PPO and of TRL's trainers."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The state of a PPO run besides its weights. Prompts, samples and minibatches follow from the step."""

    step: int = 0
    """The last completed step."""
    leash: Mapping[str, Any]
    """The controller's state after that step."""
    learning_rate: float
    """The learning rate of the next step."""
    metrics: Mapping[str, float]
    """The metrics of the last step."""
    alerts: tuple[str, ...] = ()
    """The alerts so far."""
    stopped: str | None = None
    """Why the run ended early, if it did."""

    @property
    def controller(self) -> Leash:
        """The controller, rebuilt from its state."""
        return beta_from_dict(self.leash)


@dataclass(frozen=True, kw_only=True)
class SavedProgress:
    """``progress.json``."""

    progress: TrainingState
    generators: tuple[Any, ...]
    """The random generator states of each process."""


def step_of(path: Path) -> int | None:
    """The step of a checkpoint; None for other paths."""
    name = NAME.fullmatch(path.name)
    return int(name[1]) if name is not None and path.is_dir() and not path.is_symlink() else None


def newest_checkpoint(folder: Path, last_file: str = "", *, besides: Path | None = None) -> Path | None:
    """The newest finished checkpoint in a folder of checkpoints; None if there is none.

    Args:
        folder: the folder.
        last_file: the file without which a checkpoint is not finished.
        besides: a checkpoint that does not count.
    """
    steps = {
        step: path
        for path in folder.glob("*")
        if (step := step_of(path)) is not None and path != besides and (path / last_file).exists()
    }
    return steps[max(steps)] if steps else None


def last_checkpoint(root: Path, last_file: str = "") -> Path | None:
    """The newest finished checkpoint of a run's folder, as ``newest_checkpoint``."""
    return newest_checkpoint(root / CHECKPOINTS, last_file)


def advice_if_damaged(checkpoint: Path, last_file: str = "") -> str:
    """What to do if a checkpoint is damaged: resume from another finished one, if there is one."""
    other = newest_checkpoint(checkpoint.parent, last_file, besides=checkpoint)
    if other is not None:
        return f"delete {checkpoint}, and --resume goes on from {other.name}"
    return "no other checkpoint is kept: begin the run again in another --out, or copy the checkpoint from a backup"


def save(root: Path, progress: TrainingState, run: Run) -> None:
    """Write ``checkpoints/step-…`` and delete earlier checkpoints. A collective.

    It is written under a temporary name and renamed once it is on disk, so a kill leaves the previous one.

    Raises:
        RunFolderError: if it cannot be written.
    """
    generators = run.group.all_gather_object(_generators())
    if run.group.is_first:
        folder = root / CHECKPOINTS
        final, unfinished = folder / f"step-{progress.step:06d}", folder / temporary_name()
        try:
            unfinished.mkdir(parents=True)
            _write(unfinished, run, {"progress": progress, "generators": generators})
            seal_folder(unfinished)
            if final.exists():
                remove_folder(final)
            unfinished.rename(final)
            sync_folder(folder)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise error if isinstance(error, RunFolderError) else cannot_write(final, error) from error
        remove_before(folder, progress.step)
    run.group.barrier()


def remove_before(folder: Path, step: int) -> None:
    """Remove unfinished checkpoints and those before ``step``.

    Raises:
        RunFolderError: if something cannot be removed.
    """
    try:
        remove_leftovers(folder)
        for path in folder.iterdir():
            number = step_of(path)
            if number is not None and number < step:
                remove_folder(path)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _write(folder: Path, run: Run, notes: Mapping[str, Any]) -> None:
    trained = {name: x for name, x in run.networks.named_parameters() if x.requires_grad}
    tensors = {f"weight/{name}": x for name, x in trained.items()} | {
        f"optimizer/{name}/{key}": x
        for name, parameter in trained.items()
        for key, x in run.optimizer.state.get(parameter, {}).items()
    }
    on_cpu = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    import_extra("safetensors.torch", "models").save_file(on_cpu, folder / STATE)
    (folder / PROGRESS).write_text(to_json(notes), encoding="utf-8")
    run.networks.save_policy(folder / POLICY)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
        sync_folder(path)


def load_progress(checkpoint: Path) -> SavedProgress:
    """The progress of a checkpoint, whose files are all verified.

    Raises:
        RunFolderError: if the checkpoint is damaged.
    """
    advice = advice_if_damaged(checkpoint)
    try:
        checksums = Checksums.read(checkpoint)
        saved = checksums.read_record(SavedProgress, checkpoint / PROGRESS, "the progress of a run", advice)
        checksums.check_all(advice=advice)
    except RunFolderError as error:
        raise RunFolderError(f"the checkpoint {checkpoint} cannot be read: {error}") from error
    if saved.progress.step != step_of(checkpoint):
        raise RunFolderError(f"{checkpoint} is the checkpoint of step {saved.progress.step}; {advice}")
    return saved


def restore(checkpoint: Path, saved: SavedProgress, run: Run) -> tuple[str, ...]:
    """Restore weights, optimiser and random generators; returns notes.

    Raises:
        RunFolderError: if the checkpoint is of another model, or has no state of generators.
    """
    safetensors = import_extra("safetensors", "models")
    damages = (LookupError, TypeError, ValueError, RuntimeError, OverflowError, OSError)
    try:
        with safetensors.safe_open(checkpoint / STATE, framework="pt") as stored, torch.no_grad():
            keys = list(stored.keys())
            for name, parameter in run.networks.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(stored.get_tensor(f"weight/{name}"))
                    start = f"optimizer/{name}/"
                    run.optimizer.state[parameter] = {
                        key.removeprefix(start): _like(stored.get_tensor(key), parameter)
                        for key in keys
                        if key.startswith(start)
                    }
        if len(saved.generators) != run.group.world_size:
            note = (
                f"the checkpoint is of {len(saved.generators)} processes, and now there are {run.group.world_size}: "
                "the state of Python's, numpy's and torch's random generators starts anew"
            )
            return (note,)
        _set_generators(saved.generators[run.group.rank])
    except (*damages, safetensors.SafetensorError) as error:
        raise RunFolderError(
            f"the checkpoint {checkpoint} cannot be restored: {summarise_error(error)}; "
            f"{advice_if_damaged(checkpoint)}"
        ) from error
    return ()


def _like(x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor of the optimiser's state where it keeps it: moments beside their parameter, counts on the CPU."""
    return x.to(parameter.device) if x.shape == parameter.shape else x


def _generators() -> dict[str, Any]:
    """The states of the process's random generators."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
    }


def _set_generators(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))


def publish(networks: ActorCritic, final: Path) -> None:
    """Write the policy of a finished run, under a temporary name first.

    Raises:
        RunFolderError: if it cannot be written.
    """
    unfinished = final.with_name(temporary_name())
    try:
        networks.save_policy(unfinished)
        if final.exists():
            remove_folder(final)
        unfinished.rename(final)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise cannot_write(final, error) from error
