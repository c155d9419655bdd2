"""What really drawn tokens say: the same rows as by enumeration, with error bars."""

import math

import numpy as np
import torch
from jaxtyping import Float64, Shaped

from kleash.auditing.study.candidates import candidates
from kleash.auditing.study.worlds import known
from kleash.records import Number
from kleash.records.study import EstimatorRow
from kleash.uncertainty import clustered_mean, transformed

Floats = Float64[np.ndarray, "tokens"]


def rows_from(
    log_ratio: Floats, exact: Floats, clusters: Shaped[np.ndarray, "tokens"], weights: Floats
) -> tuple[EstimatorRow, ...]:
    """Every estimator on drawn tokens, against the exact KL at the same positions.

    Args:
        log_ratio: log p - log q of each drawn token.
        exact: KL(p || q) between the two whole distributions it was drawn at.
        clusters: a label per token: those with the same one belong together.
        weights: p over the distribution that the token was really drawn from.
    """
    u = torch.from_numpy(log_ratio)
    weight = control_weight(log_ratio, exact, weights)
    with torch.no_grad():
        estimates = {name: weights * of(u).numpy() for name, of in candidates(weight).items()}
    return tuple(_row(name, values, exact, clusters) for name, values in estimates.items())


def control_weight(log_ratio: Floats, exact: Floats, weights: Floats) -> float:
    """The a for which ``u + a (w - 1)``, weighted, misses the exact KL by least; 0 where w never differs from 1."""
    change = weights * np.expm1(-log_ratio)
    moment = float(change @ change)
    return -float((weights * log_ratio - exact) @ change) / moment if moment > 0 else 0.0


def exact_row_from(exact: Floats, clusters: Shaped[np.ndarray, "tokens"]) -> EstimatorRow:
    """The exact KL at the same positions: it varies between prefixes, and at none of them."""
    return EstimatorRow(
        name="exact",
        value=Number.of(clustered_mean(exact, clusters, lower=0.0)),
        bias=known(0.0),
        spread=known(0.0),
        negative=known(0.0, "probability"),
        gradient_error=None,
    )


def _row(name: str, values: Floats, exact: Floats, clusters: Shaped[np.ndarray, "tokens"]) -> EstimatorRow:
    missed = values - exact
    bias = clustered_mean(missed, clusters)
    square = clustered_mean((missed - bias.value) ** 2, clusters, lower=0.0)
    negative = clustered_mean(
        (values < 0).astype(np.float64), clusters, unit="probability", lower=0.0, upper=1.0
    )
    return EstimatorRow(
        name=name,
        value=Number.of(clustered_mean(values, clusters)),
        bias=Number.of(bias),
        spread=Number.of(transformed(square, math.sqrt, lambda value: 0.5 / math.sqrt(value), unit="nats")),
        negative=Number.of(negative),
        gradient_error=None,
    )
