"""Shards scored by the workers of a Ray cluster."""

from kleash.engines.ray.cluster import connected_cluster, requested_workers
from kleash.engines.ray.pool import WorkerPool
from kleash.engines.ray.pool_records import PoolWorker, ScoredShard, WorkerSpec
from kleash.engines.ray.ray_engine import RayEngine
from kleash.engines.ray.shard_worker import WorkerCode, installed_versions

__all__ = [
    "PoolWorker",
    "RayEngine",
    "ScoredShard",
    "WorkerCode",
    "WorkerPool",
    "WorkerSpec",
    "connected_cluster",
    "installed_versions",
    "requested_workers",
]
