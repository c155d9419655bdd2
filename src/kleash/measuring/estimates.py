"""Makes the numbers of a measurement, each with its clustered error, from sums within clusters."""

from itertools import pairwise

import numpy as np

from kleash.estimators import ESTIMATORS
from kleash.measuring.cluster_sums import (
    BINNINGS,
    LISTED_AND_SAMPLED,
    TOKENS,
    BinSum,
    ClusterSums,
    EstimatorSum,
    SequenceTerms,
    StatisticSum,
)
from kleash.measuring.sequence_clusters import Clusters
from kleash.store.measurement import Bin, ConvergencePoint, EstimatorRecord, SequenceTotal
from kleash.store.statistics import ALL_STATISTICS
from kleash.uncertainty import Estimate, controlled_total, ratio_of_sums, running_mean, transformed


def statistic_estimate(sums: ClusterSums, name: str) -> Estimate:
    """The reported value of a statistic: the mean over tokens, or a function of it, with its clustered error."""
    statistic = ALL_STATISTICS[name]
    mean = ratio_of_sums(
        sums[StatisticSum(name)],
        sums[TOKENS],
        unit=statistic.unit,
        lower=statistic.lower,
        upper=statistic.upper,
        known_value=statistic.same_model_value if sums.is_one_model else None,
    )
    reduction = statistic.reduction
    if reduction is None:
        return mean
    return transformed(mean, reduction.function, reduction.derivative, unit=reduction.unit)


def estimator_error(sums: ClusterSums, name: str) -> Estimate:
    """The mean of a sampled estimator minus the exact KL of the same tokens, in nats."""
    return _nats_per_token(sums, EstimatorSum(name, "error"))


def estimator_records(sums: ClusterSums) -> dict[str, EstimatorRecord]:
    """The mean of each sampled estimator, its bias against the exact KL of the same tokens, and its spread."""
    records: dict[str, EstimatorRecord] = {}
    for name in (*ESTIMATORS, LISTED_AND_SAMPLED):
        if EstimatorSum(name, "value") not in sums:
            continue
        never_negative = name in ESTIMATORS and ESTIMATORS[name].never_negative
        mean = _nats_per_token(sums, EstimatorSum(name, "value"), lower=0.0 if never_negative else None)
        bias, spread = None, np.nan
        if EstimatorSum(name, "error") in sums:
            bias = estimator_error(sums, name)
            mean_square = sums[EstimatorSum(name, "squared_error")].sum() / sums[TOKENS].sum()
            spread = np.sqrt(np.maximum(mean_square - bias.value**2, 0.0))
        records[name] = EstimatorRecord(**vars(mean), bias=bias, spread=float(spread))
    return records


def _nats_per_token(sums: ClusterSums, key: EstimatorSum, lower: float | None = None) -> Estimate:
    """The mean over tokens of a column in nats."""
    return ratio_of_sums(
        sums[key], sums[TOKENS], unit="nats", lower=lower, known_value=0.0 if sums.is_one_model else None
    )


def bins(sums: ClusterSums, name: str, statistic: str) -> tuple[Bin, ...]:
    """The mean KL of each range of a binning that holds at least one token.

    Args:
        sums: of the run.
        name: a key of ``BINNINGS``.
        statistic: name of the KL that was summed in the ranges.
    """
    binning = BINNINGS[name]
    total = sums[StatisticSum(statistic)].sum()
    records: list[Bin] = []
    for index, (low, high) in enumerate(pairwise((*binning.edges, binning.end))):
        if BinSum(name, index, "tokens") not in sums:
            continue
        kl, tokens = sums[BinSum(name, index, "kl")], sums[BinSum(name, index, "tokens")]
        has_tokens = tokens > 0
        mean = ratio_of_sums(
            kl[has_tokens],
            tokens[has_tokens],
            unit="nats",
            lower=0.0,
            known_value=0.0 if sums.is_one_model else None,
        )
        records.append(
            Bin(
                low=float(low),
                high=float(high),
                tokens=int(tokens.sum()),
                share_of_kl=share(kl.sum(), total),
                kl=mean,
            )
        )
    return tuple(records)


def share(part: float, total: float) -> float:
    """``part / total``; 0 if the total is 0, NaN if it is not finite."""
    if total == 0:
        return 0.0
    return float(part / total) if np.isfinite(total) else float("nan")


def sequence_total(terms: SequenceTerms, clusters: Clusters, *, is_one_model: bool = False) -> SequenceTotal:
    """The KL between whole responses: the combination of its two estimates with the smallest variance."""
    total = controlled_total(
        terms.log_ratio,
        terms.exact,
        clusters.labels,
        unit="nats",
        known_value=0.0 if is_one_model else None,
    )
    return SequenceTotal(
        kl_policy_reference=total.estimate,
        control_variate_weight=total.weight,
        monte_carlo=total.monte_carlo,
        exact_terms=total.exact_sum,
    )


def convergence(sums: ClusterSums, statistic: str) -> tuple[ConvergencePoint, ...]:
    """The running mean of a KL with its interval, at up to a hundred points of the run."""
    tokens, means, half_widths = running_mean(
        sums[StatisticSum(statistic)], sums[TOKENS], known_value=0.0 if sums.is_one_model else None
    )
    return tuple(
        ConvergencePoint(tokens=int(count), mean=float(mean), ci95=(float(mean - half), float(mean + half)))
        for count, mean, half in zip(tokens, means, half_widths, strict=True)
    )
