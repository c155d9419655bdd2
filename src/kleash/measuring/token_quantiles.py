"""Quantiles over all tokens of a run, in two passes over its files."""

from collections.abc import Mapping

import numpy as np

from kleash.measuring.cluster_sums import neighbours_together
from kleash.measuring.scales import scale_of
from kleash.measuring.sequence_clusters import Clusters, sequence_starts
from kleash.records import Number, RunFolder
from kleash.uncertainty import CoarseCounts

RUNGS = {"50": 0.5, "75": 0.75, "90": 0.9, "95": 0.95, "99": 0.99, "99.9": 0.999, "max": 1.0}
LADDERS = ("kl_policy_reference", "kl_reference_policy", "jensen_shannon", "total_variation")
HEADLINE = "kl_policy_reference"


def climb(
    folder: RunFolder, clusters: Clusters, *, one_model: bool = False
) -> tuple[Mapping[str, Mapping[str, Number]], float]:
    """The quantiles of each divergence, and the share of KL(policy || reference) in the top 1 % of tokens."""
    coarse = dict.fromkeys(LADDERS, CoarseCounts.empty())
    for part in folder.token_parts(list(LADDERS)):
        coarse = {name: counts.after(part[name]) for name, counts in coarse.items()}
    labels = clusters.labels // neighbours_together(clusters.count)
    count = int(labels.max()) + 1 if len(labels) else 0
    fine = {name: counts.refine(tuple(RUNGS.values()), clusters=count) for name, counts in coarse.items()}
    done = 0
    for part in folder.token_parts(["prompt_id", "sample_id", *LADDERS]):
        starts = sequence_starts(part["prompt_id"], part["sample_id"])
        lengths = np.diff([*starts, len(part["prompt_id"])])
        mine = np.repeat(labels[done : done + len(starts)], lengths)
        done += len(starts)
        fine = {name: counts.after(part[name], mine) for name, counts in fine.items()}
    quantiles: dict[str, dict[str, Number]] = {}
    for name, counts in fine.items():
        scale = scale_of(name)
        upper = np.inf if scale.upper is None else scale.upper
        estimates = counts.estimates(
            unit=scale.unit, lower=0.0, upper=upper, known_value=0.0 if one_model else None
        )
        quantiles[name] = {rung: Number.of(estimate) for rung, estimate in zip(RUNGS, estimates, strict=True)}
    return quantiles, fine[HEADLINE].top_share(0.01)
