"""Sums over the tokens of a run, shard by shard, in memory that does not grow with the run."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kleash.measuring.columns import CONFIDENCES, POSITIONS, Quantities, weights_of
from kleash.measuring.sequence_clusters import Floats, sequence_starts

MOST_CLUSTERS = 16_384
"""Beyond so many clusters neighbours are put together: errors of a mean over 8 192 groups of
independent prompts are as good as over all of them, and the memory stays flat."""


def neighbours_together(clusters: int) -> int:
    """How many neighbouring clusters are counted as one, a power of 2, where there are so many."""
    together = 1
    while clusters > MOST_CLUSTERS * together:
        together *= 2
    return together


class ClusterSums:
    """Sums of named quantities for each cluster, added to a shard at a time."""

    def __init__(self, *, one_model: bool = False) -> None:
        """With nothing in it; of two models, or of one that is compared with itself."""
        self.one_model = one_model
        self._sums: dict[str, Floats] = {}
        self._size = 0
        self.together = 1
        """So many neighbouring clusters are counted as one."""

    def add(self, clusters: NDArray[np.int64], columns: Mapping[str, Floats]) -> None:
        """Add one number per row of each column to the cluster of that row."""
        if not len(clusters):
            return
        while neighbours_together(int(clusters.max()) + 1) > self.together:
            self._halve()
        index = clusters // self.together
        self._size = max(self._size, int(index.max()) + 1)
        first = int(index.min())
        for name, values in columns.items():
            held = self._sums.setdefault(name, np.zeros(0))
            if len(held) < self._size:
                held = np.concatenate([held, np.zeros(max(self._size, 2 * len(held)) - len(held))])
                self._sums[name] = held
            local = np.bincount(index - first, weights=values)
            held[first : first + len(local)] += local

    def __getitem__(self, name: str) -> Floats:
        """The sum of each cluster, 0 for a quantity of which nothing was added."""
        held = self._sums.get(name, np.zeros(0))[: self._size]
        return np.concatenate([held, np.zeros(self._size - len(held))])

    def __contains__(self, name: str) -> bool:
        """Whether anything of that name was added."""
        return name in self._sums

    def _halve(self) -> None:
        for name in self._sums:
            held = self[name]
            even = np.concatenate([held, np.zeros(len(held) % 2)])
            self._sums[name] = even[0::2] + even[1::2]
        self._size = (self._size + 1) // 2
        self.together *= 2


def token_sums(found: Quantities) -> dict[str, Floats]:
    """The quantities of a shard's tokens, and those of its bins, as columns to add up."""
    kl = found.columns["kl_policy_reference"]
    columns = {"tokens": np.ones(len(kl)), **found.columns}
    for kind, bins, edges in (
        ("position", found.position_bin, POSITIONS),
        ("confidence", found.confidence_bin, CONFIDENCES),
    ):
        for place in range(len(edges)):
            inside = bins == place
            if inside.any():
                columns[f"{kind} {place} tokens"] = inside.astype(np.float64)
                columns[f"{kind} {place} kl"] = np.where(inside, kl, 0.0)
    return columns


class SequenceTerms(NamedTuple):
    """For each sequence: the two sums that both have the KL between responses as their mean, and its weight."""

    log_ratio: Floats
    exact: Floats
    weight: Floats


def sequence_terms(
    part: Mapping[str, NDArray[np.generic]], found: Quantities, weighting: str
) -> SequenceTerms:
    """For each sequence of a shard: the sum of its log ratios, that of its exact KLs, and its weight.

    Both sums have the KL between responses as their mean. Where another distribution drew the tokens, the
    log ratio at t is weighted by the ratio of the response up to t, the exact term by that up to t - 1.
    """
    starts = sequence_starts(part["prompt_id"], part["sample_id"])
    log_ratios, exact = found.columns["log_ratio"], found.columns["kl_policy_reference"]
    weights = np.ones(len(starts))
    if weighting == "importance":
        with_token, before = np.ones_like(exact), np.ones_like(exact)
        for place, (begin, end) in enumerate(zip(starts, [*starts[1:], len(exact)], strict=True)):
            rows = {name: part[name][begin:end] for name in ("logp_policy", "logp_sampled")}
            with_token[begin:end] = weights_of(rows, weighting, level="prefix")
            before[begin + 1 : end] = with_token[begin : end - 1]
            weights[place] = with_token[end - 1]
        with np.errstate(invalid="ignore", over="ignore"):  # a weight of infinity is named among the warnings
            log_ratios, exact = with_token * log_ratios, before * exact
    with np.errstate(invalid="ignore", over="ignore"):
        return SequenceTerms(
            log_ratio=np.add.reduceat(log_ratios, starts),
            exact=np.add.reduceat(exact, starts),
            weight=weights,
        )
