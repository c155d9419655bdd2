"""The number of CPU threads for small models: one, since synchronising two takes longer than the work."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kleash.checkpoints.resolution import find_checkpoint
from kleash.models.pair import Model, Pair
from kleash.models.pair_loading import resolve_device

SMALL_BYTES = 100_000_000
"""Largest size on disk of the weights of a small model, whose matrices are too small to split among threads."""
TINY_BYTES = 16_000_000
"""Largest size in memory of a model that is scored with one thread. Lower than ``SMALL_BYTES``: scoring reads
thousands of tokens at once, a load that threads split well on an idle machine unless the matrices are tiny."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that set torch's number of threads; if one is set, the number is not changed."""
ONE_THREAD = f"one CPU thread: the models are small (set {THREAD_VARIABLES[0]} to choose another number)"


@contextmanager
def threads_for(names: Sequence[str], *, device: str = "auto") -> Iterator[str | None]:
    """Context with one torch thread if all these models are small and run on a CPU; restores the number on exit.

    With two threads, every operation of a small model waits for the slower thread; with another busy process on the
    same cores, that takes four times the processor time. The number is not changed if the environment sets it, or if
    ``torch.set_num_threads`` was called with another number than torch's default.

    Args:
        names: paths or hub ids of the models.
        device: of the job.

    Yields:
        A note for the user if the number was changed; None otherwise.

    Raises:
        ModelError: if there is no such model.
        CannotRunError: if the device is not available.
    """
    is_default = _is_default_number(torch.get_num_threads())
    is_small = is_default and resolve_device(device, None).type == "cpu" and _are_small(names)
    with _threads(1 if is_small else None, ONE_THREAD) as note:
        yield note


@contextmanager
def threads_for_scoring(pair: Pair, processes: int = 1) -> Iterator[str | None]:
    """``threads_for`` for scoring and generating with a loaded pair: one thread if both models are tiny.

    Several processes on one machine share its cores: each takes an equal part of them.

    With two threads beside other busy processes, the shipped pair took 5 times the processor time and 4.5 times the
    wall time. The results are the same up to rounding.

    Args:
        pair: the two models.
        processes: how many processes score on this machine.

    Yields:
        A note for the user if the number was changed, or if the launcher left cores unused; None otherwise.
    """
    models = (pair.policy, pair.reference)
    are_on_cpu = all(model.device.type == "cpu" and model.device_map is None for model in models)
    are_tiny = all(map(_is_tiny, models))
    is_default = _is_default_number(torch.get_num_threads())
    if processes == 1 or (are_tiny and is_default):
        with _threads(1 if are_on_cpu and are_tiny and is_default else None, ONE_THREAD) as note:
            yield note
        return
    share = max(1, _cores() // processes)
    if is_default and are_on_cpu:
        words = f"{share} CPU threads for each of {processes} processes on this machine"
        with _threads(share, words) as note:
            yield note
        return
    # torchrun sets one thread for each process unless the variable is set.
    has_unused_cores = are_on_cpu and not are_tiny and share > 1 and torch.get_num_threads() == 1
    advice = f"one CPU thread for each of {processes} processes; set {THREAD_VARIABLES[0]}={share} to use all cores"
    yield advice if has_unused_cores else None


def _is_tiny(model: Model) -> bool:
    """Whether one thread scores a model fastest; of a model behind a server nothing is computed here."""
    return model.parameters is None or model.parameters * model.dtype.itemsize <= TINY_BYTES


@contextmanager
def _threads(number: int | None, note: str) -> Iterator[str | None]:
    """Context with a number of torch threads and a note for the user; changes nothing for None."""
    if number is None:
        yield None
        return
    threads_before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield note
    finally:
        torch.set_num_threads(threads_before)


def _is_default_number(threads: int) -> bool:
    """Whether a number of threads is torch's default: one for each core, or for every two cores."""
    if threads == 1 or any(os.environ.get(name) for name in THREAD_VARIABLES):
        return False
    cores = _cores()
    return threads in (cores, cores // 2, os.cpu_count(), (os.cpu_count() or 0) // 2)


def _cores() -> int:
    """Number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _are_small(names: Sequence[str]) -> bool:
    """Whether the weights of each model, with its adapter, are at most ``SMALL_BYTES``."""
    for name in dict.fromkeys(names):
        checkpoint = find_checkpoint(name)
        if sum(path.stat().st_size for path in checkpoint.weight_files()) > SMALL_BYTES:
            return False
    return True
