"""Ranks that are forks of one process, which imports torch and the rest once for all of them."""

import faulthandler
import os
import sys


def fork_ranks(count: int) -> int:
    """The rank of this process, which is one of ``count`` forks of its caller; made before torch has threads.

    The caller itself waits for all forks and ends, with 1 if one failed. What a fork did when a signal killed it is
    printed.
    """
    faulthandler.enable()
    forks: list[int] = []
    for rank in range(count):
        fork = os.fork()
        if fork == 0:
            return rank
        forks.append(fork)
    codes = [os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks]
    if any(codes):
        print(f"exit codes of the ranks: {codes}", file=sys.stderr)
    raise SystemExit(1 if any(codes) else 0)
