"""The engine of one machine: both models in this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kleash.jobs import MeasureJob
from kleash.linear import LinearOptions
from kleash.models import (
    Pair,
    Prompt,
    ReferenceCache,
    Sampling,
    TokenSequence,
    generate,
    score,
    score_against_float32,
    score_batched_against_single,
    token_texts,
)

CPU_BUFFER_BYTES = 96 * 2**20
"""For the logits of a chunk of tokens on a CPU: with what reading and writing files takes, a run stays within 256 MB
beside the models and a batch."""


def _ignore(*_: int) -> None:
    """What an engine calls where nobody wants to know."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A part of a run that is done, and kept, as a whole."""

    index: int
    prompts: tuple[Prompt, ...] = ()
    """To be answered by the policy first."""
    sequences: tuple[TokenSequence, ...] = ()
    """To be scored as they are."""


@dataclass(frozen=True, kw_only=True)
class ShardResult:
    """The columns of ``tokens/`` and of ``sequences/`` of one shard, in the order of its sequences."""

    tokens: dict[str, Any]
    sequences: dict[str, Any]
    likeliest: dict[str, np.ndarray]
    """Ids and probabilities of both models' likeliest tokens, with a row for each token."""


@dataclass(frozen=True, kw_only=True)
class LocalEngine:
    """Runs shards one after the other, on the devices on which the pair lies."""

    pair: Pair
    job: MeasureJob
    cache: ReferenceCache | None = None
    generated: Callable[[int], None] = _ignore
    """Called with the number of tokens drawn since the last call."""
    top: int = 5
    """Of how many of each model's likeliest tokens a shard's result tells."""

    @property
    def temperature(self) -> float:
        """At which both models are scored: greedy responses at 1."""
        return self.job.temperature if self.job.temperature > 0 else 1.0

    @property
    def runs_below_float32(self) -> bool:
        """Whether ``float32_gap`` loads the reference once more."""
        reference = self.pair.reference
        return reference.stored is None and reference.dtype not in (torch.float32, torch.float64)

    def run(self, shard: Shard) -> ShardResult:
        """Answer the prompts of ``shard``, if it has some, and score all of its sequences.

        Raises:
            NonFiniteError: if a model's numbers are NaN or infinite, naming it and the prompt.
        """
        sequences = shard.sequences or tuple(self._answer(shard.prompts))
        tokens: dict[str, Any] = score(
            self.pair,
            sequences,
            temperature=self.temperature,
            batch_tokens=self.job.batch_tokens,
            options=LinearOptions(buffer_bytes=self._buffer_bytes),
            cache=self.cache,
            top=self.top,
        )
        names = [name for name in tokens if name.startswith("top_")]
        likeliest = {name.removeprefix("top_"): tokens.pop(name) for name in names}
        tokens["text"] = token_texts(self.pair.tokenizer, tokens["token_id"].tolist())
        return ShardResult(tokens=tokens, sequences=_sequence_columns(sequences), likeliest=likeliest)

    def noise(self, sequences: Sequence[TokenSequence]) -> dict[str, np.ndarray] | None:
        """The token columns of the reference in batches against the reference with each sequence alone.

        Of a stored reference, those that were taken when it was stored; None if that was at another
        temperature.
        """
        stored = self.pair.reference.stored
        if stored is not None:
            return stored.rounding_columns("noise", self.temperature)
        return score_batched_against_single(
            self.pair.reference, sequences, temperature=self.temperature, batch_tokens=self.job.batch_tokens
        )

    def float32_gap(self, sequences: Sequence[TokenSequence]) -> dict[str, np.ndarray] | None:
        """The token columns of the reference as it runs against itself in float32; None if that is how it runs.

        Of a stored reference as ``noise``.
        """
        stored = self.pair.reference.stored
        if stored is not None:
            return stored.rounding_columns("gap", self.temperature)
        return score_against_float32(
            self.pair.reference, sequences, temperature=self.temperature, batch_tokens=self.job.batch_tokens
        )

    @property
    def _buffer_bytes(self) -> int | None:
        """Memory for the logits of a chunk; None, on a GPU, is chosen by the linear functions from what is free."""
        return CPU_BUFFER_BYTES if self.pair.policy.device.type == "cpu" else None

    def _answer(self, prompts: Sequence[Prompt]) -> list[TokenSequence]:
        job = self.job
        sampling = Sampling(
            samples_per_prompt=job.samples_per_prompt,
            max_new_tokens=job.max_new_tokens,
            temperature=job.temperature,
            top_p=job.top_p,
            top_k=job.top_k,
            min_p=job.min_p,
            seed=job.seed,
        )
        # What the policy writes the reference has to read: the shorter context of the two binds both.
        policy = replace(self.pair.policy, context_length=self.pair.context_length)
        return generate(policy, prompts, sampling, batch_tokens=job.batch_tokens, drawn=self.generated)


def _sequence_columns(sequences: Sequence[TokenSequence]) -> dict[str, Any]:
    return {
        "prompt_id": [sequence.prompt_id for sequence in sequences],
        "sample_id": [sequence.sample_id for sequence in sequences],
        "prompt_hash": [sequence.prompt_hash for sequence in sequences],
        "prompt": [sequence.prompt_text for sequence in sequences],
        "response": [sequence.response_text for sequence in sequences],
        "finish_reason": [sequence.finish_reason for sequence in sequences],
        "tokens": [len(sequence.response_ids) for sequence in sequences],
    }
