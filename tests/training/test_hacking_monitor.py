"""The hacking monitor is silent on healthy runs, and raises each alert once its condition holds."""

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from histories import bent, healthy

from kleash.records import StepRecord
from kleash.training.hacking_monitor import HackingMonitor, distinct, level, repetition

MONITOR = HackingMonitor(target_nats=6.0)
HEALTHY = bent(healthy(60), 0, lambda at, now: {"kl/max_prompt": 2 * now["kl/exact_per_sequence"] / 17 * 16})
BAD_STEP = {"kl/exact_per_sequence": 13.5, "policy/entropy": 1.0, "response/repetition": 0.5}
Metrics = Mapping[str, float]
Change = Callable[[int, Metrics], Metrics]


def played(history: list[StepRecord], monitor: HackingMonitor = MONITOR) -> list[StepRecord]:
    """The records with the alerts that are raised as a run goes on."""
    seen: list[StepRecord] = []
    for record in history:
        seen.append(record)
        seen[-1] = replace(record, alerts=monitor.check(seen))
    return seen


def said(history: list[StepRecord], monitor: HackingMonitor = MONITOR) -> list[tuple[int, str]]:
    """Step and kind of all that is said as a run goes on."""
    return [(record.step, alert.kind) for record in played(history, monitor) for alert in record.alerts]


def recorded(name: str) -> list[StepRecord]:
    lines = (Path(__file__).parent / "recorded" / f"{name}.jsonl").read_text().splitlines()
    return [StepRecord(step=at, metrics=json.loads(line)) for at, line in enumerate(lines, 1)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("target", [6.0, None])
def test_healthy_run_raises_no_alert(seed: int, target: float | None) -> None:
    assert said(healthy(seed=seed, target=target), HackingMonitor(target_nats=target)) == []


def test_recorded_run_raises_alerts_during_its_collapse_with_beta_0_and_none_with_a_good_beta() -> None:
    assert said(recorded("good"), HackingMonitor()) == []
    first = {kind: step for step, kind in reversed(said(recorded("off"), HackingMonitor()))}
    assert set(first) == {"runaway", "repetition"}  # the entropy falls, and the reward that is hacked rises
    assert first["runaway"] == 10 and first["repetition"] <= 13  # ten steps are needed


CASES: dict[str, tuple[Change, str]] = {
    "update_too_large": (lambda at, now: {"kl/update": 0.05, "policy/learning_rate": 3e-4},
        r"by 2.99 nats per sequence, 0.5 of the target of 6: .* divide --learning-rate by about 2 \(it is 0.0003\)"),
    "far_from_target": (lambda at, now: {"kl/exact_per_sequence": 6.0 + 1.5 * at, "beta": 0.2 * 1.05**at},
        r"times its target of 6: .* raise --beta, or --beta-max if a controller"),
    "below_target": (lambda at, now: {"kl/exact_per_sequence": 3.0, "beta": 0.2 * 1.1**at},
        r"0\.\d+ of its target of 6, and beta rose from .* compare --target-per"),
    "runaway": (lambda at, now: {"reward/score": now["reward/score"] + 0.6 * at,
        "kl/exact_per_token": 0.1 * 1.3**at, "kl/exact_per_sequence": 6.4 * 1.3**at},
        r"the reward rose by .* nats: .* set --target-nats with --controller pid, or raise --beta"),
    "held_out_fell": (lambda at, now: {"eval/reward": 3.0 - 0.1 * at, "eval/reward_error": 0.05} if at % 5 == 0 else {},
        r"is 2, and was 2.5 in step 45, its best: a fall by 7.1 standard errors .* take the checkpoint"),
    "no_signal": (lambda at, now: {"reward/zero_std_share": 0.98},
        r"98 % of the prompts .* \(mean reward .*more --samples-per-prompt"),
    "entropy_collapse": (lambda at, now: {"policy/entropy": 2.0 * 0.7**at, "reward/score": 0.4},
        r"entropy fell from 2.07 to 0.715 nats per token since .* did not rise .* lower --learning-rate"),
    "prompt_runaway": (lambda at, now: {"kl/max_prompt": 10 * now["kl/exact_per_sequence"]},
        r"25 times the mean of the others over the last 3 steps, and 2 times before: .* --prompts"),
    "repetition": (lambda at, now: {"response/repetition": min(0.9, 0.05 * at)},
        r"have occurred in it before, and 1 % had .* correct the --reward"),
    "repetition of one response": (lambda at, now: {"response/distinct": 0.1}, r"only 10 % of .*all alike"),
}  # fmt: skip
"""Kind -> what its metrics are after a step, and what the sentence says."""


@pytest.mark.parametrize("kind", CASES)
def test_each_fault_is_named_alone_with_its_number_and_what_to_change(kind: str) -> None:
    change, words = CASES[kind]
    target = 6.0 if "target" in kind or "update" in kind else None
    faulty, monitor = bent(HEALTHY, 40, change), HackingMonitor(target_nats=target)
    alerts = [(record.step, alert) for record in played(faulty, monitor) for alert in record.alerts]
    twice = [each for record in faulty for each in (record, replace(record, metrics={"loss": 0.1}))]
    assert said(twice, monitor) == said(faulty, monitor), "a step that draws no responses changes nothing"
    alone = [each for record in faulty for each in (record, replace(record, metrics={"reward/score": 0.4}))]
    assert not target or all(len(record.metrics) > 1 for record in played(alone, monitor) if record.alerts)
    assert {alert.kind for _, alert in alerts} == {kind.partition(" ")[0]}
    step, first = alerts[0]
    assert re.search(words, first.sentence), first.sentence
    assert 40 < step <= 56 and first.acts is (kind not in ("below_target", "no_signal"))


@pytest.mark.parametrize(("reward", "alerts"), [(0.9, 0), (0.3, 1), (0.1, 1), (None, 0)])
def test_entropy_that_falls_is_an_alert_unless_the_reward_rises(reward: float | None, alerts: int) -> None:
    """A task with one right answer: a policy that gives it at last has no entropy, and is right. Without rewards, as in
    distillation, nothing is known."""

    def fall(at: int, now: Metrics) -> Metrics:
        scores = {"reward/score": 0.3 if at < 21 else reward or 0.0, "reward/score_error": 0.05}
        return {"policy/entropy": 2.0 if at < 21 else 0.5, **({} if reward is None else scores)}

    blank = [StepRecord(step=at, metrics={}) for at in range(1, 36)]
    steps = [step for step, kind in said(bent(blank, 0, fall), HackingMonitor()) if "entropy" in kind]
    assert bool(steps) == bool(alerts) and all(21 < step <= 35 for step in steps)


@pytest.mark.parametrize(
    ("kind", "after", "change"),
    [
        ("update_too_large", 40, lambda at, now: {"kl/update": 0.05 if at % 3 else 0.01}),
        ("below_target", 40, lambda at, now: {"kl/exact_per_sequence": 3.0, "beta": 0.9**at}),
        ("below_target", 0, lambda at, now: {"beta": 1.08**at,
            "kl/exact_per_sequence": 0.05 * 1.08**at, "kl/exact_per_sequence_error": 0.001 * 1.08**at}),
        ("no_signal", 40, lambda at, now: {"reward/zero_std_share": 0.98, "reward/score_std": 0.1}),
        ("prompt_runaway", 0, lambda at, now: {
            "kl/max_prompt": (10 if at > 40 and at % 3 else 2) * now["kl/exact_per_sequence"]}),
        ("prompt_runaway", 0, lambda at, now: {"response/prompts": 4.0,
            "kl/max_prompt": (3.2 if at > 40 or at % 3 == 0 else 1.6) * now["kl/exact_per_sequence"]}),
        ("repetition", 0, lambda at, now: {"response/repetition": 0.9 if at % 7 == 5 else 0.02}),
        ("entropy_collapse", 0, lambda at, now: {"policy/entropy": 0.95**at, "reward/score_error": 5.0}),
        ("held_out_fell", 40, lambda at, now: {
            "eval/reward": 3.0 - 0.05 * at, "eval/reward_error": 0.3, "kl/exact_per_sequence": 6.0 + at}),
        ("far_from_target", 40, lambda at, now: {
            "kl/exact_per_sequence": 14.0, "kl/exact_per_sequence_error": 2.0, "beta": 2 * 1.1**at}),
        ("far_from_target", 0, lambda at, now: {"kl/exact_per_sequence": 13.5 if at > 57 else 6.0,
            "kl/exact_per_sequence_error": 0.2 if at > 57 else 3.0}),
    ],
)  # fmt: skip
def test_what_looks_like_a_fault_and_is_none(kind: str, after: int, change: Change) -> None:
    """Two of three steps; a controller that answers, or damps a growing KL; a solved task; what is within its error."""
    assert kind not in {found for _, found in said(bent(healthy(60), after, change))}


@pytest.mark.parametrize(
    ("kl", "trained", "earlier", "error", "prompts", "falls"),
    [
        *((2, 1, 9, 0.1, 64, True), (2, 1, 9, 0, 64, True), (2, 1, 1, 0.3, 500, True)),
        *((0.5, 1, 9, 0.1, 64, False), (0.5, 2, 9, 0.1, 64, True), (2, 1, 9, 0.3, 500, False)),
        *((2, 1, 9, 0.1, 4, False), (2, 1, 9, 0.01, 4, True), (2, 1, 9, 0, 4, False)),  # t of 3: 19.4 errors
    ],
)
def test_held_out_reward_that_falls_with_the_kl_and_the_training_reward_is_no_alert(
    kl: float, trained: float, earlier: int, error: float, prompts: float, falls: bool
) -> None:
    """A policy that overshot its target goes back, and pays for it; the paired error, 0 if all fall alike, counts, and
    how many evaluations the best was taken from: below one of nine 3.3 errors are luck, and 10 of four prompts."""

    def change(at: int, now: Metrics) -> Metrics:
        done = at >= 10
        metrics = {
            "kl/exact_per_sequence": kl if done else 1.0,
            "kl/exact_per_sequence_error": 0.01,
            "reward/score": trained if done else 2.0,
            "reward/score_error": 0.05,
            "eval/reward": 1.0 if done else 2.0,
            "eval/reward_error": 5.0,
            "eval/reward_change": -1.0 if done else 0.0,
            "eval/reward_change_error": error,
            "eval/prompts": prompts,
        }
        return {name: x for name, x in metrics.items() if not 10 <= at < 15 or "eval" not in name}

    history = bent([StepRecord(step=at, metrics={}) for at in range(10 - earlier, 16)], 0, change)
    alerts = [alert for record in played(history, HackingMonitor()) for alert in record.alerts]
    fell = [alert.sentence for alert in alerts if alert.kind == "held_out_fell"]
    assert bool(fell) is falls and all(("prompts alike" in sentence) is (error == 0) for sentence in fell)


def test_large_updates_silence_the_advice_of_a_larger_beta() -> None:
    far = bent(healthy(60), 40, lambda at, now: {"kl/exact_per_sequence": 30.0})
    both = bent(far, 40, lambda at, now: {"kl/update": 0.5})
    assert "far_from_target" in {kind for _, kind in said(far)}
    assert {kind for step, kind in said(both) if step > 42} == {"update_too_large"}


@pytest.mark.parametrize(("every", "kind"), [(1, "update_too_large"), (6, "far_from_target")])
def test_updates_whose_kl_is_not_measured_are_judged_by_the_rise_of_the_kl(every: int, kind: str) -> None:
    """From 0 to 5.5 and 20 nats, with errors of a tenth: √14 from the reference after 2 or 12 updates."""
    history = [
        StepRecord(step=5 + at, metrics={"kl/exact_per_sequence": kl, "kl/exact_per_sequence_error": kl / 10})
        for at, kl in ((0, 0.0), (every, 5.5), (2 * every, 20.0))
    ]
    (alert,) = HackingMonitor(target_nats=0.5).check(history)
    assert alert.kind == kind and ("of at least 3.5 nats per sequence" in alert.sentence) is (every == 1)
    assert not HackingMonitor(target_nats=0.5, steps=1).check(history[:1])


def test_error_of_a_level_is_that_of_the_mean() -> None:
    """Of the logged errors; without them, of the differences of successive steps, on average over many draws."""
    noise = np.random.default_rng(0).normal(size=(400, 5))
    logged = [StepRecord(step=at, metrics={"x": 1.0, "x_error": e}) for at, e in enumerate((3.0, 4.0), 1)]
    assert level(logged, "x") == (1.0, 2.5)
    squares = [
        level([StepRecord(step=at, metrics={"x": x}) for at, x in enumerate(row, 1)], "x").error ** 2
        for row in noise
    ]
    assert np.mean(squares) == pytest.approx(noise.mean(1).var(), rel=0.15)


def test_target_per_token_is_compared_with_kl_per_token() -> None:
    history = bent(healthy(60), 40, lambda at, now: {"kl/exact_per_token": 0.5})
    monitor = HackingMonitor(target_nats=0.2, target_per="token")
    assert (43, "far_from_target") in said(history, monitor)
    assert said(history, HackingMonitor(target_nats=0.2 * 64, target_per="sequence")) == []


@pytest.mark.parametrize("kind", ["far_from_target", "runaway", "prompt_runaway"])
def test_without_an_exact_kl_alerts_are_about_k3(kind: str) -> None:
    def by_k3(now: Metrics) -> Metrics:
        return {re.sub("exact(_per_token)?", "k3", name): x for name, x in now.items() if "k3" not in name}

    faulty, monitor = bent(HEALTHY, 40, CASES[kind][0]), MONITOR if "target" in kind else HackingMonitor()
    sampled = [replace(one, metrics=by_k3(one.metrics)) for one in faulty]
    assert kind in {found for _, found in said(sampled, monitor)}


def test_alert_repeats_after_eleven_steps_at_the_earliest() -> None:
    history = bent(healthy(70), 40, lambda at, now: {"kl/exact_per_sequence": 30.0})
    steps = [step for step, _ in said(history)]
    assert steps[0] == 41  # the mean of three steps is over twice the target at once
    assert [later - earlier for earlier, later in itertools.pairwise(steps)] == [11, 11]


@pytest.mark.parametrize(
    ("target", "after", "change"),
    [
        (6.0, 0, lambda at, now: {"response/distinct": 0.1, "response/repetition": 0.4}),
        (6.0, 40, lambda at, now: BAD_STEP if at == 1 else {}),
        (6.0, 0, lambda at, now: {"kl/exact_per_sequence": 1.0, "beta": 0.0}),
        (None, 40, lambda at, now: {"kl/exact_per_token": 0.1 * 1.2**at}),
        (1e3, 40, lambda at, now: {"kl/exact_per_token": 0.1 * 1.2**at, "reward/score": 3 + 0.6 * at}),
        (None, 0, lambda at, now: {"kl/exact_per_token": 1 + 0.05 * at, "reward/score": 3 + 0.6 * at}),
    ],
    ids=["alike at first", "one bad step", "beta of 0", "without reward", "below its target", "slow"],
)
def test_what_is_no_fault_raises_no_alert(target: float | None, after: int, change: Change) -> None:
    assert said(bent(healthy(60, target=target), after, change), HackingMonitor(target_nats=target)) == []


def test_missing_metrics_raise_no_alert() -> None:
    history = bent(healthy(44), 40, lambda at, now: {"kl/exact_per_sequence": 30.0})
    holes = [
        replace(each, metrics={k: x for k, x in each.metrics.items() if each.step % 2 or "sequence" not in k})
        for each in history
    ]
    bare = [replace(record, metrics={"pairs/accuracy": 0.5}) for record in history]
    nothing = [replace(record, metrics=dict.fromkeys(record.metrics, math.nan)) for record in history]
    assert said(history) and said(holes) == said(bare) == said(nothing) == []


def test_fallen_entropy_is_noticed_though_the_first_step_has_none() -> None:
    def fall(at: int, now: Metrics) -> Metrics:
        return {"policy/entropy": math.nan if at == 1 else 2.0 if at < 31 else 0.5, "reward/score": 0.4}

    assert (33, "entropy_collapse") in said(bent(healthy(40), 0, fall))


def test_repetition_and_distinct_are_shares_of_trigrams() -> None:
    assert repetition(["a b c d e"]) == 0
    assert repetition(["a a a a a a"]) == 0.75  # four runs, one of them new
    assert repetition(["a b c a b c", "a b c"]) == pytest.approx(1 / 5), "of each response alone"
    assert repetition(["a b", ""]) == 0  # as short as the answer to a sum
    assert distinct(["a b c d", "e f g h"]) == 1
    assert distinct(["a b c d"] * 4) == 0.25
    assert distinct([]) == distinct(["42", "42"]) == 1
    assert repetition(["啊" * 60]) > 0.9, "without spaces, of characters"
    assert distinct(["天地玄黃宇宙洪荒日月盈昃辰宿列張寒來暑往秋收冬藏閏餘成歲律呂調陽雲騰致雨露"]) == 1
