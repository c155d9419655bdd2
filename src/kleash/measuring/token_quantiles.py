"""Quantiles of the divergences over all tokens of a run, in two passes over its files."""

from collections.abc import Mapping

import numpy as np

from kleash.measuring.cluster_sums import clusters_per_group
from kleash.measuring.sequence_clusters import Clusters, sequence_starts
from kleash.store import RunFolder
from kleash.store.statistics import STATISTICS
from kleash.uncertainty import CoarseCounts, Estimate

LEVELS = {"50": 0.5, "75": 0.75, "90": 0.9, "95": 0.95, "99": 0.99, "99.9": 0.999, "max": 1.0}
"""Name in ``measurement.json`` -> share of the tokens at or below the quantile."""
DIVERGENCES = ("kl_policy_reference", "kl_reference_policy", "jensen_shannon", "total_variation")
"""Columns of ``tokens/`` of which quantiles are reported."""


def token_quantiles(
    folder: RunFolder, clusters: Clusters, headline: str, *, is_one_model: bool = False
) -> tuple[Mapping[str, Mapping[str, Estimate]], float]:
    """The quantiles of each divergence, and the share of one KL in the top 1 % of tokens.

    The first pass counts values in coarse bins, the second counts those around each quantile exactly and by cluster.

    Args:
        folder: of the run.
        clusters: of its sequences.
        headline: name of the KL of which the share is.
        is_one_model: whether policy and reference are the same model, so that all divergences are known to be 0.
    """
    coarse = dict.fromkeys(DIVERGENCES, CoarseCounts.empty())
    for part in folder.token_parts(list(DIVERGENCES)):
        coarse = {name: counts.after(part[name]) for name, counts in coarse.items()}
    groups = clusters.labels // clusters_per_group(clusters.count)
    group_count = int(groups.max()) + 1 if len(groups) else 0
    fine = {
        name: counts.refine(tuple(LEVELS.values()), clusters=group_count) for name, counts in coarse.items()
    }
    first_sequence = 0
    for part in folder.token_parts(["prompt_id", "sample_id", *DIVERGENCES]):
        starts = sequence_starts(part["prompt_id"], part["sample_id"])
        lengths = np.diff([*starts, len(part["prompt_id"])])
        token_groups = np.repeat(groups[first_sequence : first_sequence + len(starts)], lengths)
        first_sequence += len(starts)
        fine = {name: counts.after(part[name], token_groups) for name, counts in fine.items()}
    quantiles: dict[str, dict[str, Estimate]] = {}
    for name, counts in fine.items():
        statistic = STATISTICS[name]
        estimates = counts.estimates(
            unit=statistic.unit,
            lower=0.0,
            upper=np.inf if statistic.upper is None else statistic.upper,
            known_value=0.0 if is_one_model else None,
        )
        quantiles[name] = dict(zip(LEVELS, estimates, strict=True))
    return quantiles, fine[headline].top_share(0.01)
