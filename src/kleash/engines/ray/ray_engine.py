"""The engine of a Ray cluster: both models in each of its workers, and none in this process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kleash.engines.base import Shard, ShardResult
from kleash.engines.ray.pool import WorkerPool
from kleash.engines.ray.shard_worker import LoadedModels
from kleash.models import Pair, TokenSequence


@dataclass(frozen=True, kw_only=True)
class RayEngine:
    """Runs shards in the workers of a pool."""

    pool: WorkerPool
    loaded: LoadedModels
    """What the first worker says of its models."""
    tokenizer: Any
    """The policy's, loaded in this process."""

    @property
    def pair(self) -> Pair:
        """Policy and reference, described without their networks, with the tokenizer of this process."""
        pair = self.loaded.pair
        policy, reference = (
            replace(model, tokenizer=self.tokenizer) for model in (pair.policy, pair.reference)
        )
        return replace(pair, policy=policy, reference=reference, tokenizer=self.tokenizer)

    @property
    def temperature(self) -> float:
        """The temperature at which both models are scored."""
        return self.loaded.temperature

    @property
    def float32_gap_reloads(self) -> bool:
        """Whether ``float32_gap`` loads a model a second time, in a worker."""
        return self.loaded.float32_gap_reloads

    @property
    def unknown_columns(self) -> Mapping[str, str]:
        """As the workers' engines say."""
        return self.loaded.unknown_columns

    @property
    def no_noise_floor(self) -> str:
        """As the workers' engines say."""
        return self.loaded.no_noise_floor

    def run(self, shard: Shard) -> ShardResult:
        """Run one shard in any worker. A run uses ``pool.results``."""
        return self.pool.call("run", shard)

    def noise_floor_columns(self, sequences: Sequence[TokenSequence]) -> Mapping[str, np.ndarray] | None:
        """As ``LocalEngine.noise_floor_columns``, in any worker."""
        return self.pool.call("noise_floor_columns", list(sequences))

    def float32_gap(self, sequences: Sequence[TokenSequence]) -> Mapping[str, np.ndarray] | None:
        """As ``LocalEngine.float32_gap``, in any worker."""
        return self.pool.call("float32_gap", list(sequences))
