"""Published KL divergences of known changes of a model, to compare the size of a measured one with."""

import math
from collections.abc import Mapping
from types import MappingProxyType

from kleash.store.measurement import Measurement
from kleash.store.statistics import label_of

ANCHORS: Mapping[str, tuple[str, Mapping[str, float]]] = MappingProxyType(
    {
        "text": (
            "kl_reference_policy",
            {
                "Llama 2 7B in Q8_0": 0.000369,
                "Llama 3 8B in Q8_0": 0.001355,
                "Llama 2 7B in Q6_K": 0.002098,
                "Llama 3 8B in Q6_K": 0.005452,
                "Llama 2 7B in Q4_K_M": 0.012686,
                "Llama 3 8B in Q4_K_M": 0.031273,
                "Llama 3 8B in Q3_K_M": 0.101913,
                "Llama 2 7B in Q2_K": 0.108903,
                "Llama 3 8B in Q2_K": 0.445132,
            },
        ),
        "prompts": (
            "kl_policy_reference",
            {
                "the shipped reference of 2 million weights in 8 bits": 0.000084,
                "the shipped reference of 2 million weights in 6 bits": 0.001463,
                "the shipped reference of 2 million weights in 4 bits": 0.030173,
                "the shipped reference of 2 million weights in 3 bits": 0.177320,
            },
        ),
        "responses": (
            "kl_policy_reference",
            {
                "Qwen2.5-1.5B after SFT on no_robots by a QLoRA of rank 16": 0.556376,
                "Qwen2.5-1.5B after SFT on no_robots by a LoRA of rank 16": 0.623336,
                "Qwen2.5-1.5B after SFT on no_robots of all weights": 0.654694,
            },
        ),
    }
)
"""Kind of source -> the statistic, and change of a model -> its size in nats per token, in rising order: over a text,
the policy's own responses, or given ones; docs/explanation/kl.md has where they are from."""


def scale_sentence(measurement: Measurement) -> str:
    """The nearest anchors of its kind of source below and above the KL of a measurement; empty without that KL."""
    statistic, anchors = ANCHORS[measurement.source_kind]
    number = measurement.per_token.get(statistic)
    if number is None or math.isnan(number.value):
        return ""
    below = [f"above {nats:.3g} ({change})" for change, nats in anchors.items() if nats <= number.value]
    above = [f"below {nats:.3g} ({change})" for change, nats in anchors.items() if nats > number.value]
    nearest = " and ".join([*below[-1:], *above[:1]])
    return f"{label_of(statistic)} per token is {nearest}; sources: docs/explanation/kl.md"
