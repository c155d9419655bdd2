"""The interface of an engine: what runs a shard of a measurement and returns its tables."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from kleash.jobs import MeasureJob
from kleash.models import Pair, Prompt, TokenSequence
from kleash.models.generation import ignore
from kleash.models.scoring import ROUNDING, RoundingKind
from kleash.models.tokenizers import token_texts
from kleash.store.file_hashes import WatchedFiles, watched_files
from kleash.store.tables import TOKEN_COLUMNS


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A part of a run whose result is written whole or not at all."""

    index: int
    prompts: tuple[Prompt, ...] = ()
    """Prompts to which the policy generates responses, which are then scored."""
    sequences: tuple[TokenSequence, ...] = ()
    """Sequences that are scored without generation."""


@dataclass(frozen=True, kw_only=True)
class ShardResult:
    """The columns of ``tokens/`` and ``sequences/`` of a shard, in the order of its sequences."""

    tokens: dict[str, Any]
    sequences: dict[str, Any]
    likeliest: dict[str, np.ndarray]
    """Ids and probabilities of the likeliest tokens of both models, with a row for each token; empty where the exact KL
    is unknown, so that no sequence is known to have drifted most."""


class EngineTraits(NamedTuple):
    """What holds for all shards of an engine."""

    temperature: float = 1.0
    """The temperature at which both models are scored."""
    unknown_columns: Mapping[str, str] = MappingProxyType({})
    """The columns of ``tokens/`` that the engine leaves null, each with the reason."""
    no_noise_floor: str = ""
    """The reason why there is no noise floor, and what to do, in words."""


class Engine(ABC):
    """Scores the shards of a measurement, wherever the models are."""

    pair: Pair
    """Policy and reference, with the tokenizer by which sources are read."""

    @property
    @abstractmethod
    def traits(self) -> EngineTraits:
        """What holds for all shards."""

    @abstractmethod
    def run(self, shard: Shard) -> ShardResult:
        """Generate responses to the prompts of ``shard``, if it has any, and score its sequences."""

    def results(self, shards: Iterator[Shard]) -> Iterator[tuple[Shard, ShardResult]]:
        """Iterate over shards with their results, in the order in which they are scored."""
        return ((shard, self.run(shard)) for shard in shards)

    @abstractmethod
    def rounding_columns(
        self, kind: RoundingKind, sequences: Sequence[TokenSequence]
    ) -> Mapping[str, np.ndarray] | None:
        """Token columns of the reference compared with itself; None if they cannot be had, or it runs in float32.

        Args:
            kind: "noise" for another batch layout, "gap" for float32.
            sequences: that are scored again.
        """


@dataclass(frozen=True, kw_only=True)
class JobEngine(Engine):
    """An engine that scores the shards of a job by a model of this process, or by both."""

    pair: Pair  # pyrefly: ignore[bad-override]
    job: MeasureJob
    on_scored: Callable[[int, int], None] = ignore
    """Called after each batch of a shard, or after the shard, with the number of its sequences and of their tokens."""
    files: WatchedFiles = field(default_factory=watched_files)
    """Those of the models."""

    def rounding_columns(
        self, kind: RoundingKind, sequences: Sequence[TokenSequence]
    ) -> Mapping[str, np.ndarray] | None:
        """Token columns of the reference compared with itself, in another batch layout ("noise") or in float32 ("gap").

        Those of a stored reference were computed when it was stored. None if that was at another temperature, or if the
        reference's network is not here. Also None for the gap of a reference that cannot be loaded again: one that was
        given in memory, or that FSDP stores on several ranks, which would all have to load it.
        """
        reference, temperature = self.pair.reference, self.traits.temperature
        if reference.stored is not None:
            return reference.stored.rounding_columns(kind, temperature)
        is_reloadable = reference.storage is None and not reference.is_in_memory
        if reference.network is None or (kind == "gap" and not is_reloadable):
            return None
        columns = ROUNDING[kind](
            reference, sequences, temperature=temperature, batch_tokens=self.job.batch_tokens
        )
        self.files.require_unchanged()
        return columns


def shard_result(
    pair: Pair,
    sequences: Sequence[TokenSequence],
    tokens: dict[str, Any],
    likeliest: dict[str, np.ndarray] | None = None,
) -> ShardResult:
    """The result of a shard: its columns of ``tokens/``, with the texts of the tokens, and those of ``sequences/``."""
    tokens["text"] = token_texts(pair.tokenizer, tokens["token_id"].tolist())
    columns = {
        "prompt_id": [sequence.prompt_id for sequence in sequences],
        "sample_id": [sequence.sample_id for sequence in sequences],
        "prompt_hash": [sequence.prompt_hash for sequence in sequences],
        "prompt": [sequence.prompt_text for sequence in sequences],
        "response": [sequence.response_text for sequence in sequences],
        "finish_reason": [sequence.finish_reason for sequence in sequences],
        "tokens": [len(sequence.response_ids) for sequence in sequences],
    }
    return ShardResult(tokens=tokens, sequences=columns, likeliest=likeliest or {})


def with_unknown(columns: Mapping[str, np.ndarray], further: Mapping[str, str]) -> dict[str, Any]:
    """The columns of ``tokens/`` of a shard but the text, in which what is not known is NaN, or null of whole numbers.

    Args:
        columns: those that are known; an unknown token or rank in them is -1.
        further: columns beside ``TOKEN_COLUMNS`` and their types.
    """
    unknown = {
        name: np.full(len(columns["token_id"]), np.nan if kind == "float32" else -1, dtype=np.dtype(kind))
        for name, kind in {**TOKEN_COLUMNS, **further}.items()
        if name not in columns and kind != "string"
    }
    known: dict[str, Any] = {**columns, **unknown}
    for name in ("top1_policy", "top1_reference", "rank_reference"):
        known[name] = np.ma.masked_less(known[name], 0)
    return known


def round_outwards(name: str, values: np.ndarray) -> np.ndarray:
    """The float64 values of a column of bounds in float32, lower ones rounded down, upper ones up; others unchanged."""
    limit = {"lower": -np.inf, "upper": np.inf}.get(name.rpartition("_")[2])
    if limit is None:
        return values
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    is_inside = rounded > values if limit < 0 else rounded < values
    return np.where(is_inside, np.nextafter(rounded, np.float32(limit)), rounded)
