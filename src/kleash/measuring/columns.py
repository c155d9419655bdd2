"""From a shard's token columns to the quantities whose means are reported."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kleash.estimators import ESTIMATORS, importance_weights
from kleash.measuring.sequence_clusters import Floats

PER_TOKEN = (
    "kl_policy_reference",
    "kl_reference_policy",
    "jensen_shannon",
    "total_variation",
    "entropy_policy",
    "entropy_reference",
    "logp_policy",
    "logp_reference",
)
"""Columns of ``tokens/`` whose mean per token is reported under their own name."""

READ = ["prompt_id", "sample_id", "position", *PER_TOKEN, "logp_sampled", "top1_policy", "top1_reference"]
READ += ["top1_probability_reference"]
"""The columns of ``tokens/`` that a measurement is made from."""

POSITIONS = (0, 1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
CONFIDENCES = (0.0, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, kw_only=True)
class Quantities:
    """What is averaged, for the tokens of one shard."""

    columns: Mapping[str, Floats]
    """Name to one number per token."""
    position_bin: NDArray[np.int64]
    confidence_bin: NDArray[np.int64]


def quantities(part: Mapping[str, NDArray[np.generic]], weighting: str | None) -> Quantities:
    """The quantities of a shard's tokens, in float64.

    Args:
        part: the columns ``READ``.
        weighting: how sampled estimators are averaged: "none" where the policy drew the tokens,
            "importance" where another distribution did and ``logp_sampled`` says with which
            probability, None where no average of theirs estimates KL(policy || reference).
    """
    columns: dict[str, Floats] = {name: _float64(part[name]) for name in PER_TOKEN}
    exact, logp, logq = (columns[name] for name in ("kl_policy_reference", "logp_policy", "logp_reference"))
    change = np.exp(logp) - np.exp(logq)
    columns["top1_agreement"] = (part["top1_policy"] == part["top1_reference"]).astype(np.float64)
    columns["probability_change"] = change
    columns["probability_change_squared"] = change**2
    columns["log_ratio"] = log_ratio(logp, logq)
    if weighting is not None:
        weights = weights_of(part, weighting, level="token")
        log_ratios = torch.from_numpy(columns["log_ratio"])
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # numbers that are not finite are named among the warnings
            for name, estimator in ESTIMATORS.items():
                columns[name] = weights * estimator.of(log_ratios).numpy()
                columns[f"{name} - exact"] = columns[name] - exact
                columns[f"({name} - exact)^2"] = columns[f"{name} - exact"] ** 2
    return Quantities(
        columns=columns,
        position_bin=np.searchsorted(POSITIONS, part["position"], side="right") - 1,
        confidence_bin=np.searchsorted(CONFIDENCES, part["top1_probability_reference"], side="right") - 1,
    )


def log_ratio(logp: Floats, logq: Floats) -> Floats:
    """log p - log q of the observed tokens; 0 where both models rule the token out."""
    with np.errstate(invalid="ignore"):
        return np.where(logp == logq, 0.0, logp - logq)


def weights_of(
    part: Mapping[str, NDArray[np.generic]], weighting: str, *, level: Literal["token", "prefix"]
) -> Floats:
    """p over the distribution really drawn from: of each token, or of the response up to and with it.

    Args:
        part: columns of tokens; for level "prefix" those of one sequence.
        weighting: "none", which is 1 everywhere, or "importance".
        level: "token" or "prefix".
    """
    logp = torch.from_numpy(_float64(part["logp_policy"]))[None]
    if weighting == "none":
        return np.ones(logp.shape[1])
    sampled = torch.from_numpy(_float64(part["logp_sampled"]))[None]
    mask = torch.ones_like(logp, dtype=torch.bool)
    return importance_weights(logp, sampled, mask, level=level).values[0].numpy()


def _float64(values: NDArray[np.generic]) -> Floats:
    return values.astype(np.float64)
