"""Per-token quantities of a run, summed within clusters one shard at a time, in constant memory."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kleash.estimators import ESTIMATORS, importance_weights
from kleash.measuring.sequence_clusters import Floats, sequence_starts
from kleash.store.statistics import ALL_STATISTICS, KL_POLICY_REFERENCE, STATISTICS, columns_of, log_ratio

Weighting = Literal["unweighted", "importance"]
"""How estimators of sampled tokens are averaged: "unweighted" if the policy drew the tokens, "importance" if another
distribution did, with the probabilities of ``logp_sampled``."""
MAX_GROUPS = 16_384
"""With more clusters than this, neighbouring clusters are summed together. The errors of a mean over 8 192 groups of
independent prompts are as good as over all prompts, and the memory stays constant."""


BINNINGS: Mapping[str, tuple[str, tuple[float, ...]]] = MappingProxyType(
    {
        "position": (
            "position",
            (0, 1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, np.inf),
        ),
        "confidence": ("top1_probability_reference", (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)),
    }
)
"""Name -> a column of ``tokens/``, and the edges of its ranges, in each of which the KL is averaged: a range begins at
its edge and ends before the next, the last one at it."""

LISTED_AND_SAMPLED = "listed_and_sampled"
"""Name of the estimator that sums p (log p - log q) over the tokens that a server lists, and takes the log ratio of the
sampled token where it is not among them: unbiased for KL(policy || reference)."""


def columns_to_read(statistics: Collection[str]) -> list[str]:
    """The columns of ``tokens/`` that ``token_quantities`` reads."""
    names = [
        *("prompt_id", "sample_id", "logp_policy", "logp_reference", "logp_sampled"),
        *(column for column, _ in BINNINGS.values()),
        *columns_of(tuple(statistics)),
        *(("kl_of_listed", "token_is_listed") if "listed_probability" in statistics else ()),
    ]
    return list(dict.fromkeys(names))


class SumKey(NamedTuple):
    """Key of a sum over the tokens of each cluster."""

    name: str
    """A statistic of ``STATISTICS``, an estimator of ``ESTIMATORS``, a binning of ``BINNINGS``, or "tokens"."""
    quantity: Literal["value", "error", "squared_error", "tokens", "kl"] = "value"
    """Binnings have "tokens" and "kl"; the error of an estimator is the estimate minus the exact KL of the token."""
    place: int = 0
    """Of a range of a binning."""


TOKENS = SumKey("tokens")
KL = SumKey(KL_POLICY_REFERENCE)


def token_quantities(
    tokens: Mapping[str, NDArray[np.generic]],
    weighting: Weighting | None,
    statistics: Collection[str] = tuple(STATISTICS),
    binned: str = KL.name,
) -> dict[SumKey, Floats]:
    """The quantities of a shard that are averaged over tokens: a value for each token, in float64.

    Args:
        tokens: the columns ``columns_to_read``.
        weighting: how the estimators of sampled tokens are averaged; None if no average of them estimates
            KL(policy || reference).
        statistics: names of the statistics that can be computed.
        binned: name of the KL that is summed in the ranges of each binning.
    """
    columns: dict[SumKey, Floats] = {TOKENS: np.ones(len(tokens["logp_policy"]))}
    columns |= {SumKey(name): ALL_STATISTICS[name].values(tokens) for name in statistics}
    exact = columns.get(KL)
    with np.errstate(over="ignore", invalid="ignore"):  # reported as a warning of the run
        for name, estimates in _estimates(tokens, weighting, has_kl=exact is not None).items():
            columns[SumKey(name)] = estimates
            if exact is not None:
                columns[SumKey(name, "error")] = estimates - exact
                columns[SumKey(name, "squared_error")] = (estimates - exact) ** 2
    for name, (column, edges) in BINNINGS.items() if exact is not None else ():
        places = np.searchsorted(edges[:-1], tokens[column], side="right") - 1
        for place in np.unique(places).tolist():
            is_inside = places == place
            columns[SumKey(name, "tokens", place)] = is_inside.astype(np.float64)
            columns[SumKey(name, "kl", place)] = np.where(is_inside, columns[SumKey(binned)], 0.0)
    return columns


def token_log_ratio(tokens: Mapping[str, NDArray[np.generic]]) -> Floats:
    """log p - log q of each observed token, in float64."""
    return log_ratio(*(tokens[name].astype(np.float64) for name in ("logp_policy", "logp_reference")))


def _estimates(
    tokens: Mapping[str, NDArray[np.generic]], weighting: Weighting | None, *, has_kl: bool
) -> dict[str, Floats]:
    """Each estimator's weighted estimates; empty if no average of them estimates KL(policy || reference)."""
    if weighting is None:
        return {}
    ratio, weights = token_log_ratio(tokens), weights_of(tokens, weighting, level="token")
    estimates = {
        name: weights * estimator.of(torch.from_numpy(ratio)).numpy()
        for name, estimator in ESTIMATORS.items()
    }
    if not has_kl:
        is_listed = tokens["token_is_listed"].astype(np.float64) > 0
        sampled = np.where(is_listed, 0.0, weights * ratio)
        estimates[LISTED_AND_SAMPLED] = tokens["kl_of_listed"].astype(np.float64) + sampled
    return estimates


def weights_of(
    tokens: Mapping[str, NDArray[np.generic]], weighting: Weighting, *, level: Literal["token", "prefix"]
) -> Floats:
    """Importance weights: the policy's probability over the one with which the token, or the prefix, was drawn.

    Args:
        tokens: token columns; for level "prefix" those of one sequence.
        weighting: "unweighted", for weights of 1, or "importance".
        level: "token", or "prefix" for the ratio of the response up to and including the token.
    """
    logp = torch.from_numpy(tokens["logp_policy"].astype(np.float64))[None]
    if weighting == "unweighted":
        return np.ones(logp.shape[1])
    logp_sampled = torch.from_numpy(tokens["logp_sampled"].astype(np.float64))[None]
    mask = torch.ones_like(logp, dtype=torch.bool)
    return importance_weights(logp, logp_sampled, mask, level=level).values[0].numpy()


def clusters_per_group(clusters: int) -> int:
    """The number of neighbouring clusters that are summed together: the least power of 2 that suffices."""
    return 1 << (max(0, clusters - 1) // MAX_GROUPS).bit_length()


class ClusterSums:
    """Sums within clusters of named columns, added one shard at a time."""

    def __init__(self, clusters: int, *, is_one_model: bool = False) -> None:
        """Begin with no sums.

        Args:
            clusters: number of clusters.
            is_one_model: whether policy and reference are the same model, so that their divergences are known to be 0.
        """
        self.is_one_model = is_one_model
        self.group_size = clusters_per_group(clusters)
        """Number of neighbouring clusters that share a sum."""
        self._size = -(-clusters // self.group_size)
        self._sums: dict[SumKey, Floats] = {}

    def add(self, clusters: NDArray[np.int64], columns: Mapping[SumKey, Floats]) -> None:
        """Add each row of each column to the sum of the row's cluster."""
        groups = clusters // self.group_size
        self._sums |= {
            key: self[key] + np.bincount(groups, weights=values, minlength=self._size)
            for key, values in columns.items()
        }

    def __getitem__(self, key: SumKey) -> Floats:
        """The sum of each cluster; 0 for a key that was never added."""
        return self._sums.get(key, np.zeros(self._size))

    def __contains__(self, key: SumKey) -> bool:
        """Whether a column of this key was added."""
        return key in self._sums


class SequenceTerms(NamedTuple):
    """For each sequence the two sums whose means are the KL between responses, its largest KL and importance weight."""

    log_ratio: Floats
    """Sum of the log ratios, in nats."""
    exact: Floats
    """Sum of the exact KLs, in nats."""
    largest: Floats
    """The largest exact KL of a token, in nats."""
    weight: Floats


@np.errstate(invalid="ignore", over="ignore")  # an infinite weight is reported as a warning
def sequence_terms(
    tokens: Mapping[str, NDArray[np.generic]], exact: Floats, weighting: Weighting
) -> SequenceTerms:
    """For each sequence of a shard the sum of its log ratios, the sum and the largest of its exact KLs, and its weight.

    The mean of both sums is the KL between responses. If another distribution drew the tokens, the log ratio at t is
    weighted by the ratio of the response up to t, and the exact KL by the ratio up to t - 1.

    Args:
        tokens: the shard's columns.
        exact: the exact KL(policy || reference) of each token.
        weighting: by which distribution the tokens were drawn.
    """
    starts = sequence_starts(tokens["prompt_id"], tokens["sample_id"])
    log_ratios, weights = token_log_ratio(tokens), np.ones(len(starts))
    largest = np.maximum.reduceat(exact, starts)
    if weighting == "importance":
        through, before = np.ones_like(exact), np.ones_like(exact)
        for index, (begin, end) in enumerate(zip(starts, [*starts[1:], len(exact)], strict=True)):
            rows = {name: tokens[name][begin:end] for name in ("logp_policy", "logp_sampled")}
            through[begin:end] = weights_of(rows, weighting, level="prefix")
            before[begin + 1 : end] = through[begin : end - 1]
            weights[index] = through[end - 1]
        log_ratios, exact = through * log_ratios, before * exact
    return SequenceTerms(
        log_ratio=np.add.reduceat(log_ratios, starts),
        exact=np.add.reduceat(exact, starts),
        largest=largest,
        weight=weights,
    )
