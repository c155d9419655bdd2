"""The decision of a gate: its cases, and by simulation how often it passes a quantity that equals the limit."""

import math
import runpy
from typing import Any

import numpy as np
import pytest

from kleash.uncertainty import ratio_of_sums
from kleash.uncertainty.gate_decision import decide_gate

MAX_FALSE_PASSES = 0.029


def decided(value: float, low: float, high: float, **changes: Any) -> tuple[str, int | None]:
    settings = {"at_most": 1.0, "noise_floor": 0.0, "clusters": 100, "tokens": 1000} | changes
    return decide_gate(value, (low, high), **settings)


@pytest.mark.parametrize(
    ("numbers", "changes", "verdict"),
    [
        ((0.5, 0.4, 1.0), {}, "passed"),  # a limit may be reached
        ((0.5, 0.4, 0.99), {"noise_floor": 0.02}, "undecided"),
        ((0.5, 0.4, 1.01), {}, "undecided"),
        ((1.5, 1.01, 1.9), {}, "failed"),
        ((1.5, 1.0, 1.9), {}, "undecided"),
        ((1.5, 1.01, 1.9), {"noise_floor": 0.02}, "undecided"),
        ((0.5, 0.4, 0.6), {"clusters": 29}, "undecided"),  # never passed below 30 clusters
        ((0.5, 0.4, 0.6), {"clusters": 30}, "passed"),
        ((1.5, 1.4, 1.6), {"clusters": 3}, "failed"),
        ((0.0, 0.0, 0.0), {"at_most": 0.0}, "passed"),  # a model against itself
        ((math.inf, math.nan, math.nan), {}, "failed"),
        ((math.nan, math.nan, math.nan), {}, "undecided"),
        ((0.5, 0.4, 0.6), {"noise_floor": math.nan}, "undecided"),
        ((0.5, -math.inf, math.inf), {}, "undecided"),
    ],
)
def test_the_interval_and_the_noise_floor_decide(numbers, changes, verdict):
    assert decided(*numbers, **changes)[0] == verdict


@pytest.mark.parametrize(
    ("numbers", "changes", "more_tokens"),
    [
        ((0.5, 0.4, 1.5), {}, 3000),  # the upper half must halve: four times as many tokens
        ((1.5, 0.5, 1.6), {}, 3000),
        ((0.5, 0.4, 1.0), {"noise_floor": 0.25}, 3000),
        ((0.5, 0.4, 0.6), {"clusters": 10}, 2000),  # only clusters are missing
        ((math.nan, 0.4, 0.6), {"clusters": 10}, 2000),  # of bounds
        ((0.5, 0.4, 1.5), {"clusters": 10}, 3000),
        ((0.5, -math.inf, math.inf), {"clusters": 1}, None),  # nothing is known about other clusters
        ((0.0, 0.0, math.inf), {"clusters": 10}, None),  # all of few clusters are equal
        ((0.0, 0.0, 0.0), {"clusters": 10}, 2000),  # exactly 0
        ((0.5, 0.5, math.inf), {}, None),  # all clusters are equal
        ((1.01, 0.9, 1.2), {"noise_floor": 0.02}, None),  # no number of tokens sees below the noise floor
        ((1.0, 0.9, 1.1), {}, None),
        ((math.nan, math.nan, math.nan), {}, None),
        ((math.nan, math.nan, math.nan), {"clusters": 0, "tokens": 0}, None),
        ((1 + 1e-12, 0.5, 1.5), {"tokens": 10**9}, None),  # more than 64 bits
        ((0.5, 0.4, 0.6), {}, None),  # decided
    ],
)
def test_an_undecided_gate_says_how_many_tokens_would_decide(numbers, changes, more_tokens):
    assert decided(*numbers, **changes)[1] == more_tokens


def test_as_many_more_tokens_do_decide():
    draw = np.random.default_rng(3)
    small = ratio_of_sums(draw.exponential(0.9, 60), np.ones(60), lower=0.0)
    verdict, more_tokens = decided(small.value, *small.ci95, clusters=60, tokens=60)
    assert verdict == "undecided" and more_tokens is not None
    count = 60 + more_tokens
    verdicts = []
    for _ in range(20):
        large = ratio_of_sums(draw.exponential(small.value, count), np.ones(count), lower=0.0)
        verdicts.append(decided(large.value, *large.ci95, clusters=count, tokens=count)[0])
    assert verdicts.count("undecided") < 15, "the interval of so many should end near the limit"


@pytest.mark.parametrize(("process", "clusters"), [("normal", 30), ("lognormal", 30), ("lognormal", 64)])
def test_a_kl_at_the_limit_rarely_passes(process, clusters, root):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "benchmarks")
        benchmark = runpy.run_path(str(root / "benchmarks" / "gates.py"))
    row = benchmark["cell"](process, clusters, 1.0, 2000, seed=5)
    assert row["passed"] < MAX_FALSE_PASSES + 2 * math.sqrt(MAX_FALSE_PASSES / 2000)
    assert row["passed"] > 0.005, "a gate that never passes is no gate"
    assert row["undecided"] > 0.9
