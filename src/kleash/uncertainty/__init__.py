"""Uncertainty of estimates: standard errors, confidence intervals, quantiles and warnings."""

from kleash.estimate import Estimate, transformed
from kleash.registry import refuse_former
from kleash.uncertainty.clusters import ClusterLabels, cluster_labels, effective_sample_size
from kleash.uncertainty.control_variates import ControlledTotal, controlled_total
from kleash.uncertainty.quantiles import quantiles, top_share
from kleash.uncertainty.ratios import (
    RunningMean,
    clustered_mean,
    paired_difference,
    ratio_of_many,
    ratio_of_sums,
    running_mean,
)
from kleash.uncertainty.student_t import student_t_quantile

__all__ = [
    "ClusterLabels",
    "ControlledTotal",
    "Estimate",
    "RunningMean",
    "cluster_labels",
    "clustered_mean",
    "controlled_total",
    "effective_sample_size",
    "paired_difference",
    "quantiles",
    "ratio_of_many",
    "ratio_of_sums",
    "running_mean",
    "student_t_quantile",
    "top_share",
    "transformed",
]

__getattr__ = refuse_former(
    __name__,
    dict.fromkeys(("CoarseCounts", "FineCounts"), "take quantiles(values, clusters, levels)"),
)
