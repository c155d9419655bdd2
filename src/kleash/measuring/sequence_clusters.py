"""The sequences of a run: where each begins in the token table, its cluster, and the running KL."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kleash.uncertainty import Estimate, cluster_labels, ratio_of_sums

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


def sequence_starts(prompt: NDArray[Any], sample: NDArray[Any]) -> Ids:
    """The row of the token table at which each sequence begins.

    The table has a row for each scored position; the rows of a sequence are consecutive.

    Args:
        prompt: the column ``prompt_id``.
        sample: the column ``sample_id``.
    """
    if not len(prompt):
        return np.zeros(0, dtype=np.int64)
    changes = (prompt[1:] != prompt[:-1]) | (sample[1:] != sample[:-1])
    return np.concatenate([[0], np.flatnonzero(changes) + 1]).astype(np.int64)


def sequence_spans(prompt: NDArray[Any], sample: NDArray[Any]) -> list[tuple[int, int]]:
    """The first row of each sequence and the row after its last; arguments as for ``sequence_starts``."""
    starts = sequence_starts(prompt, sample).tolist()
    return list(zip(starts, [*starts[1:], len(prompt)], strict=True)) if starts else []


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """The cluster of each sequence; sequences of different clusters count as independent."""

    labels: Ids
    """One label from 0 per sequence of the run, in order."""
    warnings: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of clusters."""
        return int(self.labels.max()) + 1 if len(self.labels) else 0

    def sum(self, values: Floats) -> Floats:
        """The sums over the sequences of each cluster of numbers that there is one of per sequence."""
        return np.bincount(self.labels, weights=values).astype(np.float64)


def clusters_of(prompt: Ids, sample: Ids, *, on_text: bool) -> Clusters:
    """The clusters of sequences: prompts; on text documents, or blocks of windows where documents are few.

    Args:
        prompt: ``prompt_id`` of each sequence.
        sample: ``sample_id`` of each sequence.
        on_text: whether these are documents and windows.
    """
    if on_text:
        labels, warnings = cluster_labels(prompt, sample)
        return Clusters(labels=np.asarray(labels), warnings=warnings)
    return Clusters(labels=np.unique(prompt, return_inverse=True)[1].astype(np.int64), warnings=())


class SequenceSums(NamedTuple):
    """A token column summed over each sequence: one row per sequence."""

    prompt_id: Ids
    sample_id: Ids
    total: Floats
    """Of the column, over the tokens: KL(policy || reference) in nats unless another column was summed."""
    tokens: Floats
    """Number of tokens."""

    def to_lists(self) -> list[list[Any]]:
        """The columns as lists, which JSON can hold without rounding."""
        return [column.tolist() for column in self]

    @classmethod
    def from_lists(cls, columns: list[list[Any]]) -> "SequenceSums":
        """The sums that ``to_lists`` made lists of."""
        prompt_id, sample_id, total, tokens = columns
        return cls(
            prompt_id=np.asarray(prompt_id, dtype=np.int64),
            sample_id=np.asarray(sample_id, dtype=np.int64),
            total=np.asarray(total, dtype=np.float64),
            tokens=np.asarray(tokens, dtype=np.float64),
        )

    @classmethod
    def concatenate(cls, shards: Sequence["SequenceSums"]) -> "SequenceSums":
        """The rows of several shards, in their order; no rows if there is no shard."""
        if not shards:
            return cls.from_lists([[], [], [], []])
        return cls(*map(np.concatenate, zip(*shards, strict=True)))


def sum_sequences(tokens: Mapping[str, Any], column: str = "kl_policy_reference") -> SequenceSums:
    """The sums of a shard's sequences, from its token columns ``prompt_id``, ``sample_id`` and ``column``."""
    prompt, sample, values = (np.asarray(tokens[name]) for name in ("prompt_id", "sample_id", column))
    starts = sequence_starts(prompt, sample)
    return SequenceSums(
        prompt_id=prompt[starts].astype(np.int64),
        sample_id=sample[starts].astype(np.int64),
        total=np.add.reduceat(values.astype(np.float64), starts) if len(starts) else np.zeros(0),
        tokens=np.diff([*starts, len(values)]).astype(np.float64),
    )


@dataclass(kw_only=True)
class SequenceClusters:
    """KL and length of each sequence scored so far, for the running mean with its clustered error."""

    COLUMNS: ClassVar = ("prompt_id", "sample_id", "kl_policy_reference")
    """The columns of ``tokens/`` that ``add`` reads."""

    on_text: bool
    """Whether ``prompt_id`` is a document and ``sample_id`` a window of it."""
    is_one_model: bool = False
    """Whether policy and reference are the same model, so that the KL is known to be 0."""
    _shards: list[SequenceSums] = field(default_factory=list)

    def add(self, tokens: Mapping[str, Any]) -> None:
        """Add the sequences of a shard, from its token columns."""
        self.add_sums(sum_sequences(tokens))

    def add_sums(self, sums: SequenceSums) -> None:
        """Add the sequences of a shard, from their sums."""
        self._shards.append(sums)

    def clusters(self) -> Clusters:
        """The clusters of all sequences added."""
        sums = self._sums()
        return clusters_of(sums.prompt_id, sums.sample_id, on_text=self.on_text)

    def kl(self) -> Estimate:
        """KL(policy || reference) in nats per token over all sequences added."""
        sums, labels = self._sums(), self.clusters().labels
        return ratio_of_sums(
            np.bincount(labels, weights=sums.total),
            np.bincount(labels, weights=sums.tokens),
            unit="nats",
            lower=0.0,
            known_value=0.0 if self.is_one_model else None,
        )

    def _sums(self) -> SequenceSums:
        """The sums of all sequences added."""
        return SequenceSums.concatenate(self._shards)
