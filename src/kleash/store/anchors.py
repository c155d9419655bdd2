"""Published KL divergences of known changes of a model, to compare the size of a measured one with."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kleash.store.measurement import Measurement
from kleash.store.statistics import label_of


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """The KL of a known change of a model, as its source reports it."""

    change: str
    """The model and what was done to it."""
    nats: float
    per: Literal["token", "response", "first token"] = "token"
    statistic: str
    """Its direction, as the name of a statistic: "kl_policy_reference" is averaged over the policy."""
    source: Literal["text", "prompts", "responses", "rollouts"]
    """Whose prefixes: a text's, the policy's own responses to prompts, given responses, or an engine's."""
    data: str
    """What was read, and what limits the figure."""
    origin: str
    """The page, or the command of this repository, that the figure is from."""


_QUANTISED = partial(
    Anchor,
    statistic="kl_reference_policy",
    source="text",
    data="llama.cpp f364eb6f, Wikitext-2 test; logits of the base in 16 bits, alone .00055 with Llama 3 8B",
    origin="https://github.com/ikawrakow/ik_llama.cpp/blob/18b4e0ec/examples/perplexity/README.md",
)
_ROUNDED = partial(
    Anchor,
    statistic="kl_policy_reference",
    source="prompts",
    data="shipped:prompts; a tiny model, rounded to nearest with a scale for 32 weights",
    origin="benchmarks/rounded_weights.py",
)
_TUNED = partial(
    Anchor,
    statistic="kl_policy_reference",
    source="responses",
    data="108 chosen responses of UltraFeedback, mean of the responses' means; medians .16 to .20; bfloat16",
    origin="https://github.com/rsoumyadeep/AlignLab-posttraining/blob/e6bf65d0/docs/phase5/e22_reference_and_kl.json",
)
_SELECTED = partial(
    Anchor,
    per="response",
    statistic="kl_policy_reference",
    source="prompts",
    data="upper bound, whatever the model and the reward",
    origin="kleash.leash.best_of_n_bound",
)
_TRAINED = partial(Anchor, per="response", statistic="kl_policy_reference", source="prompts")
_TRL_RUN = partial(
    _TRAINED,
    data="one logged batch; the part of the thread that was read does not name the model",
    origin="https://github.com/hongbo-miao/hongbomiao.com/pull/37684",
)
_ABLITERATED = partial(
    Anchor,
    per="first token",
    statistic="kl_reference_policy",
    source="prompts",
    data="the first token of answers to harmless prompts",
    origin="https://github.com/p-e-w/heretic/blob/20b7bf78/README.md",
)

ANCHORS = (
    _QUANTISED(change="Llama 2 7B in Q8_0", nats=0.000369),
    _QUANTISED(change="Llama 3 8B in Q8_0", nats=0.001355),
    _QUANTISED(change="Llama 2 7B in Q6_K", nats=0.002098),
    _QUANTISED(change="Llama 3 8B in Q6_K", nats=0.005452),
    _QUANTISED(change="Llama 2 7B in Q4_K_M", nats=0.012686),
    _QUANTISED(change="Llama 3 8B in Q4_K_M", nats=0.031273),
    _QUANTISED(change="Llama 3 8B in Q3_K_M", nats=0.101913),
    _QUANTISED(change="Llama 2 7B in Q2_K", nats=0.108903),
    _QUANTISED(change="Llama 3 8B in Q2_K", nats=0.445132),
    _ROUNDED(change="the shipped reference of 2 million weights in 8 bits", nats=0.000084),
    _ROUNDED(change="the shipped reference of 2 million weights in 6 bits", nats=0.001463),
    _ROUNDED(change="the shipped reference of 2 million weights in 4 bits", nats=0.030173),
    _ROUNDED(change="the shipped reference of 2 million weights in 3 bits", nats=0.177320),
    _TUNED(change="Qwen2.5-1.5B after SFT on no_robots by a QLoRA of rank 16", nats=0.556376),
    _TUNED(change="Qwen2.5-1.5B after SFT on no_robots by a LoRA of rank 16", nats=0.623336),
    _TUNED(change="Qwen2.5-1.5B after SFT on no_robots of all weights", nats=0.654694),
    _SELECTED(change="the best of 4 responses", nats=0.636294),
    _SELECTED(change="the best of 64 responses", nats=3.174508),
    _TRAINED(
        change="GPT-2 124M after PPO on human preferences of style",
        nats=6.0,
        data="the target of its controller; continuations of 24 tokens",
        origin="https://github.com/openai/lm-human-preferences/blob/1ab856db/launch.py",
    ),
    _TRL_RUN(change="PPO in TRL, episode 96", nats=6.809290),
    _TRL_RUN(change="PPO in TRL, episode 960", nats=11.143322),
    _ABLITERATED(change="gemma-3-12b-it abliterated by heretic", nats=0.16),
    _ABLITERATED(change="gemma-3-12b-it abliterated by huihui-ai", nats=0.45),
    _ABLITERATED(change="gemma-3-12b-it abliterated by mlabonne (v2)", nats=1.04),
    Anchor(
        change="gpt-oss-120b, sampler against trainer at the first step",
        nats=0.05,
        statistic="kl_engine_trainer",
        source="rollouts",
        data="a user's report; .1 after 20 steps, responses of 2 000 tokens",
        origin="https://github.com/thinking-machines-lab/tinker-feedback/issues/22",
    ),
)
"""Figures of sources that were opened, those of a unit, direction and kind of prefixes in rising order."""


def scale_sentence(measurement: Measurement) -> str:
    """The nearest anchors below and above the KL of a measurement; empty without a KL or anchors of its kind.

    Only anchors per token, of one direction and the measurement's kind of source, are compared.
    """
    kind = measurement.source_kind
    anchors = [anchor for anchor in ANCHORS if anchor.per == "token" and anchor.source == kind]
    number = measurement.per_token.get(anchors[0].statistic)
    if number is None or math.isnan(number.value):
        return ""
    value = number.value
    sides = (
        ("above", [anchor for anchor in anchors if anchor.nats <= value][-1:]),
        ("below", [anchor for anchor in anchors if anchor.nats > value][:1]),
    )
    nearest = [
        f"{side} {anchor.nats:.3g} ({anchor.change})"
        for side, anchors_there in sides
        for anchor in anchors_there
    ]
    return f"{label_of(anchors[0].statistic)} per token is {' and '.join(nearest)}; sources: docs/explanation/kl.md"
