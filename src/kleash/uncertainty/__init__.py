"""How far a number can be trusted: errors, intervals, quantiles and warnings."""

from kleash.uncertainty.clusters import ClusterLabels, cluster_labels, effective_sample_size
from kleash.uncertainty.diagnostics import few_clusters
from kleash.uncertainty.estimate import Estimate
from kleash.uncertainty.quantiles import CoarseCounts, FineCounts
from kleash.uncertainty.ratios import clustered_mean, paired_difference, ratio_of_many, ratio_of_sums
from kleash.uncertainty.student import student_t_quantile
from kleash.uncertainty.totals import ControlledTotal, controlled_total
from kleash.uncertainty.transforming import RunningMean, running_mean, transformed

__all__ = [
    "ClusterLabels",
    "CoarseCounts",
    "ControlledTotal",
    "Estimate",
    "FineCounts",
    "RunningMean",
    "cluster_labels",
    "clustered_mean",
    "controlled_total",
    "effective_sample_size",
    "few_clusters",
    "paired_difference",
    "ratio_of_many",
    "ratio_of_sums",
    "running_mean",
    "student_t_quantile",
    "transformed",
]
