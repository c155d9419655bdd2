"""Atomic checkpoints with the complete state of a PPO run."""

import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kleash.errors import RunFolderError, summarise_error
from kleash.extras import import_extra, suppress_library_output
from kleash.leash import Leash, beta_from_dict
from kleash.models.sharded_networks import reshard
from kleash.models.text_towers import copy_other_parts
from kleash.store.atomic import cannot_write, remove_folder, remove_leftovers, sync_folder, temporary_name
from kleash.store.checksums import Checksums, seal_folder
from kleash.store.codec import to_json
from kleash.store.training_folder import CHECKPOINTS
from kleash.training.ppo.policy import Policy
from kleash.training.ppo.setup import TrainingSetup

STATE, PROGRESS, POLICY = "state.safetensors", "progress.json", "policy"
NAME = re.compile(r"step-([0-9]{6,})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The state of a run besides its weights. Prompts, samples and minibatches follow from the step."""

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
class SavedState:
    """``progress.json``."""

    progress: TrainingState
    generators: tuple[Any, ...]
    """The random generator states of each process."""


def save(setting: TrainingSetup, root: Path, progress: TrainingState) -> None:
    """Write ``checkpoints/step-…`` and delete earlier checkpoints. A collective.

    It is written under a temporary name and renamed once it is on disk, so a kill leaves the previous one.

    Raises:
        RunFolderError: if it cannot be written.
    """
    reshard(setting.actor_critic.policy)
    tensors = _tensors(setting)
    generators = setting.group.all_gather_object(_generators())
    if setting.group.is_first:
        folder = root / CHECKPOINTS
        final = folder / f"step-{progress.step:06d}"
        unfinished = folder / temporary_name()
        try:
            unfinished.mkdir(parents=True)
            notes = {"checksums": True, "progress": progress, "generators": generators}
            _write(setting, unfinished, tensors, notes)
            seal_folder(unfinished)
            if final.exists():
                remove_folder(final)
            unfinished.rename(final)
            sync_folder(folder)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise error if isinstance(error, RunFolderError) else cannot_write(final, error) from error
        _remove_before(folder, progress.step)
    setting.group.barrier()


def tidy_checkpoints(root: Path) -> None:
    """Remove unfinished checkpoints and those before the newest.

    Raises:
        RunFolderError: if something cannot be removed.
    """
    newest = last_checkpoint(root)
    step = None if newest is None else step_of(newest)
    if step is not None:
        _remove_before(root / CHECKPOINTS, step)


def _remove_before(folder: Path, step: int) -> None:
    try:
        remove_leftovers(folder)
        for path in folder.iterdir():
            number = step_of(path)
            if number is not None and number < step:
                remove_folder(path)
    except OSError as error:
        raise cannot_write(folder, error) from error


def step_of(path: Path) -> int | None:
    """The step of a checkpoint; None for other paths."""
    name = NAME.fullmatch(path.name)
    return int(name[1]) if name is not None and path.is_dir() and not path.is_symlink() else None


def last_checkpoint(root: Path) -> Path | None:
    """The newest finished checkpoint of a run's folder."""
    folder = root / CHECKPOINTS
    checkpoints = {step: path for path in folder.glob("step-*") if (step := step_of(path)) is not None}
    return checkpoints[max(checkpoints)] if checkpoints else None


def load_progress(checkpoint: Path) -> TrainingState:
    """The training state of a checkpoint, whose files are all verified.

    Raises:
        RunFolderError: if the checkpoint is damaged.
    """
    advice = _advice(checkpoint)
    try:
        checksums = Checksums.read(checkpoint, declared_by=PROGRESS)
        progress = checksums.read_record(
            SavedState, checkpoint / PROGRESS, "the progress of a run", advice
        ).progress
        checksums.check_all(advice=advice)
    except RunFolderError as error:
        raise RunFolderError(f"the checkpoint {checkpoint} cannot be read: {error}") from error
    if progress.step != step_of(checkpoint):
        raise RunFolderError(f"{checkpoint} is the checkpoint of step {progress.step}; {advice}")
    return progress


def _advice(checkpoint: Path) -> str:
    """The advice for a damaged checkpoint: resume from an earlier one, if there is one."""
    other_checkpoints = [
        path for path in checkpoint.parent.glob("step-*") if path != checkpoint and step_of(path) is not None
    ]
    if other_checkpoints:
        newest = max(other_checkpoints, key=lambda path: step_of(path) or 0)
        return f"delete {checkpoint}, and --resume goes on from {newest.name}"
    return "no other checkpoint is kept: begin the run again in another --out, or copy the checkpoint from a backup"


def restore(setting: TrainingSetup, checkpoint: Path) -> str | None:
    """Restore weights, optimiser and random generators; returns a note, or None.

    Raises:
        RunFolderError: if the checkpoint is damaged, or of another model.
    """
    safetensors = import_extra("safetensors", "models")
    damage = safetensors.SafetensorError
    reshard(setting.actor_critic.policy)
    try:
        with safetensors.safe_open(checkpoint / STATE, framework="pt") as stored:
            _restore_tensors(setting, stored)
    except (OSError, KeyError, ValueError, RuntimeError, damage) as error:
        raise RunFolderError(
            f"the checkpoint {checkpoint} cannot be read: {summarise_error(error)}; {_advice(checkpoint)}"
        ) from error
    advice = _advice(checkpoint)
    checksums = Checksums.read(checkpoint, declared_by=PROGRESS)
    generators = checksums.read_record(
        SavedState, checkpoint / PROGRESS, "the progress of a run", advice
    ).generators
    if len(generators) != setting.group.world_size:
        return (
            f"the checkpoint is of {len(generators)} processes, and now there are "
            f"{setting.group.world_size}: the state of "
            "Python's, numpy's and torch's random generators starts anew"
        )
    try:
        _set_generators(generators[setting.group.rank])
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RunFolderError(
            f"{checkpoint / PROGRESS} holds no state of random generators: {summarise_error(error)}; {advice}"
        ) from error
    return None


def _restore_tensors(setting: TrainingSetup, stored: Any) -> None:
    """Restore weights and optimiser state from an open file, of which one tensor at a time is in memory."""
    policy: Policy = setting.actor_critic.policy
    trained = {name: x for name, x in policy.named_parameters() if x.requires_grad}
    optimizer, keys = _unwrap(setting.optimizer), list(stored.keys())
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(_shard_like(stored.get_tensor(f"weight/{name}"), parameter))
    for name, parameter in trained.items():
        start = f"optimizer/{name}/"
        state = {key.removeprefix(start): stored.get_tensor(key) for key in keys if key.startswith(start)}
        if state:
            optimizer.state[parameter] = {
                key: x if x.shape != parameter.shape else _shard_like(x, parameter)
                for key, x in state.items()
            }


def _tensors(setting: TrainingSetup) -> dict[str, Tensor]:
    """Trained weights and optimiser state on the CPU of the first process, and nothing on others.

    A collective if weights are sharded: they are gathered one tensor at a time, and other processes keep none.
    """
    policy: Policy = setting.actor_critic.policy
    optimizer = _unwrap(setting.optimizer)
    tensors: dict[str, Tensor] = {}
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            state = optimizer.state.get(parameter, {})
            stored = {f"weight/{name}": parameter} | {
                f"optimizer/{name}/{key}": x for key, x in state.items()
            }
            for key, x in stored.items():
                whole = _gather(x)
                if setting.group.is_first:
                    tensors[key] = whole
    return tensors


def _write(
    setting: TrainingSetup, folder: Path, tensors: dict[str, Tensor], notes: Mapping[str, Any]
) -> None:
    save_file = import_extra("safetensors.torch", "models").save_file
    save_file(tensors, folder / STATE)
    (folder / PROGRESS).write_text(to_json(notes), encoding="utf-8")
    start = "weight/network."
    weights = {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}
    save_policy(setting, folder / POLICY, weights)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
        sync_folder(path)


def save_policy(setting: TrainingSetup, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the model (or the adapter) with its tokenizer, for ``kleash measure --policy`` and transformers."""
    policy = setting.actor_critic.policy
    (adapters,) = policy.adapters
    with suppress_library_output():
        if adapters is not None:
            state = {f"base_model.model.{name}": x for name, x in weights.items()}
            adapters.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
        else:
            names = {id(x): name for name, x in policy.network.named_parameters()}  # tied parameters once
            parameters = policy.network.state_dict(keep_vars=True)
            state = {name: weights.get(names.get(id(x), name), x.detach()) for name, x in parameters.items()}
            policy.network.save_pretrained(folder, state_dict=state)
            copy_other_parts(policy.network, folder)
        setting.actor_critic.pair.tokenizer.save_pretrained(folder)


def _gather(x: Tensor) -> Tensor:
    """A tensor gathered from its shards, if it has any, on the CPU."""
    gather = getattr(x, "full_tensor", None)
    return (x if gather is None else gather()).detach().cpu().contiguous()


def _shard_like(x: Tensor, like: Tensor) -> Tensor:
    """``x`` with the device, dtype and sharding of ``like``."""
    mesh: Any = getattr(like, "device_mesh", None)
    if mesh is None:
        return x.to(like.device, like.dtype)
    from torch.distributed.tensor import distribute_tensor

    placements: Any = like.placements  # pyright: ignore[reportAttributeAccessIssue]
    return distribute_tensor(x.to(like.device, like.dtype), mesh, placements)


def _unwrap(optimizer: Any) -> Any:
    """The torch optimiser inside Accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


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
