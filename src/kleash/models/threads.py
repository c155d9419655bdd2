"""How many threads a CPU gives to small models: one, since two spend more time on meeting than on work."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from kleash.models.checkpoints.resolution import find_checkpoint
from kleash.models.pair import Pair
from kleash.models.pair_loading import resolve_device

SMALL_BYTES = 100_000_000
"""Weights of a model, as they lie on disk, below which its matrices are too small to be shared out to threads."""
TINY_BYTES = 16_000_000
"""Weights of a model in memory, up to which scoring takes one thread. Lower than ``SMALL_BYTES``: scoring reads
thousands of tokens at once, which threads share out well on an idle machine unless the matrices are tiny."""
CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that say how many threads torch takes; where one is set, it stays."""


@contextmanager
def threads_for(names: Sequence[str], *, device: str = "auto") -> Iterator[str | None]:
    """Inside, torch takes one thread if all these models are small and run on a CPU; afterwards as many as before.

    With two threads, every operation of a small model waits for the slower one; beside another busy process,
    which takes a core away from one of them, that is four times the work. Left as it is where the environment
    says a number, or where ``torch.set_num_threads`` was called with another number than torch's own.

    Args:
        names: paths or hub ids of the models.
        device: of the job.

    Yields:
        A sentence for the user, where the number was changed; None otherwise.

    Raises:
        ModelError: if there is no such model.
        CannotRunError: if the device is not there.
    """
    ours = _is_ours_to_choose(torch.get_num_threads())
    with _one_thread_if(ours and resolve_device(device, None).type == "cpu" and _are_small(names)) as note:
        yield note


@contextmanager
def threads_for_scoring(pair: Pair) -> Iterator[str | None]:
    """As ``threads_for``, for scoring and generating with two models that are loaded: one thread if both are tiny.

    The shipped pair took 5 times the processor time and 4.5 times the wall time with two threads beside other busy
    processes. The numbers are the same up to rounding.

    Args:
        pair: the two models.

    Yields:
        A sentence for the user, where the number was changed; None otherwise.
    """
    models = (pair.policy, pair.reference)
    on_cpu = all(model.device.type == "cpu" and model.device_map is None for model in models)
    tiny = all(model.parameters * model.dtype.itemsize <= TINY_BYTES for model in models)
    with _one_thread_if(on_cpu and tiny and _is_ours_to_choose(torch.get_num_threads())) as note:
        yield note


@contextmanager
def _one_thread_if(applies: bool) -> Iterator[str | None]:
    """Inside, one thread, with a sentence for the user; nothing where it does not apply."""
    if not applies:
        yield None
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield f"one CPU thread: the models are small (set {CHOSEN_BY_USER[0]} to choose another number)"
    finally:
        torch.set_num_threads(before)


def _is_ours_to_choose(threads: int) -> bool:
    """Whether nobody has chosen a number of threads: torch takes one for each core, or each two of them."""
    if threads == 1 or any(os.environ.get(name) for name in CHOSEN_BY_USER):
        return False
    cores = _cores()
    return threads in (cores, cores // 2, os.cpu_count(), (os.cpu_count() or 0) // 2)


def _cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _are_small(names: Sequence[str]) -> bool:
    """Whether the weights of each of these models, its adapter included, are few."""
    for name in dict.fromkeys(names):
        found = find_checkpoint(name)
        folders = [folder for folder in (found.folder, found.adapter) if folder is not None]
        if sum(_weights(folder) for folder in folders) > SMALL_BYTES:
            return False
    return True


def _weights(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
