"""The place of this process among those that torchrun or ``accelerate launch`` started; no torch.

The launchers describe it by the environment variables of torch.distributed. srun sets none of them: each of its tasks
is a process that was started alone, unless the job's script sets them.
"""

import os

from kleash.errors import RankError


def launched_rank() -> int:
    """The rank of this process; 0 if it was started alone, also with a ``RANK`` left over from another program."""
    return _variable("RANK", 0) if launched_world_size() > 1 else 0


def launched_world_size() -> int:
    """The number of processes that were started; 1 if this one was started alone."""
    return max(1, _variable("WORLD_SIZE", 1))


def local_rank() -> int:
    """The place of this process among those that were started on this machine; 0 if it was started alone."""
    return _variable("LOCAL_RANK", launched_rank()) if launched_world_size() > 1 else 0


def local_world_size() -> int:
    """The number of processes that were started on this machine; all of them if the launcher does not say."""
    return max(1, _variable("LOCAL_WORLD_SIZE", launched_world_size())) if launched_world_size() > 1 else 1


def require_one_process(command: str) -> None:
    """Check that a command that several processes cannot share was started once.

    Raises:
        RankError: naming the command; the first process prints it.
    """
    if launched_world_size() > 1:
        raise RankError(
            f"{command} takes one process and was launched with {launched_world_size()}; start one, or unset RANK and "
            "WORLD_SIZE",
            is_reported=launched_rank() != 0,
        )


def _variable(name: str, default: int) -> int:
    """The number in an environment variable; ``default`` if it is not set, or holds something else."""
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default
