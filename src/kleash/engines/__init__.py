"""Where a pair of models runs a shard of work."""

from kleash.engines.local import LocalEngine, Shard, ShardResult

__all__ = ["LocalEngine", "Shard", "ShardResult"]
