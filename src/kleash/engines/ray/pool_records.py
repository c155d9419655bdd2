"""What the pool of a run knows: the workers that were asked for, each of them, and the shards that they have."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kleash.engines.base import Shard
from kleash.engines.ray.cluster import WorkerResources
from kleash.engines.ray.shard_worker import ScoredPart, WorkerCode
from kleash.engines.ray.worker_loss import WorkerLoss


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """The workers that a run asks for."""

    count: int
    room: int
    """Those that the cluster's nodes have room for now: they are started before the shards are known."""
    resources: WorkerResources
    code: WorkerCode
    batch_tokens: int
    versions: Mapping[str, str]
    """The driver's versions, which the workers' must equal."""
    packages: tuple[str, ...]
    """The packages among them."""
    expected: Mapping[str, Any]
    """The driver's entries of a worker's description."""


class ScoredShard(NamedTuple):
    """The result of a shard, with what it cost."""

    shard: Shard
    part: ScoredPart
    worker: "PoolWorker"


@dataclass(eq=False, kw_only=True)
class Task:
    """A shard whose result is awaited."""

    shard: Shard
    batch_tokens: int
    losses: list[WorkerLoss] = field(default_factory=list)
    """The workers that were lost while they scored it."""
    start_time: float = 0.0
    """When it was handed out last."""
    copies: int = 0
    """Workers that have it."""
    is_done: bool = False


@dataclass(eq=False, kw_only=True)
class PoolWorker:
    """A worker, and what it has done."""

    number: int
    actor: Any
    node: str = ""
    """The name of its machine; empty until the cluster has started it."""
    process: int = 0
    is_ready: bool = False
    queue: deque[Task] = field(default_factory=deque)
    shards: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Time spent on scoring."""

    @property
    def name(self) -> str:
        """The worker in words."""
        return f"worker {self.number}" + (f" on {self.node}" if self.node else "")


class Call(NamedTuple):
    """A call of a worker's method whose result is awaited."""

    method: str
    worker: PoolWorker
    task: Task | None = None
