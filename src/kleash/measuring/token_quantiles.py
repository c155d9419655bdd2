"""Quantiles of the divergences over all tokens of a run."""

from collections.abc import Mapping

import numpy as np

from kleash.measuring.cluster_sums import clusters_per_group
from kleash.measuring.sequence_clusters import Clusters, sequence_starts
from kleash.store import RunFolder
from kleash.store.statistics import STATISTICS
from kleash.uncertainty import Estimate, quantiles, top_share

LEVELS = {"50": 0.5, "75": 0.75, "90": 0.9, "95": 0.95, "99": 0.99, "99.9": 0.999, "max": 1.0}
"""Name in ``measurement.json`` -> share of the tokens at or below the quantile."""
DIVERGENCES = ("kl_policy_reference", "kl_reference_policy", "jensen_shannon", "total_variation")
"""Columns of ``tokens/`` of which quantiles are reported."""


def token_quantiles(
    folder: RunFolder, clusters: Clusters, headline: str, *, is_one_model: bool = False
) -> tuple[Mapping[str, Mapping[str, Estimate]], float]:
    """The quantiles of each divergence, and the share of one KL in the top 1 % of tokens.

    A column is in memory at a time: 4 bytes a value, and 4 for the cluster.

    Args:
        folder: of the run.
        clusters: of its sequences.
        headline: name of the KL of which the share is.
        is_one_model: whether policy and reference are the same model, so that all divergences are known to be 0.
    """
    groups = (clusters.labels // clusters_per_group(clusters.count)).astype(np.int32)
    parts: list[np.ndarray] = [np.zeros(0, np.int32)]
    first_sequence = 0
    for part in folder.token_parts(["prompt_id", "sample_id"]):
        starts = sequence_starts(part["prompt_id"], part["sample_id"])
        lengths = np.diff([*starts, len(part["prompt_id"])])
        parts.append(np.repeat(groups[first_sequence : first_sequence + len(starts)], lengths))
        first_sequence += len(starts)
    token_groups = np.concatenate(parts)
    by_divergence: dict[str, dict[str, Estimate]] = {}
    headline_share = np.nan
    for name in DIVERGENCES:
        statistic = STATISTICS[name]
        columns = [part[name] for part in folder.token_parts([name])]
        values = np.concatenate([np.zeros(0, np.float32), *columns])
        estimates = quantiles(
            values,
            token_groups,
            tuple(LEVELS.values()),
            unit=statistic.unit,
            lower=0.0,
            upper=np.inf if statistic.upper is None else statistic.upper,
            known_value=0.0 if is_one_model else None,
        )
        by_divergence[name] = dict(zip(LEVELS, estimates, strict=True))
        if name == headline:
            headline_share = top_share(values, 0.01)
    return by_divergence, headline_share
