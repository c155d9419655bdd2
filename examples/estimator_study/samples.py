"""The estimators on sampled tokens: of a run of ``kleash measure`` (case e), with error bars."""

import math
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float64, Shaped

from estimator_study.enumeration import estimator_functions, exact_number
from estimator_study.results import EstimatorRow, StudyCase
from kleash.errors import OptionError
from kleash.records import Measurement, RunFolder
from kleash.uncertainty import clustered_mean, transformed

Floats = Float64[np.ndarray, "tokens"]

COLUMNS = ["prompt_id", "logp_policy", "logp_reference", "logp_sampled", "kl_policy_reference"]


def measured_case(folder: Path) -> StudyCase:
    """Every estimator on a measured run, against the exact KL at the same tokens; errors clustered by prompt.

    If the run read responses with known sampling log-probabilities, each token carries its importance
    weight, as in the measurement itself.

    Args:
        folder: a run folder of ``kleash measure``.

    Raises:
        RunFolderError: if the folder is no run, damaged or unfinished.
        OptionError: if no average over its tokens estimates KL(policy || reference).
    """
    measurement = Measurement.read(folder)
    if not measurement.estimators:
        raise OptionError(
            f"{folder} has no tokens that estimate a KL: {measurement.estimators_note}; "
            "study a run whose tokens were sampled from the policy"
        )
    parts = list(RunFolder(folder).token_parts(COLUMNS))
    prompts = np.concatenate([part["prompt_id"] for part in parts])
    logp, logq, logp_sampled, kl = (
        np.concatenate([part[name].astype(np.float64) for part in parts]) for name in COLUMNS[1:]
    )
    with np.errstate(invalid="ignore"):
        log_ratio = np.where(logp == logq, 0.0, logp - logq)
    is_weighted = measurement.job.get("responses") is not None and bool(np.isfinite(logp_sampled).all())
    weights = np.exp(logp - logp_sampled) if is_weighted else np.ones(len(log_ratio))
    policy, reference = (measurement.models[role].path for role in ("policy", "reference"))
    exact = sampled_exact_row(kl, prompts)
    return StudyCase(
        name="run",
        title=f"Measured: {policy} against {reference}",
        sample=f"one of {len(log_ratio)} tokens of {measurement.counts.sequences} responses; {measurement.estimand}",
        kl=exact.value,
        rows=(*sampled_rows(log_ratio, kl, prompts, weights), exact),
        notes=(
            f"the control variate has a = {control_weight(log_ratio, kl, weights):.3f}, fitted on the same tokens",
            "a run stores no whole distributions, so the gradient is unknown",
        ),
    )


def sampled_rows(
    log_ratio: Floats, kl: Floats, clusters: Shaped[np.ndarray, "tokens"], weights: Floats
) -> tuple[EstimatorRow, ...]:
    """Every estimator on sampled tokens, against the exact KL at the same positions.

    Args:
        log_ratio: log p - log q of each sampled token.
        kl: KL(p || q) between the two whole distributions at the token's position.
        clusters: a label per token; errors treat tokens of one label as dependent.
        weights: importance weights, p over the distribution that the token was sampled from.
    """
    u = torch.from_numpy(log_ratio)
    weight = control_weight(log_ratio, kl, weights)
    with torch.no_grad():
        estimates = {
            name: weights * function(u).numpy() for name, function in estimator_functions(weight).items()
        }
    return tuple(_sampled_row(name, values, kl, clusters) for name, values in estimates.items())


def control_weight(log_ratio: Floats, kl: Floats, weights: Floats) -> float:
    """The a that minimises the squared error of the weighted ``u + a (w - 1)``; 0 where w is 1 everywhere."""
    change = weights * np.expm1(-log_ratio)
    moment = float(change @ change)
    return -float((weights * log_ratio - kl) @ change) / moment if moment > 0 else 0.0


def sampled_exact_row(kl: Floats, clusters: Shaped[np.ndarray, "tokens"]) -> EstimatorRow:
    """The exact KL averaged over sampled positions: its error comes from the choice of prefixes alone."""
    return EstimatorRow(
        name="exact",
        value=clustered_mean(kl, clusters, lower=0.0),
        bias=exact_number(0.0),
        standard_deviation=exact_number(0.0),
        negative_share=exact_number(0.0, "probability"),
        gradient_error=None,
    )


def _sampled_row(
    name: str, values: Floats, kl: Floats, clusters: Shaped[np.ndarray, "tokens"]
) -> EstimatorRow:
    errors = values - kl
    bias = clustered_mean(errors, clusters)
    variance = clustered_mean((errors - bias.value) ** 2, clusters, lower=0.0)
    negative_share = clustered_mean(
        (values < 0).astype(np.float64), clusters, unit="probability", lower=0.0, upper=1.0
    )
    return EstimatorRow(
        name=name,
        value=clustered_mean(values, clusters),
        bias=bias,
        standard_deviation=transformed(
            variance, math.sqrt, lambda value: 0.5 / math.sqrt(value), unit="nats"
        ),
        negative_share=negative_share,
        gradient_error=None,
    )
