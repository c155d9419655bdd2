"""The hacking monitor is silent on healthy runs, and raises each alert once its condition holds."""

import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from histories import bent, healthy
from hypothesis import given
from hypothesis import strategies as st

from kleash.records import StepRecord
from kleash.training.hacking_monitor import HackingMonitor, distinct, repetition

MONITOR = HackingMonitor(target_nats=6.0)
Metrics = Mapping[str, float]


def said(history: list[StepRecord], monitor: HackingMonitor = MONITOR) -> list[tuple[int, str]]:
    """Step and kind of all that is said as a run goes on."""
    seen: list[StepRecord] = []
    for record in history:
        seen.append(record)
        seen[-1] = replace(record, alerts=monitor.check(seen))
    return [(record.step, alert.kind) for record in seen for alert in record.alerts]


def recorded(name: str) -> list[StepRecord]:
    lines = (Path(__file__).parent / "recorded" / f"{name}.jsonl").read_text().splitlines()
    return [StepRecord(step=at, metrics=json.loads(line)) for at, line in enumerate(lines, 1)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("target", [6.0, None])
def test_healthy_run_raises_no_alert(seed: int, target: float | None) -> None:
    history = healthy(seed=seed, target=target)
    assert said(history, HackingMonitor(target_nats=target)) == []


def test_recorded_run_with_good_beta_raises_no_alert() -> None:
    assert said(recorded("good"), HackingMonitor()) == []


def test_recorded_run_with_beta_0_raises_its_alerts_during_the_collapse() -> None:
    first = {kind: step for step, kind in reversed(said(recorded("off"), HackingMonitor()))}
    assert set(first) == {"runaway", "repetition"}  # the entropy falls, and the reward that is hacked rises
    assert first["runaway"] == 10  # the first step at which ten are there
    assert first["repetition"] <= 13


CASES: dict[str, Callable[[int, Metrics], Metrics]] = {
    "far_from_target": lambda at, now: {"kl/exact_per_sequence": 6.0 + 1.5 * at},
    "runaway": lambda at, now: {
        "reward/score": now["reward/score"] + 0.6 * at,
        "kl/exact_per_token": 0.1 * 1.3**at,
        "kl/exact_per_sequence": 6.4 * 1.3**at,
    },
    "entropy_collapse": lambda at, now: {"policy/entropy": 2.0 * 0.7**at, "reward/score": 0.4},
    "repetition": lambda at, now: {"response/repetition": min(0.9, 0.05 * at)},
    "heavy_tail": lambda at, now: {"kl/top_percent_share": 0.6, "kl/max_token": 9.0},
}


@pytest.mark.parametrize("kind", CASES)
def test_each_kind_of_hacking_raises_its_alert(kind: str) -> None:
    target = 6.0 if kind == "far_from_target" else None
    history = bent(healthy(60), 40, CASES[kind])
    steps = [step for step, found in said(history, HackingMonitor(target_nats=target)) if found == kind]
    assert steps and 40 < steps[0] <= 56


@pytest.mark.parametrize("kind", CASES)
def test_each_kind_of_hacking_raises_no_other_alert(kind: str) -> None:
    target = 6.0 if kind == "far_from_target" else None
    assert {
        found for _, found in said(bent(healthy(60), 40, CASES[kind]), HackingMonitor(target_nats=target))
    } == {kind}


@pytest.mark.parametrize(("reward", "alerts"), [(0.9, 0), (0.32, 1), (0.1, 1), (None, 1)])
def test_entropy_that_falls_is_an_alert_unless_the_reward_rises(reward: float | None, alerts: int) -> None:
    """A task with one right answer: a policy that gives it at last has no entropy, and is right."""
    history = [
        StepRecord(
            step=at,
            metrics={
                "policy/entropy": 2.0 * 0.85**at,
                **(
                    {}
                    if reward is None
                    else {"reward/score": 0.3 if at < 9 else reward, "reward/score_error": 0.05}
                ),
            },
        )
        for at in range(1, 16)
    ]
    steps = [step for step, kind in said(history, HackingMonitor()) if kind == "entropy_collapse"]
    assert len(steps) == alerts and all(9 <= step <= 12 for step in steps)


def test_identical_responses_raise_repetition() -> None:
    history = bent(healthy(60), 40, lambda at, now: {"response/distinct": 0.1})
    assert [kind for _, kind in said(history)] == ["repetition", "repetition"]


def test_similar_responses_from_the_first_step_raise_no_alert() -> None:
    history = bent(healthy(60), 0, lambda at, now: {"response/distinct": 0.1, "response/repetition": 0.4})
    assert said(history) == []


def test_alert_sentence_states_kl_target_and_steps() -> None:
    history = bent(healthy(43), 40, lambda at, now: {"kl/exact_per_sequence": 15.0})
    (alert,) = MONITOR.check(history)
    assert alert.sentence == (
        "KL(policy ‖ reference) is 15 nats per sequence over the last 3 steps, 2.5 times its target of 6: "
        "beta does not keep it near its target"
    )


def test_target_per_token_is_compared_with_kl_per_token() -> None:
    history = bent(healthy(60), 40, lambda at, now: {"kl/exact_per_token": 0.5})
    monitor = HackingMonitor(target_nats=0.2, target_per="token")
    assert (43, "far_from_target") in said(history, monitor)
    assert said(history, HackingMonitor(target_nats=0.2 * 64, target_per="sequence")) == []


def test_single_bad_step_raises_no_alert() -> None:
    def spike(at: int, now: Metrics) -> Metrics:
        return (
            {"kl/exact_per_sequence": 13.5, "policy/entropy": 1.0, "response/repetition": 0.5}
            if at == 1
            else {}
        )

    assert said(bent(healthy(60), 40, spike)) == []


def test_alert_repeats_after_eleven_steps_at_the_earliest() -> None:
    history = bent(healthy(70), 40, lambda at, now: {"kl/exact_per_sequence": 30.0})
    steps = [step for step, _ in said(history)]
    assert steps[0] == 41  # the mean of three steps is over twice the target at once
    assert [later - earlier for earlier, later in itertools.pairwise(steps)] == [11, 11]


def test_growing_kl_below_target_is_not_runaway() -> None:
    def grow(at: int, now: Metrics) -> Metrics:
        kl = 0.1 * 1.2**at
        return {"kl/exact_per_token": kl, "kl/exact_per_sequence": 64 * kl, "reward/score": 3 + 0.6 * at}

    history = bent(healthy(52, target=None), 40, grow)
    assert [kind for _, kind in said(history, HackingMonitor(target_nats=100.0))] == []
    assert [kind for _, kind in said(history, HackingMonitor())] == ["runaway"]


def test_growing_kl_without_rising_reward_is_not_runaway() -> None:
    history = bent(healthy(60, target=None), 40, lambda at, now: {"kl/exact_per_token": 0.1 * 1.2**at})
    assert said(history, HackingMonitor()) == []


def test_constant_kl_is_not_runaway() -> None:
    def climb(at: int, now: Metrics) -> Metrics:
        return {"kl/exact_per_token": 1.0, "kl/exact_per_sequence": 64.0, "reward/score": 3 + 0.6 * at}

    history = bent(healthy(60, target=None), 0, climb)
    assert said(history, HackingMonitor()) == []


def test_uneven_kl_without_extreme_token_is_no_heavy_tail() -> None:
    uneven = bent(
        healthy(60), 0, lambda at, now: {"kl/top_percent_share": 0.9}
    )  # as of a policy that just began
    assert said(uneven) == []
    far = bent(healthy(60), 0, lambda at, now: {"kl/max_token": 9.0})
    assert said(far) == []


def test_missing_metric_raises_no_alert() -> None:
    history = bent(healthy(44), 40, lambda at, now: {"kl/exact_per_sequence": 30.0})
    holes = [
        replace(record, metrics={name: x for name, x in record.metrics.items() if "sequence" not in name})
        if record.step % 2
        else record
        for record in history
    ]
    assert said(history) and said(holes) == []


def test_absent_metrics_raise_no_alert() -> None:
    bare = [StepRecord(step=at, metrics={"pairs/accuracy": 0.5}) for at in range(1, 30)]
    assert said(bare) == []
    nothing = [
        StepRecord(step=at, metrics=dict.fromkeys(healthy(1)[0].metrics, math.nan)) for at in range(1, 30)
    ]
    assert said(nothing) == []


def test_repetition_is_share_of_repeated_trigrams() -> None:
    assert repetition(["a b c d e"]) == 0
    assert repetition(["a a a a a a"]) == 0.75  # four runs, one of them new
    assert repetition(["a b c a b c", "a b c"]) == pytest.approx(
        1 / 5
    )  # between responses nothing is repeated
    assert repetition(["a b", ""]) == 0  # as short as the answer to a sum


def test_distinct_is_low_for_similar_responses() -> None:
    assert distinct(["a b c d", "e f g h"]) == 1
    assert distinct(["a b c d"] * 4) == 0.25
    assert distinct([]) == distinct(["42", "42"]) == 1


def test_text_without_spaces_is_split_into_characters() -> None:
    assert repetition(["啊" * 60]) > 0.9
    assert distinct(["天地玄黃宇宙洪荒日月盈昃辰宿列張寒來暑往秋收冬藏閏餘成歲律呂調陽雲騰致雨露"]) == 1


@given(st.lists(st.text(), max_size=6))
def test_repetition_and_distinct_are_between_0_and_1(responses: list[str]) -> None:
    for share in (repetition(responses), distinct(responses)):
        assert 0 <= share <= 1
