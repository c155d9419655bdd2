"""The ranks that a launcher started: how they reach each other, and which start of the processes they belong to.

torchrun starts all processes again after a failure (``--max-restarts``), or if a machine joins. Those find the store of
the start before, with all that it left there.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from itertools import count
from secrets import token_hex
from threading import Thread
from typing import Any

from kleash.errors import RankError
from kleash.launch_environment import launched_max_restarts, launched_rank, launched_world_size
from kleash.measuring.rank_group import POLL_S, SILENCE_S, KeyValueStore, RankGroup

_calls = count()


def launched_ranks() -> RankGroup:
    """The ranks that torchrun, ``accelerate launch`` or srun started; this process alone if there are no others.

    Raises:
        RankError: if the store that the launcher names cannot be reached, or another rank does not join.
    """
    rank, world_size = launched_rank(), launched_world_size()
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if world_size == 1 and not (agent_has_store and launched_max_restarts()):
        return RankGroup()
    if not 0 <= rank < world_size:
        raise RankError(
            f"RANK is {rank} and WORLD_SIZE is {world_size}, whose ranks are 0 to {world_size - 1}; start all of them "
            "by torchrun, or unset RANK and WORLD_SIZE"
        )
    address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    store, start = _joined(address, rank, world_size)
    import torch.distributed as dist

    return RankGroup(
        rank,
        world_size,
        dist.PrefixStore(f"kleash/{start}/{next(_calls)}", store),  # pyright: ignore[reportPrivateImportUsage]
        hosts_store=rank == 0 and not agent_has_store,
        start=start,
        launcher_store=dist.PrefixStore("kleash", store),  # pyright: ignore[reportPrivateImportUsage]
    )


@cache
def _joined(address: str, rank: int, world_size: int) -> tuple[Any, str]:
    """The store of the launcher, and the name of this start of the processes.

    Raises:
        RankError: if the store cannot be reached, or another rank does not join.
    """
    import torch.distributed as dist

    def connect() -> Any:
        rendezvous = dist.rendezvous("env://", timeout=timedelta(seconds=SILENCE_S))  # pyright: ignore[reportPrivateImportUsage]
        return next(iter(rendezvous))[0]

    try:
        store = _interruptible(connect)
        return store, agreed_start(dist.PrefixStore("kleash", store), rank, world_size)  # pyright: ignore[reportPrivateImportUsage]
    except RankError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise RankError(
            f"WORLD_SIZE is {world_size}, and the other ranks cannot be reached at {address} ({reason}); start all of "
            "them by torchrun, or unset RANK and WORLD_SIZE"
        ) from error


def agreed_start(store: KeyValueStore, rank: int, world_size: int) -> str:
    """A name of this start of the processes, the same on all ranks and no other start's. All call it.

    Each rank posts a random name, and the first answers it; those of an earlier start get an answer that is not read.

    Raises:
        RankError: if another rank does not join.
    """
    random_name = token_hex(8)
    if rank != 0:
        store.set(f"arrival/{rank}", random_name)
        _wait_for(lambda: set[int]() if store.check([f"start/{random_name}"]) else {0}, world_size)
        start = store.get(f"start/{random_name}").decode()
        store.set(f"joined/{start}/{rank}", "")
        return start
    missing = set(range(1, world_size))

    def answer() -> set[int]:
        for other in [other for other in missing if store.check([f"arrival/{other}"])]:
            store.set(f"start/{store.get(f'arrival/{other}').decode()}", random_name)
            if store.check([f"joined/{random_name}/{other}"]):
                missing.discard(other)
        return missing

    _wait_for(answer, world_size)
    return random_name


def _wait_for(missing_ranks: Callable[[], set[int]], world_size: int) -> None:
    """Wait until no rank is missing.

    Raises:
        RankError: naming one that is.
    """
    deadline = time.monotonic() + SILENCE_S
    while missing := missing_ranks():
        if time.monotonic() > deadline:
            raise RankError(
                f"rank {min(missing)} of {world_size} has not joined within {SILENCE_S:.0f} s; start all ranks, or "
                "unset RANK and WORLD_SIZE to run one process alone"
            )
        time.sleep(POLL_S)


def _interruptible(call: Callable[[], Any]) -> Any:
    """The result of a call that ignores signals until it returns, awaited so that Ctrl-C ends the waiting."""
    results: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
    if errors:
        raise errors[0]
    return results[0]
