"""Where a pair of models runs a shard of work."""

from kleash.engines.base import Engine, Shard, ShardResult
from kleash.engines.local import LocalEngine

__all__ = ["Engine", "LocalEngine", "Shard", "ShardResult"]
