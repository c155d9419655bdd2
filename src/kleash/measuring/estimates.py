"""From sums over clusters to the numbers that are written."""

import math
from itertools import pairwise

import numpy as np

from kleash.measuring.cluster_sums import ClusterSums, SequenceTerms
from kleash.measuring.columns import CONFIDENCES, POSITIONS
from kleash.measuring.scales import scale_of, value_of_itself
from kleash.measuring.sequence_clusters import Clusters
from kleash.records import Bin, EstimatorRecord, Number, SequenceTotal
from kleash.uncertainty import Estimate, controlled_total, ratio_of_sums, transformed


def mean_per_token(sums: ClusterSums, name: str) -> Estimate:
    """The mean per token of a quantity, with its cluster-robust error."""
    scale = scale_of(name)
    return ratio_of_sums(
        sums[name],
        sums["tokens"],
        unit=scale.unit,
        lower=scale.lower,
        upper=scale.upper,
        known_value=known_value(sums, name),
    )


def known_value(sums: ClusterSums, name: str) -> float | None:
    """What the quantity is by construction, where a model was compared with itself."""
    return value_of_itself(name) if sums.one_model else None


def perplexities(sums: ClusterSums) -> dict[str, Number]:
    """exp of the mean negative log-probability, of both models, and their ratio."""
    ways = {
        "policy": ("logp_policy", 0.0),
        "reference": ("logp_reference", 0.0),
        "ratio": ("log_ratio", None),
    }
    return {
        name: Number.of(
            _exponential(
                ratio_of_sums(
                    -sums[column],
                    sums["tokens"],
                    unit="nats",
                    lower=lower,
                    known_value=known_value(sums, column),
                )
            )
        )
        for name, (column, lower) in ways.items()
    }


def _exponential(estimate: Estimate) -> Estimate:
    return transformed(estimate, math.exp, math.exp, unit="none")


def probability_changes(sums: ClusterSums) -> dict[str, Number]:
    """The mean, and the root mean square, of p - q of the observed token."""
    square = mean_per_token(sums, "probability_change_squared")
    return {
        "mean": Number.of(mean_per_token(sums, "probability_change")),
        "rms": Number.of(
            transformed(square, math.sqrt, lambda value: 0.5 / math.sqrt(value), unit="probability")
        ),
    }


def estimator_records(sums: ClusterSums, names: tuple[str, ...]) -> dict[str, EstimatorRecord]:
    """What each sampled estimator says on these tokens, against the exact values of the same tokens."""
    records: dict[str, EstimatorRecord] = {}
    for name in names:
        if name not in sums:
            continue
        said = mean_per_token(sums, name)
        bias = mean_per_token(sums, f"{name} - exact")
        square = sums[f"({name} - exact)^2"].sum() / sums["tokens"].sum()
        records[name] = EstimatorRecord(
            value=said.value,
            unit=said.unit,
            standard_error=said.standard_error,
            ci95=said.ci95,
            warnings=said.warnings,
            bias=Number.of(bias),
            spread=float(np.sqrt(np.maximum(square - bias.value**2, 0.0))),
        )
    return records


def bins(sums: ClusterSums, kind: str) -> tuple[Bin, ...]:
    """The mean KL of each range of positions, or of reference confidence, that holds any token."""
    edges: tuple[float, ...] = (*POSITIONS, np.inf) if kind == "position" else (*CONFIDENCES, 1.0)
    whole = sums["kl_policy_reference"].sum()
    found: list[Bin] = []
    for place, (low, high) in enumerate(pairwise(edges)):
        if f"{kind} {place} tokens" not in sums:
            continue
        kl, tokens = sums[f"{kind} {place} kl"], sums[f"{kind} {place} tokens"]
        here = tokens > 0
        found.append(
            Bin(
                low=float(low),
                high=float(high),
                tokens=int(tokens.sum()),
                share_of_kl=share(kl.sum(), whole),
                kl_policy_reference=Number.of(
                    ratio_of_sums(
                        kl[here],
                        tokens[here],
                        unit="nats",
                        lower=0.0,
                        known_value=known_value(sums, "kl_policy_reference"),
                    )
                ),
            )
        )
    return tuple(found)


def share(part: float, whole: float) -> float:
    """``part / whole``; 0 of nothing is 0, and a share of something infinite is unknown."""
    if whole == 0:
        return 0.0
    return float(part / whole) if np.isfinite(whole) else float("nan")


def sequence_total(terms: SequenceTerms, clusters: Clusters, *, one_model: bool = False) -> SequenceTotal:
    """The KL between whole responses, by the combination of its two estimates that varies least."""
    total = controlled_total(
        terms.log_ratio,
        terms.exact,
        clusters.labels,
        unit="nats",
        known_value=0.0 if one_model else None,
    )
    return SequenceTotal(
        kl_policy_reference=Number.of(total.estimate),
        control_variate_weight=total.weight,
        monte_carlo=Number.of(total.monte_carlo),
        exact_terms=Number.of(total.exact_sum),
    )
