"""The sequences of a run: where each begins in the token table, its cluster, and the running KL."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kleash.store import RunFolder
from kleash.uncertainty import Estimate, cluster_labels, ratio_of_sums

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


def sequence_starts(prompt: NDArray[Any], sample: NDArray[Any]) -> Ids:
    """The row of the token table at which each sequence begins.

    The table has a row for each scored position, and at least one: every source without a token is refused. The rows of
    a sequence are consecutive.

    Args:
        prompt: the column ``prompt_id``.
        sample: the column ``sample_id``.
    """
    changes = (prompt[1:] != prompt[:-1]) | (sample[1:] != sample[:-1])
    return np.concatenate([[0], np.flatnonzero(changes) + 1]).astype(np.int64)


def sequence_spans(prompt: NDArray[Any], sample: NDArray[Any]) -> list[tuple[int, int]]:
    """The first row of each sequence and the row after its last; arguments as for ``sequence_starts``."""
    starts = sequence_starts(prompt, sample).tolist()
    return list(zip(starts, [*starts[1:], len(prompt)], strict=True))


def hashes_as_ints(hashes: Iterable[str]) -> Ids:
    """Hashes of prompts, of 16 hex digits, as integers that are equal where the hashes are."""
    return np.array([int(digits, 16) for digits in hashes], dtype=np.uint64).view(np.int64)


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


def labelled_parts(
    folder: RunFolder, clusters: Clusters, names: Sequence[str]
) -> Iterator[tuple[dict[str, Any], Ids]]:
    """Iterate over the shards of a run: token columns, and the cluster of each token.

    Args:
        folder: of the run.
        clusters: of its sequences.
        names: of the columns, ``prompt_id`` and ``sample_id`` among them.
    """
    first = 0
    for part in folder.parts("tokens", list(names)):
        starts = sequence_starts(part["prompt_id"], part["sample_id"])
        labels = clusters.labels[first : first + len(starts)]
        first += len(starts)
        yield part, np.repeat(labels, np.diff([*starts, len(part["prompt_id"])]))


def distinct_prompts(prompt: Ids, sample: Ids, prompt_hash: Ids, *, on_text: bool) -> Ids:
    """The number of each sequence's prompt, or document, from 0; equal ones have one number.

    A source may hold a prompt several times, each with a ``prompt_id`` of its own, and the responses of a conversation
    have one ``prompt_id`` and different prompts: sequences belong together where either is equal. Documents are equal
    if all of their windows are.

    Args:
        prompt: ``prompt_id`` of each sequence.
        sample: ``sample_id`` of each sequence.
        prompt_hash: of each sequence, as ``hashes_as_ints``.
        on_text: whether these are documents and windows.
    """
    ids = np.unique(prompt, return_inverse=True)[1].astype(np.int64)
    contents = prompt_hash
    if on_text:
        of_document = np.zeros(len(ids), dtype=np.uint64)
        # a hash of all windows of a document and their order, modulo 2**64
        np.add.at(of_document, ids, prompt_hash.view(np.uint64) * (2 * sample + 1).astype(np.uint64))
        contents = of_document[ids]
    contents = np.unique(contents, return_inverse=True)[1]
    # each round gives all sequences of one content, and of one id, the lowest of their labels
    labels, previous = ids, None
    while previous is None or not np.array_equal(labels, previous):
        previous = labels
        for same in (contents, ids):
            lowest = np.full(len(ids), len(ids), dtype=np.int64)
            np.minimum.at(lowest, same, labels)
            labels = lowest[same]
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def clusters_of(prompt: Ids, sample: Ids, *, on_text: bool) -> Clusters:
    """The clusters of sequences: prompts; on text documents, or blocks of windows where documents are few.

    Args:
        prompt: of each sequence, as ``distinct_prompts``.
        sample: ``sample_id`` of each sequence.
        on_text: whether these are documents and windows.
    """
    if on_text:
        labels, warnings = cluster_labels(prompt, sample)
        return Clusters(labels=np.asarray(labels), warnings=warnings)
    return Clusters(labels=np.unique(prompt, return_inverse=True)[1].astype(np.int64), warnings=())


class SequenceSums(NamedTuple):
    """Numbers of each token summed over each sequence: one row per sequence."""

    prompt_id: Ids
    sample_id: Ids
    prompt_hash: Ids
    """As ``hashes_as_ints``."""
    total: Floats
    """Over the tokens: [sequences], or [sequences, columns]."""
    tokens: Floats
    """Number of tokens."""

    def clusters(self, *, on_text: bool) -> Clusters:
        """The clusters of the sequences; ``on_text`` if they are windows of documents."""
        return clusters_of(self.distinct_prompts(on_text=on_text), self.sample_id, on_text=on_text)

    def distinct_prompts(self, *, on_text: bool) -> Ids:
        """``distinct_prompts`` of the sequences."""
        return distinct_prompts(self.prompt_id, self.sample_id, self.prompt_hash, on_text=on_text)

    @classmethod
    def concatenate(cls, shards: Sequence["SequenceSums"]) -> "SequenceSums":
        """The rows of shards, of which there is at least one, in their order."""
        return cls(*map(np.concatenate, zip(*shards, strict=True)))


def sequence_rows(tokens: Mapping[str, Any], kl: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """A row for each sequence of a shard, with its summed KL and its number of tokens.

    Args:
        tokens: the shard's columns ``prompt_id`` and ``sample_id``.
        kl: of each token; several numbers of each are summed as well.
    """
    prompt, sample = (np.asarray(tokens[name]) for name in ("prompt_id", "sample_id"))
    starts, kl = sequence_starts(prompt, sample), kl.astype(np.float64)
    return {
        "kl": np.add.reduceat(kl, starts),
        "prompt_id": prompt[starts],
        "sample_id": sample[starts],
        "tokens": np.diff([*starts, len(kl)]),
    }


def sum_sequences(tokens: Mapping[str, Any], hashes: Iterable[str], values: NDArray[Any]) -> SequenceSums:
    """The sums of a shard's sequences.

    Args:
        tokens: its token columns ``prompt_id`` and ``sample_id``.
        hashes: ``prompt_hash`` of each sequence.
        values: what is summed: a number of each token, or several.
    """
    rows = sequence_rows(tokens, values)
    return SequenceSums(
        prompt_id=rows["prompt_id"].astype(np.int64),
        sample_id=rows["sample_id"].astype(np.int64),
        prompt_hash=hashes_as_ints(hashes),
        total=rows["kl"],
        tokens=rows["tokens"].astype(np.float64),
    )


def sum_run(
    folder: RunFolder, names: Sequence[str], values_of: Callable[[Mapping[str, Any]], NDArray[Any]]
) -> SequenceSums:
    """The sequences of a run with the sums of numbers of their tokens.

    Args:
        folder: of the run, from ``require_shards``.
        names: of the columns of ``tokens/`` that the numbers are made of.
        values_of: makes them of the columns of a shard: one of each token, or several.

    Raises:
        RunFolderError: if a file is damaged.
    """
    parts = zip(
        folder.parts("tokens", ["prompt_id", "sample_id", *names]),
        folder.parts("sequences", ["prompt_hash"]),
        strict=True,
    )
    return SequenceSums.concatenate(
        [sum_sequences(tokens, sequences["prompt_hash"], values_of(tokens)) for tokens, sequences in parts]
    )


def mean_of_sequences(
    shards: Sequence[SequenceSums], *, on_text: bool, is_one_model: bool = False
) -> Estimate:
    """A KL in nats per token over the sequences of some shards, with its clustered error.

    Args:
        shards: sums of the KL.
        on_text: whether ``prompt_id`` is a document and ``sample_id`` a window of it.
        is_one_model: whether policy and reference are the same model, so that the KL is known to be 0.
    """
    sums = SequenceSums.concatenate(shards)
    clusters = sums.clusters(on_text=on_text)
    return ratio_of_sums(
        clusters.sum(sums.total),
        clusters.sum(sums.tokens),
        unit="nats",
        lower=0.0,
        known_value=0.0 if is_one_model else None,
    )
