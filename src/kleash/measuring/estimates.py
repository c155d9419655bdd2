"""Makes the numbers of a measurement, each with its clustered error, from sums within clusters."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np

from kleash.estimators import ESTIMATORS
from kleash.measuring.cluster_sums import (
    BINNINGS,
    LISTED_AND_SAMPLED,
    TOKENS,
    ClusterSums,
    SequenceTerms,
    SumKey,
    clusters_per_group,
)
from kleash.measuring.sequence_clusters import Clusters, labelled_parts
from kleash.store import RunFolder
from kleash.store.measurement import Bin, ConvergencePoint, EstimatorRecord, SequenceTotal
from kleash.store.measurement_summary import FIELD_LABELS
from kleash.store.statistics import ALL_STATISTICS, DIVERGENCE_COLUMNS, KL_POLICY_REFERENCE, STATISTICS
from kleash.uncertainty import (
    Estimate,
    controlled_total,
    quantiles,
    ratio_of_sums,
    running_mean,
    top_share,
    transformed,
)

LEVELS = {"50": 0.5, "75": 0.75, "90": 0.9, "95": 0.95, "99": 0.99, "99.9": 0.999, "max": 1.0}
"""Name in ``measurement.json`` -> share of the tokens at or below the quantile."""


def statistic_estimate(sums: ClusterSums, name: str) -> Estimate:
    """The reported value of a statistic: the mean over tokens, or a function of it, with its clustered error."""
    statistic = ALL_STATISTICS[name]
    mean = ratio_of_sums(
        sums[SumKey(name)],
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
    return _nats_per_token(sums, SumKey(name, "error"))


def estimator_records(sums: ClusterSums) -> dict[str, EstimatorRecord]:
    """The mean of each sampled estimator, its bias against the exact KL of the same tokens, and its spread."""
    records: dict[str, EstimatorRecord] = {}
    for name in (*ESTIMATORS, LISTED_AND_SAMPLED):
        if SumKey(name) not in sums:
            continue
        never_negative = name in ESTIMATORS and ESTIMATORS[name].never_negative
        mean = _nats_per_token(sums, SumKey(name), lower=0.0 if never_negative else None)
        bias, spread = None, np.nan
        if SumKey(name, "error") in sums:
            bias = estimator_error(sums, name)
            mean_square = sums[SumKey(name, "squared_error")].sum() / sums[TOKENS].sum()
            spread = np.sqrt(np.maximum(mean_square - bias.value**2, 0.0))
        records[name] = EstimatorRecord(**vars(mean), bias=bias, spread=float(spread))
    return records


def _nats_per_token(sums: ClusterSums, key: SumKey, lower: float | None = None) -> Estimate:
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
    _, edges = BINNINGS[name]
    total = sums[SumKey(statistic)].sum()
    records: list[Bin] = []
    for index, (low, high) in enumerate(pairwise(edges)):
        if SumKey(name, "tokens", index) not in sums:
            continue
        kl, tokens = sums[SumKey(name, "kl", index)], sums[SumKey(name, "tokens", index)]
        records.append(
            Bin(
                low=float(low),
                high=float(high),
                tokens=int(tokens.sum()),
                share_of_kl=share(kl.sum(), total),
                kl=ratio_of_sums(kl, tokens, lower=0.0, known_value=0.0 if sums.is_one_model else None),
            )
        )
    return tuple(records)


def share(part: float, total: float) -> float:
    """``part / total``; 0 if the total is 0, NaN if it is not finite."""
    if total == 0:
        return 0.0
    return float(part / total) if np.isfinite(total) else float("nan")


def sequence_total(terms: SequenceTerms, clusters: Clusters, *, is_one_model: bool = False) -> SequenceTotal:
    """The KL between whole responses, the combination of its two estimates with the smallest variance.

    The largest KL of a token is a mean over responses by importance weight, which is 1 for the policy's own.
    """
    known = 0.0 if is_one_model else None
    total = controlled_total(terms.log_ratio, terms.exact, clusters.labels, unit="nats", known_value=known)
    return SequenceTotal(
        kl_policy_reference=total.estimate,
        control_variate_weight=total.weight,
        monte_carlo=total.monte_carlo,
        exact_terms=total.exact_sum,
        largest_token=ratio_of_sums(
            clusters.sum(terms.weight * terms.largest),
            clusters.sum(terms.weight),
            unit="nats",
            lower=0.0,
            known_value=known,
        ),
    )


def convergence(sums: ClusterSums, statistic: str) -> tuple[ConvergencePoint, ...]:
    """The running mean of a KL with its interval, at up to a hundred points of the run."""
    running = running_mean(
        sums[SumKey(statistic)], sums[TOKENS], lower=0.0, known_value=0.0 if sums.is_one_model else None
    )
    return tuple(
        ConvergencePoint(tokens=tokens, mean=mean, ci95=(low, high))
        for tokens, mean, (low, high) in zip(*(column.tolist() for column in running), strict=True)
    )


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
    size = clusters_per_group(clusters.count)
    labels_of_parts = (labels for _, labels in labelled_parts(folder, clusters, ["prompt_id", "sample_id"]))
    groups = [(labels // size).astype(np.int32) for labels in labels_of_parts]
    token_groups = np.concatenate([np.zeros(0, np.int32), *groups])
    by_divergence: dict[str, dict[str, Estimate]] = {}
    headline_share = np.nan
    for name in DIVERGENCE_COLUMNS:
        statistic = STATISTICS[name]
        columns = [part[name] for part in folder.parts("tokens", [name])]
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


def reasons_left_out(unknown_columns: Mapping[str, str]) -> dict[str, str]:
    """The reason for everything that a run without the exact KL leaves out, by the name of the number or field.

    Args:
        unknown_columns: of the engine, each with its reason.
    """
    reasons = {
        name: unknown_columns[column]
        for name, statistic in STATISTICS.items()
        for column in statistic.columns
        if column in unknown_columns
    }
    reason = f"made of the exact KL of each token; {unknown_columns[KL_POLICY_REFERENCE]}"
    return reasons | dict.fromkeys(FIELD_LABELS, reason)


def with_reasons(numbers: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """The statistics, with the reason as the only warning of an upper bound that is infinite.

    And with a further one of means that are bounds, since the reference's file gives bounds for unlikely tokens.
    """
    warnings = ("no upper bound: it is not known how unlikely some tokens are under the second model",)
    explained = {
        name: replace(number, warnings=warnings)
        if np.isinf(number.value) and name.endswith("_upper")
        else number
        for name, number in numbers.items()
    }
    share = numbers["is_clipped"].value if "is_clipped" in numbers else 0.0
    ends = {"logp_reference": "most", "perplexity_reference": "least", "perplexity_ratio": "most"}
    for name, end in ends.items() if share else ():
        reason = f"at {end} this: of {100 * share:.2g} % of the tokens the file has an upper bound for the probability"
        explained[name] = replace(explained[name], warnings=(*explained[name].warnings, reason))
    return explained
