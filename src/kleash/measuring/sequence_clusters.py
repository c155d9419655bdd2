"""The sequences of a run: to which cluster each belongs, and the KL as it stands."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kleash.uncertainty import Estimate, cluster_labels, ratio_of_sums

Floats = NDArray[np.float64]

Ids = NDArray[np.int64]


def sequence_spans(prompt: NDArray[Any], sample: NDArray[Any]) -> list[tuple[int, int]]:
    """The first row of each sequence and the one after its last; arguments as of ``sequence_starts``."""
    starts = sequence_starts(prompt, sample).tolist()
    return list(zip(starts, [*starts[1:], len(prompt)], strict=True)) if starts else []


def sequence_starts(prompt: NDArray[Any], sample: NDArray[Any]) -> Ids:
    """The row at which each sequence begins.

    Args:
        prompt: the column ``prompt_id``.
        sample: the column ``sample_id``.
    """
    if not len(prompt):
        return np.zeros(0, dtype=np.int64)
    new = (prompt[1:] != prompt[:-1]) | (sample[1:] != sample[:-1])
    return np.concatenate([[0], np.flatnonzero(new) + 1]).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """Which sequences are taken to be independent of which."""

    labels: Ids
    """Of each sequence of the run, in order."""
    warnings: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.labels.max()) + 1 if len(self.labels) else 0


@dataclass(kw_only=True)
class Ledger:
    """One row for each sequence scored so far."""

    READ: ClassVar = ("prompt_id", "sample_id", "kl_policy_reference")
    """The columns of ``tokens/`` that it needs."""

    on_text: bool
    """Whether ``prompt_id`` is a document and ``sample_id`` a window of it."""
    one_model: bool = False
    """Whether a model is compared with itself: its KL is 0, and known to be."""
    _parts: list[tuple[Ids, Ids, Floats, Floats]] = field(default_factory=list)

    def add(self, tokens: Mapping[str, Any]) -> None:
        """Enter the sequences of a shard, given its token columns."""
        prompt, sample, kl = (np.asarray(tokens[name]) for name in self.READ)
        starts = sequence_starts(prompt, sample)
        lengths = np.diff([*starts, len(kl)]).astype(np.float64)
        sums = np.add.reduceat(kl.astype(np.float64), starts) if len(starts) else np.zeros(0)
        self._parts.append((prompt[starts].astype(np.int64), sample[starts].astype(np.int64), sums, lengths))

    def clusters(self) -> Clusters:
        """The clusters of all sequences entered."""
        return clusters_of(self._column(0), self._column(1), on_text=self.on_text)

    def kl(self) -> Estimate:
        """KL(policy || reference) per token over all sequences entered."""
        clusters = self.clusters()
        kl, tokens = (np.bincount(clusters.labels, weights=self._column(place)) for place in (2, 3))
        return ratio_of_sums(kl, tokens, unit="nats", lower=0.0, known_value=0.0 if self.one_model else None)

    def _column(self, place: int) -> NDArray[Any]:
        return np.concatenate([part[place] for part in self._parts]) if self._parts else np.zeros(0, np.int64)


def clusters_of(prompt: Ids, sample: Ids, *, on_text: bool) -> Clusters:
    """Clusters of sequences: their prompts; on text their documents, or pieces of few long ones."""
    if on_text:
        labels, warnings = cluster_labels(prompt, sample)
        return Clusters(labels=np.asarray(labels), warnings=warnings)
    return Clusters(labels=np.unique(prompt, return_inverse=True)[1].astype(np.int64), warnings=())
