"""The number of CPU threads for small models: one, since synchronising two takes longer than the work."""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from kleash.checkpoints.resolution import find_checkpoint
from kleash.models.pair import Pair
from kleash.models.pair_loading import resolve_device

SMALL_BYTES = 100_000_000
"""Largest size on disk of the weights of a small model, whose matrices are too small to split among threads."""
TINY_BYTES = 16_000_000
"""Largest size in memory of a model that is scored with one thread. Lower than ``SMALL_BYTES``: scoring reads
thousands of tokens at once, a load that threads split well on an idle machine unless the matrices are tiny."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that set torch's number of threads; if one is set, the number is not changed."""


def threads_for(names: Sequence[str], *, device: str = "auto") -> AbstractContextManager[tuple[str, ...]]:
    """Context with one torch thread if all these models are small and run on a CPU; restores the number on exit.

    With two threads, every operation of a small model waits for the slower thread; with another busy process on the
    same cores, that takes four times the processor time.

    Args:
        names: paths or hub ids of the models.
        device: of the job.

    Returns:
        The context, which gives a note for the user if it changes the number; none otherwise.

    Raises:
        ModelError: if there is no such model.
        CannotRunError: if the device is not available.
    """
    sizes = (sum(tensor.num_bytes for tensor in find_checkpoint(name).all_tensors) for name in names)
    is_small = resolve_device(device, None).type == "cpu" and all(size <= SMALL_BYTES for size in sizes)
    return _at_most_threads(1 if is_small else torch.get_num_threads())


def threads_for_scoring(pair: Pair, processes: int = 1) -> AbstractContextManager[tuple[str, ...]]:
    """Context with one torch thread if both models are tiny and on a CPU, and else an equal share of the threads.

    With two threads beside other busy processes, the shipped pair took 5 times the processor time and 4.5 times the
    wall time. The results are the same up to rounding.

    Args:
        pair: the two models.
        processes: how many processes score on this machine.

    Returns:
        The context, which gives a note for the user if it changes the number; none otherwise.
    """
    models = (pair.policy, pair.reference)
    threads = torch.get_num_threads()
    if all(model.device.type == "cpu" and model.device_map is None for model in models):
        # of a model behind a server, whose parameters are unknown, nothing is computed here
        sizes = ((model.parameters or 0) * model.dtype.itemsize for model in models)
        threads = 1 if all(size <= TINY_BYTES for size in sizes) else max(1, threads // processes)
    return _at_most_threads(threads)


@contextmanager
def _at_most_threads(number: int) -> Iterator[tuple[str, ...]]:
    """Context with at most ``number`` torch threads, unless the environment sets them, and a note for the user."""
    before = torch.get_num_threads()
    if number >= before or any(os.environ.get(name) for name in THREAD_VARIABLES):
        yield ()
        return
    torch.set_num_threads(number)
    try:
        yield (
            (
                f"{number} CPU thread{'s' if number > 1 else ''}, which suits small models and several processes (set "
                f"{THREAD_VARIABLES[0]} to choose another number)"
            ),
        )
    finally:
        torch.set_num_threads(before)
