"""The engine of one machine: both models in this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kleash.engines.base import EngineTraits, JobEngine, Shard, ShardResult, shard_result
from kleash.linear import LinearOptions
from kleash.models import Prompt, ReferenceCache, TokenSequence, generate, score
from kleash.models.generation import ignore

CPU_BUFFER_BYTES = 96 * 2**20
"""Memory for the logits of a chunk of tokens on a CPU: a run then needs at most 256 MB besides models and a batch."""


@dataclass(frozen=True, kw_only=True)
class LocalEngine(JobEngine):
    """Runs shards one after the other, on the devices of the pair."""

    cache: ReferenceCache | None = None
    on_tokens: Callable[[int, float], None] = ignore
    """Called while responses are generated, as by ``generate``."""
    top: int = 5
    """Number of likeliest tokens of each model in a shard's result."""

    @property
    def traits(self) -> EngineTraits:
        """The job's temperature, or 1 for greedy responses; a stored reference may lack it."""
        temperature = self.job.temperature if self.job.temperature > 0 else 1.0
        return EngineTraits(
            temperature=temperature,
            no_noise_floor=(
                f"the reference was not loaded, and its cache holds no noise floor for temperature {temperature:g}; "
                f"kleash cache with --temperature {temperature:g} adds it"
            ),
        )

    def run(self, shard: Shard) -> ShardResult:
        """Generate responses to the prompts of ``shard``, if it has any, and score its sequences.

        Raises:
            NonFiniteError: if an output of a model is NaN or infinite, naming the model and the prompt.
            ChangedInputError: if a file of the models has changed.
        """
        sequences = shard.sequences or tuple(self._answer(shard.prompts))
        draws_from_part = self.job.source[0] == "prompts" and (
            self.job.truncates or self.job.temperature == 0
        )
        tokens: dict[str, Any] = score(
            self.pair,
            sequences,
            temperature=self.traits.temperature,
            batch_tokens=self.job.batch_tokens,
            # on a GPU the linear functions choose from the free memory
            options=LinearOptions(
                buffer_bytes=CPU_BUFFER_BYTES if self.pair.policy.device.type == "cpu" else None
            ),
            cache=self.cache,
            top=self.top,
            sampler=self.job if draws_from_part else None,
            on_scored=self.on_scored,
        )
        self.files.require_unchanged()
        names = [name for name in tokens if name.startswith("top_")]
        likeliest = {name.removeprefix("top_"): tokens.pop(name) for name in names}
        return shard_result(self.pair, sequences, tokens, likeliest)

    def _answer(self, prompts: Sequence[Prompt]) -> list[TokenSequence]:
        # The reference scores what the policy generates, so the shorter context of the two applies.
        policy = replace(self.pair.policy, context_length=self.pair.context_length)
        return generate(
            policy,
            prompts,
            self.job,
            batch_tokens=self.job.batch_tokens,
            on_tokens=self.on_tokens,
        )
