"""What a measurement lacks where one model is behind a server, or a file of base logits, with the reasons."""

import math
from collections.abc import Mapping
from dataclasses import replace

from kleash.jobs import MeasureJob
from kleash.store.statistics import STATISTICS
from kleash.uncertainty import Estimate

NEEDS_EXACT_KL = (
    "quantiles",
    "by_position",
    "by_confidence",
    "convergence",
    "worst_tokens",
    "worst_sequences",
    "prompts",
    "top_percent_share",
    "per_sequence",
)
"""Fields of a measurement that are made of the exact KL of each token."""
SECOND_MODEL = {"kl_policy_reference": "reference", "kl_reference_policy": "policy"}
"""The model whose smallest probabilities decide the upper bound of a KL."""


def with_reasons(numbers: Mapping[str, Estimate], job: MeasureJob) -> dict[str, Estimate]:
    """The numbers, with the reason as the only warning of an infinite upper bound.

    Args:
        numbers: by the names of ``ALL_STATISTICS``.
        job: of the run.
    """
    explained = dict(numbers)
    for direction, model in SECOND_MODEL.items():
        name = f"{direction}_upper"
        if name not in numbers or not math.isinf(numbers[name].value):
            continue
        if model == (job.endpoint_role or "reference"):
            reason = (
                f"the {model}'s server does not say how unlikely the tokens are that it does not list"
                if job.endpoint_role
                else "base logits do not say how unlikely the tokens are that are 16 nats or more below the likeliest"
            )
        else:
            reason = f"the {model} gives tokens a probability of 0 that the other model may not"
        explained[name] = replace(numbers[name], warnings=(f"no upper bound: {reason}",))
    return explained


def reasons_left_out(unknown_columns: Mapping[str, str]) -> dict[str, str]:
    """The reason for everything that a run without the exact KL leaves out, by the name of the number or field.

    Args:
        unknown_columns: of the engine, each with its reason.
    """
    reasons: dict[str, str] = {}
    for name, statistic in STATISTICS.items():
        missing = [column for column in statistic.columns if column in unknown_columns]
        if missing:
            reasons[name] = unknown_columns[missing[0]]
    reason = unknown_columns["kl_policy_reference"]
    reasons |= dict.fromkeys(NEEDS_EXACT_KL, f"made of the exact KL of each token; {reason}")
    return reasons
