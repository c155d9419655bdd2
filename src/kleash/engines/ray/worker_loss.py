"""Why a worker was lost, from Ray's errors, and when a shard has lost too many."""

import re
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

MAX_TRIES = 3
"""Workers that may end while they score one shard, before the run stops."""
MAX_NODE_LOSSES = 10
"""The same for nodes, which are lost for reasons of their own."""
MAX_REASON = 160
"""Characters of a reason."""


class WorkerLoss(NamedTuple):
    """The end of a worker."""

    reason: str
    is_of_node: bool = False
    """Whether its node was lost as well, or what it had returned was."""
    is_of_memory: bool = False
    """Whether Ray ended it because its node was short of memory."""


def describe_loss(ray: ModuleType, error: Exception) -> WorkerLoss:
    """The reason that an error of Ray names.

    Args:
        ray: the module.
        error: raised by ``ray.get`` of what a worker should have returned.
    """
    text, kinds = str(error), ray.exceptions
    if isinstance(error, kinds.OutOfMemoryError):
        return WorkerLoss("Ray ended it, since its node was short of memory", is_of_memory=True)
    if isinstance(error, kinds.ObjectLostError | kinds.NodeDiedError) or re.search(r"node (has )?died", text):
        return WorkerLoss("its node was lost", is_of_node=True)
    if getattr(error, "preempted", False) or "Worker exit type: NODE_DIED" in text:
        return WorkerLoss("its node was taken away", is_of_node=True)
    missing = re.search(r"ModuleNotFoundError: (No module named \S+)", text)
    if missing is not None:
        return WorkerLoss(f"{missing[1]} on its node")
    if "connection error code 2" in text:
        return WorkerLoss("its process was killed or crashed")
    if "ray.kill" in text:
        return WorkerLoss("it was ended by ray.kill")
    detail = re.search(r"Worker exit detail: ([^.]*\.)", text)
    return WorkerLoss((detail[1] if detail else " ".join(text.split()))[:MAX_REASON].rstrip("."))


def are_too_many(losses: Sequence[WorkerLoss]) -> bool:
    """Whether a shard has lost so many workers that the next one would be lost as well."""
    of_nodes = sum(loss.is_of_node for loss in losses)
    return len(losses) - of_nodes >= MAX_TRIES or of_nodes >= MAX_NODE_LOSSES


def needs_smaller_batches(losses: Sequence[WorkerLoss]) -> bool:
    """Whether the last loss says, or two unexplained ones suggest, that memory ran out.

    The kernel kills a process that takes the last memory without saying so.
    """
    return losses[-1].is_of_memory or sum(not loss.is_of_node for loss in losses) >= MAX_TRIES - 1
