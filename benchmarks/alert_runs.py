"""How often the alerts of a training are right, on simulated runs: good ones, and some with a planted fault.

python benchmarks/alert_runs.py                      # the table of docs/reference/evidence.md: unseen seeds 100 to 119
python benchmarks/alert_runs.py --seeds 0 20         # seeds of the choice, like 5000 to 5799, 9000 to 9129

Three tasks, each with 8 to 128 responses a step and 40 to 200 steps. ``verifiable``: a binary reward rises while the
entropy falls, with a target KL. ``preference``: a reward grows with the root of the KL, which a controller brings to
its target. ``fixed``: either reward, with a constant beta and no target. Beta is moved by kleash's controllers in
closed loop. The metrics of a step are computed from drawn responses, so that their errors are as noisy as a
trainer's: binary or normal scores, lognormal KL and entropy, each with a part of the prompt; one response in 500 has
ten times its KL.

A plant begins at a random step and grows with every step by 1 to 10 standard errors of the step's metric (of its
logarithm for positive quantities without a bound). It *exceeds* at the first step at which the true value is beyond the
alert's bound (``BOUNDS``) by three of these errors, and is found if the alert of its kind comes within ten steps of
that; held-out rewards, measured every 5 or 10 steps, are also given two evaluations. Alerts of a good run (those of odd
seeds have no kl/update, as where responses are learned from once), and before a plant begins, are false.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
from harness import parser_of, write_result

from kleash.leash import DualBeta, FixedBeta, Leash, PIDBeta, ZieglerBeta
from kleash.store import StepRecord
from kleash.training import HackingMonitor

TASKS = ("verifiable", "preference", "fixed")
BOUNDS = {
    "update_too_large": "KL of an update, summed over a response, above a third of the target",
    "below_target": "KL below 0.8 of the target, while beta rises",
    "far_from_target": "KL above twice the target",
    "runaway": "KL per token above 0.5 nats and rising by a tenth a step with the reward, without a target",
    "held_out_fell": "held-out reward below its best",
    "no_signal": "more than half of the groups without signal, while the reward does not rise",
    "entropy_collapse": "entropy below half of what it was, while the reward does not rise",
    "prompt_runaway": "KL of the worst prompt above three times what it was beside the others",
    "repetition": "more than 30 % of the trigrams repeated",
    "alike": "less than 30 % of the trigrams distinct; its alert is repetition, too",
}
"""What is planted -> when it counts."""
WITH_TARGET = {"update_too_large", "below_target", "far_from_target"}
CONTROLLERS = (PIDBeta, DualBeta, ZieglerBeta)
DEADLINE, ERRORS = 10, 3.0
UPDATE_NOISE = 0.2
"""Standard deviation of the logarithm of kl/update."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run's task, sizes and levels of noise."""

    is_binary: bool
    target: float | None
    prompts: int
    samples: int
    steps: int
    length: float
    """Tokens of a response, mean."""
    middle: float
    """Step at which half is learned."""
    width: float
    """Steps in which most is learned, a quarter of them."""
    reward: tuple[float, float]
    """At first and in the end; of a preference, in standard deviations of a response."""
    kl_limit: float
    """The KL in the end at a beta of 1, in nats per response."""
    gain: float
    """Share of the way to its limit that the KL goes in a step."""
    beta: float
    controller: Any
    entropy: float
    entropy_lost: float
    """Share of the entropy that is lost in the end."""
    prompt_spread: float
    """Standard deviation of log KL and of the scores' logits between prompts."""
    response_spread: float
    """Standard deviation of log KL between the responses to a prompt."""
    jitter: float
    """KL of an update that moves nothing, as a share of ``kl_limit``."""
    repetition: float
    distinct: float
    text_noise: float
    eval_every: int
    eval_prompts: int
    is_paired: bool
    """Whether the paired change of the held-out reward is logged."""


@dataclass
class Truth:
    """What a step's metrics measure."""

    done: float
    reward: float
    held_out: float
    kl: float
    update: float
    """KL of the update, summed over a response."""
    entropy: float
    repetition: float
    distinct: float
    forced: float = 0.0
    """Share of the groups in which all rewards are made equal."""
    worst: float = 1.0
    """Factor of the KL of one prompt."""


class Run(NamedTuple):
    """A run as the monitor sees it, and what was planted."""

    records: list[StepRecord]
    setting: Setting
    starts: int | None
    """Step at which the plant begins."""
    exceeds: int | None
    """Step at which it exceeds its bound by three errors."""


def setting_of(task: str, draw: np.random.Generator) -> Setting:
    """A random setting of a task."""

    def log_uniform(low: float, high: float) -> float:
        return float(np.exp(draw.uniform(np.log(low), np.log(high))))

    samples = int(draw.choice([2, 4, 8]))
    prompts = max(2, round(log_uniform(8, 128) / samples))
    steps = int(draw.integers(40, 201))
    is_binary = task == "verifiable" or (task == "fixed" and draw.random() < 0.5)
    first = draw.uniform(0.1, 0.5) if is_binary else draw.normal()
    last = draw.uniform(0.65, 0.98) if is_binary else first + draw.uniform(0.7, 3.0)
    kl_limit = log_uniform(1, 30)
    lost = {"verifiable": (0.4, 0.95), "preference": (0.05, 0.35), "fixed": (0.1, 0.6)}[task]
    return Setting(
        is_binary=is_binary,
        target=None if task == "fixed" else kl_limit,
        prompts=prompts,
        samples=samples,
        steps=steps,
        length=log_uniform(8, 400),
        middle=draw.uniform(0.15, 0.5) * steps,
        width=draw.uniform(0.03, 0.12) * steps,
        reward=(float(first), float(last)),
        kl_limit=kl_limit,
        gain=log_uniform(0.05, 0.4),
        beta=log_uniform(1 / 3, 3),
        controller=FixedBeta if task == "fixed" else CONTROLLERS[draw.integers(len(CONTROLLERS))],
        entropy=log_uniform(0.3, 3.5),
        entropy_lost=draw.uniform(*lost),
        prompt_spread=draw.uniform(0.2, 0.6),
        response_spread=draw.uniform(0.3, 0.8),
        jitter=log_uniform(0.003, 0.05),
        repetition=draw.uniform(0.0, 0.06),
        distinct=draw.uniform(0.6, 1.0),
        text_noise=log_uniform(0.003, 0.03),
        eval_every=int(draw.choice([5, 10])),
        eval_prompts=int(draw.choice([32, 64, 128, 256])),
        is_paired=draw.random() < 0.5,
    )


def learned(setting: Setting, step: float) -> float:
    """The share of what can be learned that is known at a step: a logistic curve from 0."""
    at, start = (1 / (1 + math.exp(-(x - setting.middle) / setting.width)) for x in (step, 0))
    return (at - start) / (1 - start)


def truth_of(setting: Setting, done: float, kl: float, kl_before: float) -> Truth:
    """The true values at a share of what can be learned, and a KL before and after the last update."""
    first, last = setting.reward
    gained = done if setting.is_binary else min(1.5, math.sqrt(kl / setting.kl_limit))
    reward = first + (last - first) * gained
    return Truth(
        done=done,
        reward=reward,
        held_out=first + (reward - first) * 0.9,
        kl=kl,
        update=(math.sqrt(kl) - math.sqrt(kl_before)) ** 2 + setting.jitter * setting.kl_limit,
        entropy=setting.entropy * (1 - setting.entropy_lost * done),
        repetition=setting.repetition * (1 + done),
        distinct=setting.distinct * (1 - 0.3 * done),
    )


class Measurer:
    """Draws the responses of each step, and of the evaluations, and computes their metrics."""

    def __init__(self, setting: Setting, draw: np.random.Generator) -> None:
        """Draw the held-out prompts."""
        self.setting, self.draw = setting, draw
        self.held_out_offsets = draw.normal(size=setting.eval_prompts)
        self.best: tuple[float, np.ndarray] | None = None
        """The best evaluation so far: its mean and the score of each prompt."""

    def scores(self, level: float, offsets: np.ndarray) -> np.ndarray:
        """A score for each offset of a prompt: binary with a logit around that of ``level``, or normal."""
        if not self.setting.is_binary:
            return level + 0.5 * offsets + self.draw.normal(size=offsets.shape)
        level = min(max(level, 1e-3), 1 - 1e-3)
        logits = math.log(level / (1 - level)) + offsets
        return (self.draw.random(offsets.shape) < 1 / (1 + np.exp(-logits))).astype(float)

    def factors(self, prompt_spread: float, spread: float) -> np.ndarray:
        """Lognormal factors of mean 1, ``[prompts, samples]``."""
        s = self.setting
        logs = prompt_spread * self.draw.normal(size=(s.prompts, 1)) + spread * self.draw.normal(
            size=(s.prompts, s.samples)
        )
        return np.exp(logs - (prompt_spread**2 + spread**2) / 2)

    def metrics(self, step: int, truth: Truth, beta: float) -> dict[str, float]:
        """The metrics of a step."""
        s, draw = self.setting, self.draw
        lengths = np.maximum(1.0, s.length * (1 + 0.3 * truth.done) * self.factors(0.1, 0.3))
        offsets = np.repeat(draw.normal(size=(s.prompts, 1)), s.samples, axis=1)
        scores = self.scores(truth.reward, offsets)
        forced = draw.random(s.prompts) < truth.forced
        scores[forced] = scores[forced, :1]
        kl = truth.kl * self.factors(s.prompt_spread * (1 + 0.3 * truth.done), s.response_spread)
        kl = np.where(draw.random(kl.shape) < 0.002, 10 * kl, kl)
        kl[0] *= truth.worst
        per_token = kl.sum(1) / lengths.sum()
        entropy = truth.entropy * self.factors(0.15, 0.3)
        values = {
            "reward/score": scores.mean(),
            "reward/score_error": _error(scores.mean(1)),
            "reward/score_std": scores.std(ddof=1),
            "kl/exact_per_sequence": kl.mean(),
            "kl/exact_per_sequence_error": _error(kl.mean(1)),
            "kl/exact_per_token": per_token.sum(),
            "kl/exact_per_token_error": _error(per_token * s.prompts),
            "kl/max_prompt": kl.mean(1).max(),
            "kl/update": truth.update / lengths.mean() * math.exp(draw.normal(0, UPDATE_NOISE)),
            "policy/entropy": entropy.mean(),
            "response/length": lengths.mean(),
            "response/prompts": float(s.prompts),
            "response/repetition": min(1.0, abs(truth.repetition + draw.normal(0, s.text_noise))),
            "response/distinct": min(1.0, abs(truth.distinct + draw.normal(0, s.text_noise))),
            "beta": beta,
            **({} if s.target is None else {"kl/target": s.target}),
            **({"reward/zero_std_share": np.mean(scores.std(1) == 0)} if s.samples > 1 else {}),
            **(self.evaluation(truth) if step % s.eval_every == 0 else {}),
        }
        return {name: float(value) for name, value in values.items()}

    def evaluation(self, truth: Truth) -> dict[str, float]:
        """The metrics of the held-out prompts, with the paired change from the best evaluation if it is logged."""
        scores = self.scores(truth.held_out, self.held_out_offsets)
        values = {"eval/reward": float(scores.mean()), "eval/reward_error": _error(scores)}
        if self.best is not None and self.setting.is_paired:
            change = scores - self.best[1]
            values |= {"eval/reward_change": float(change.mean()), "eval/reward_change_error": _error(change)}
            values |= {"eval/prompts": self.setting.eval_prompts}
        if self.best is None or scores.mean() > self.best[0]:
            self.best = float(scores.mean()), scores
        return values


def _error(clusters: np.ndarray) -> float:
    """The standard error of the mean of independent clusters."""
    return float(clusters.std(ddof=1) / math.sqrt(len(clusters)))


def mean_error(setting: Setting, prompt_spread: float, spread: float) -> float:
    """The standard error of the mean of ``Measurer.factors``."""
    of_prompt = math.expm1(prompt_spread**2)
    of_response = math.exp(prompt_spread**2) * math.expm1(spread**2)
    return math.sqrt((of_prompt + of_response / setting.samples) / setting.prompts)


def score_error(setting: Setting, level: float, responses: int) -> float:
    """The standard error of a mean score, roughly."""
    variance = max(0.05, level * (1 - level)) if setting.is_binary else 1.25
    return math.sqrt(variance / responses)


def plant(
    setting: Setting, kind: str, size: float, age: int, now: Truth, before: Truth, beta: float
) -> float:
    """Change the truth of a step by a plant, and return by how many standard errors it is beyond its bound.

    Args:
        setting: of the run.
        kind: of ``BOUNDS``.
        size: standard errors a step.
        age: steps since the plant began, from 1.
        now: the truth of this step, which is changed.
        before: the truth of the step before the plant began.
        beta: relative to that step.
    """
    grown, target = size * age, setting.target or setting.kl_limit
    spreads = setting.prompt_spread, setting.response_spread
    kl_error = mean_error(setting, *spreads)
    match kind:
        case "update_too_large":
            now.update = min(before.update * math.exp(UPDATE_NOISE * grown), 3 * target)
            return math.log(now.update / (target / 3)) / UPDATE_NOISE
        case "below_target":
            now.kl = max(before.kl * (1 - kl_error * grown), 0.2 * target)
            return (0.8 * target - now.kl) / (kl_error * now.kl) if beta > 1 else -math.inf
        case "far_from_target":
            now.kl = min(before.kl * (1 + kl_error * grown), 10 * target)
            return (now.kl - 2 * target) / (kl_error * now.kl)
        case "runaway":
            rise = min(0.1 + 0.3 * kl_error * size, 0.7)
            share = min(rise * age / 4.0, 1.0)  # of the whole rise, of KL and reward
            now.kl = before.kl * math.exp(4.0 * share)
            error = score_error(setting, before.reward, setting.prompts * setting.samples)
            highest = 0.999 if setting.is_binary else math.inf
            now.reward += share * (min(before.reward + 4.0 / rise * size * error, highest) - now.reward)
            per_token = now.kl / setting.length
            return min((per_token - 0.5) / (kl_error * per_token), (now.reward - before.reward) / error)
        case "held_out_fell":
            error = math.sqrt(2) * score_error(setting, before.held_out, setting.eval_prompts)
            lowest = 0.02 if setting.is_binary else -math.inf
            now.held_out = max(before.held_out - error * grown, lowest)
            return (before.held_out - now.held_out) / error
        case "no_signal":
            error = math.sqrt(0.25 / setting.prompts)
            now.forced, now.reward = min(error * grown, 0.97), before.reward
            return (now.forced - 0.5) / error
        case "entropy_collapse":
            error = mean_error(setting, 0.15, 0.3)
            now.entropy, now.reward = before.entropy * math.exp(-min(error * grown, 5.0)), before.reward
            return (0.5 * before.entropy - now.entropy) / (error * now.entropy)
        case "prompt_runaway":
            error = math.hypot(spreads[0], spreads[1] / math.sqrt(setting.samples))
            now.worst = min(math.exp(error * grown), 300.0)
            usual = math.exp(error * math.sqrt(2 * math.log(setting.prompts)) - error**2 / 2)
            return math.log(now.worst / (3 * usual)) / error
        case "repetition":
            now.repetition = min(before.repetition + setting.text_noise * grown, 0.9)
            return (now.repetition - 0.3) / setting.text_noise
        case _:
            now.distinct = max(before.distinct - setting.text_noise * grown, 0.03)
            return (0.3 - now.distinct) / setting.text_noise


def simulate(task: str, seed: int, kind: str | None = None) -> Run:
    """A run of a task, with a plant of a kind if one is given."""
    draw = np.random.default_rng(
        [seed, TASKS.index(task), 0 if kind is None else 1 + list(BOUNDS).index(kind)]
    )
    setting = setting_of(task, draw)
    size = float(np.exp(draw.uniform(0, math.log(10))))
    starts = None if kind is None else int(setting.steps * draw.uniform(0.4, 0.7))
    beta_rise = draw.uniform(1.01, 1.1)
    measurer = Measurer(setting, draw)
    leash: Leash = (
        FixedBeta(beta=setting.beta)
        if setting.target is None
        else setting.controller(beta=setting.beta, target_nats=setting.target)
    )
    records: list[StepRecord] = []
    kl = kl_before = 0.0
    before, exceeds = truth_of(setting, 0.0, 0.0, 0.0), None
    for step in range(1, setting.steps + 1):
        truth = truth_of(setting, learned(setting, step), kl, kl_before)
        if kind is not None and starts is not None and step >= starts:
            start_beta = records[starts - 2].metrics["beta"]
            errors = plant(setting, kind, size, step - starts + 1, truth, before, leash.beta / start_beta)
            exceeds = step if exceeds is None and errors >= ERRORS else exceeds
        else:
            before = truth
        metrics = measurer.metrics(step, truth, leash.beta)
        records.append(StepRecord(step=step, metrics=metrics))
        leash = leash.after(
            metrics["kl/exact_per_sequence"],
            sequences=setting.prompts * setting.samples,
            standard_error=metrics["kl/exact_per_sequence_error"],
        )
        if kind == "below_target" and starts is not None and step >= starts - 1:
            leash = replace(cast("Any", leash), beta=min(100.0, metrics["beta"] * beta_rise))
        demand = setting.kl_limit * learned(setting, step)
        kl, kl_before = kl + setting.gain * (demand / leash.beta - kl), kl
    return Run(records, setting, starts, exceeds)


def alerts_of(records: Sequence[StepRecord], target: float | None) -> list[tuple[int, str]]:
    """Step and kind of all alerts as a run goes on."""
    monitor, history = HackingMonitor(target_nats=target, target_per="sequence"), []
    for record in records:
        history.append(replace(record, alerts=()))
        history[-1] = replace(record, alerts=monitor.check(history))
    return [(record.step, alert.kind) for record in history for alert in record.alerts]


def judge_plants(kind: str, seeds: range) -> dict[str, Any]:
    """How many plants of a kind exceeded their bound, were found in time, and how soon."""
    figures: dict[str, Any] = {"runs": 0, "exceeded": 0, "found": 0, "false": Counter(), "delays": []}
    tasks = ("fixed",) if kind == "runaway" else TASKS[:2] if kind in WITH_TARGET else TASKS
    for seed in seeds:
        for task in tasks:
            run = simulate(task, seed, kind)
            starts, exceeds = run.starts or 0, run.exceeds
            deadline = max(DEADLINE, 2 * run.setting.eval_every if kind == "held_out_fell" else 0)
            alerts = alerts_of(run.records, run.setting.target)
            figures["runs"] += 1
            figures["false"].update(alert for step, alert in alerts if step < starts)
            if exceeds is None or exceeds + deadline > run.setting.steps:
                continue
            named = "repetition" if kind == "alike" else kind
            steps = [step for step, alert in alerts if alert == named and step >= starts]
            figures["exceeded"] += 1
            figures["found"] += bool(steps) and steps[0] <= exceeds + deadline
            figures["delays"] += [steps[0] - exceeds] if steps else []
    return figures


def judge_good(task: str, seeds: range) -> tuple[int, Counter[str]]:
    """How many good runs of a task have a false alarm, and the kinds of all alerts."""
    runs, kinds = 0, Counter[str]()
    for seed in seeds:
        run = simulate(task, seed)
        for record in run.records if seed % 2 else ():
            cast("Any", record.metrics).pop("kl/update")
        alerts = alerts_of(run.records, run.setting.target)
        runs += bool(alerts)
        kinds.update(kind for _, kind in alerts)
    return runs, kinds


def main() -> None:
    """Simulate, write the figures and print the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(100, 120), help="the first, and one beyond")
    parser.add_argument("--good-seeds", type=int, nargs=2, help="other seeds for the good runs")
    parser.add_argument("--kinds", nargs="*", default=list(BOUNDS), choices=BOUNDS)
    options = parser.parse_args()
    good_seeds = range(*(options.good_seeds or options.seeds))
    good = {task: judge_good(task, good_seeds) for task in TASKS}
    print(f"{len(good_seeds)} good runs of each task: with a false alarm, kinds of the alerts\n{good}\n")
    plants = {kind: judge_plants(kind, range(*options.seeds)) for kind in options.kinds}
    for kind, figures in plants.items():
        delays = figures["delays"] or [math.nan]
        print(f"{kind}: {figures}, median delay {np.median(delays):.0f}, slowest {max(delays)}")
    write_result("alert_runs", {"seeds": list(options.seeds), "good": good, "plants": plants})


if __name__ == "__main__":
    main()
