"""Runs the ranks of a measurement as threads of one process."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any
from unittest.mock import patch

from kleash.measuring import RankGroup, run
from kleash.measuring.rank_group import LocalStore
from kleash.models import Pair


def in_threads(world_size: int, work: Callable[[RankGroup], Any], *, nodes: int = 1) -> list[Future[Any]]:
    """Call ``work`` with each rank in a thread of its own, on so many machines, and wait for all.

    Models are loaded one at a time: transformers patches torch meanwhile, which two threads must not do at once.
    """
    store, lock, load = LocalStore(), Lock(), run.load_models

    def locked_load(*arguments: Any) -> Pair:
        with lock:
            return load(*arguments)

    with patch.object(run, "load_models", locked_load), ThreadPoolExecutor(world_size) as threads:
        return [
            threads.submit(work, RankGroup(rank, world_size, store, node=f"node-{rank % nodes}"))
            for rank in range(world_size)
        ]
