"""Ranks that are forks of one process, which imports torch and the rest once for all of them."""

import faulthandler
import gc
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path


def fork_ranks(count: int, leftovers: Sequence[str | Path]) -> int:
    """The rank of this process, which is one of ``count`` forks of its caller; made before torch has threads.

    The caller itself waits for all forks and ends, with 1 if one failed. If native code ends one, all are started
    again, twice at most: in 2 of 60 runs on a busy machine, a thread of gloo in torch 2.13 found its heap damaged
    while it gathered tensors of FSDP2 (``AsyncAllgatherCoalescedWork``, issue 65231 of PyTorch), and says where.

    Args:
        count: number of ranks.
        leftovers: files and folders that the ranks write and that a second start must not find, such as the store.
    """
    faulthandler.enable()
    gc.freeze()  # what was imported is neither looked through nor copied in the ranks
    codes: list[int] = []
    for _ in range(3):
        forks: list[int] = []
        for rank in range(count):
            fork = os.fork()
            if fork == 0:
                return rank
            forks.append(fork)
        codes = [os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks]
        if not {-signal.SIGSEGV, -signal.SIGABRT} & set(codes):
            break
        print(f"exit codes of the ranks: {codes}", file=sys.stderr, flush=True)
        for path in map(Path, leftovers):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
    os._exit(int(any(codes)))
