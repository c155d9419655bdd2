"""Cluster labels of sequences, sums over clusters, and the effective size of a weighted sample."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer, Real, Shaped
from numpy.typing import NDArray

from kleash.errors import ShapeError

FEW_DOCUMENTS = 30
"""Below this number of documents, clusters are blocks of windows."""
BLOCK_WINDOWS = 8
"""Neighbouring windows in one block."""


def one_each(place: str, **columns: Any) -> list[NDArray[Any]]:
    """The columns as arrays, of one axis and one length.

    Args:
        place: what each column has a value for: "cluster".
        columns: by their names; lists or arrays.

    Raises:
        ShapeError: if they have more axes, or differ in length.
    """
    arrays = [np.asarray(column) for column in columns.values()]
    if len({array.shape for array in arrays}) > 1 or any(array.ndim != 1 for array in arrays):
        named_shapes = ", ".join(f"{name} {array.shape}" for name, array in zip(columns, arrays, strict=True))
        raise ShapeError(f"the shapes are {named_shapes}; give one of each per {place}")
    return arrays


def sums_by_cluster(
    labels: Shaped[np.ndarray, "observations"], *columns: Real[np.ndarray, "observations"]
) -> list[NDArray[np.float64]]:
    """The sums of each column over the observations of each label, and their number, in the order of the labels."""
    _, cluster = np.unique(labels, return_inverse=True)
    return [
        np.bincount(cluster, weights=column).astype(np.float64) for column in (*columns, np.ones(len(labels)))
    ]


class ClusterLabels(NamedTuple):
    """A cluster label per sequence, from 0 without gaps, and warnings about the clusters."""

    labels: Int64[np.ndarray, "sequences"]
    warnings: tuple[str, ...]


def cluster_labels(
    document_ids: Integer[np.ndarray, "sequences_d"] | Sequence[int],
    window_ids: Integer[np.ndarray, "sequences_w"] | Sequence[int],
    *,
    few: int = FEW_DOCUMENTS,
    block: int = BLOCK_WINDOWS,
) -> ClusterLabels:
    """Label sequences by document; with few documents by blocks of neighbouring windows, with a warning.

    Few documents of one block each have no warning here: estimates over few clusters have one of their own.

    Args:
        document_ids: the document (or prompt) of each sequence.
        window_ids: its window in that document, from 0 in reading order.
        few: with fewer documents than this, blocks are the clusters.
        block: number of windows in a block.

    Raises:
        ShapeError: if the two differ in length.
    """
    document_ids, window_ids = one_each("sequence", document_ids=document_ids, window_ids=window_ids)
    documents, labels = np.unique(document_ids, return_inverse=True)
    if len(documents) >= few:
        return ClusterLabels(labels.astype(np.int64), ())
    blocks = np.stack([labels, window_ids // block], axis=1)
    distinct_blocks, labels = np.unique(blocks, axis=0, return_inverse=True)
    warning = (
        f"the clusters are blocks of {block} neighbouring windows, since there are fewer than {few} documents "
        f"({len(documents)}): what blocks of one document share is missing from the error"
    )
    warnings = (warning,) if len(distinct_blocks) > len(documents) else ()
    return ClusterLabels(np.ravel(labels).astype(np.int64), warnings)


MIN_EFFECTIVE_SHARE = 0.5
"""Share of a sample that its effective size should be: intervals of the variance of weights then cover 90 %."""


def effective_sample_size(weights: Real[np.ndarray, "samples"]) -> float:
    """The number of equally weighted samples with the same variance: (sum w)^2 / sum w^2.

    Weights are divided by the largest first, so that large weights do not overflow. NaN for no weights, if all weights
    are 0, and if one is infinite or NaN.

    References:
        Kish (1965), "Survey Sampling".
    """
    weights = np.asarray(weights, np.float64)
    largest = np.abs(weights).max(initial=0.0)
    if not 0 < largest < np.inf:
        return float("nan")
    weights = weights / largest
    return float(weights.sum() ** 2 / (weights**2).sum())
