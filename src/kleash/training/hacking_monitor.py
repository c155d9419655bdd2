"""Alerts of a training run: what its metrics show, what is likely, and which option to change.

The thresholds were chosen on simulated runs and judged on others: ``benchmarks/alert_runs.py``.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist, fmean, median, stdev
from typing import NamedTuple

from kleash.leash import PIDBeta
from kleash.store import HackingAlert, StepRecord, TrainingResult
from kleash.uncertainty import student_t_quantile

CHARACTERS_IN_A_WORD = 20
"""Average length of words above which a text is taken to be written without spaces."""
OF_RESPONSES = {"reward/score", "response/length", "kl/exact_per_sequence", "kl/exact_per_token", "kl/k3"}
"""Metrics of which a step has one if responses were drawn in it."""
KL_METRICS = {
    "sequence": ("kl/exact_per_sequence", "kl/k3_per_sequence"),
    "token": ("kl/exact_per_token", "kl/k3"),
}
"""Unit of a target -> the metrics of the KL: exact, and where it is not measured."""
KL_MEASURED = {name for names in KL_METRICS.values() for name in names}
History = Sequence[StepRecord]


class Level(NamedTuple):
    """The mean of a metric over some steps, and its standard error."""

    value: float
    """NaN, for which no condition holds, if a step lacks the metric."""
    error: float

    def minus(self, other: "Level") -> "Level":
        """The difference from the level of other steps."""
        return Level(self.value - other.value, math.hypot(self.error, other.error))


@dataclass(frozen=True, kw_only=True)
class HackingMonitor:
    """Thresholds of the alerts.

    Conditions hold for ``steps`` or ``window`` steps, and by ``sure`` standard errors where a metric has them. An alert
    is not repeated for ``silence`` steps.
    """

    target_nats: float | None = None
    """The target KL, if there is one."""
    target_per: str = TrainingResult.target_per
    """"sequence" or "token"."""
    steps: int = 3
    """Steps in which a value must be seen, or over which it is averaged."""
    window: int = 10
    """Steps over which a KL below its target, entropy and rewards are averaged."""
    silence: int = 10
    """Steps until an alert is repeated."""
    sure: float = 3.0
    """Standard errors by which a condition must hold."""
    update_share: float = 1 / 3
    """Share of the target from which the KL of one step's updates is too large."""
    far: float = 2.0
    """Multiple of the target above which the KL is far from it."""
    above: float = 1.2
    """Multiple of the target above which a settled KL is reported unless beta rises; this alert only informs."""
    settled: int = 8
    """Steps in the mean of a settled KL."""
    beta_growth: float = 1.05
    """Growth factor of beta within ``settled`` steps from which a controller works on the KL."""
    below: float = 0.8
    """Multiple of the target below which a KL should not make beta rise."""
    beta_slack: float = 0.04
    """Rise of log beta within half a ``window``, beyond what a growing KL explains, which is not reported."""
    runaway_nats: float = 0.5
    """KL per token below which no runaway is reported."""
    runaway_growth: float = 1.75
    """Growth factor of the KL per token within half a ``window`` that counts as a runaway."""
    no_signal: float = 0.85
    """Share of prompts without a spread of rewards above which a step has too little signal."""
    solved: float = 0.7
    """Fraction of its first level below which the spread of all rewards says that a task is solved."""
    entropy_left: float = 0.36
    """Fraction of an earlier level below which the entropy has collapsed, unless the reward rose meanwhile."""
    no_rise: float = 0.5
    """Standard errors below which a reward has not risen."""
    small_rise: float = 1 / 3
    """Standard deviations of the scores: a rise by as much must be excluded where the entropy fell slowly."""
    prompt_growth: float = 4.0
    """Least growth factor of the worst prompt's KL, relative to that of the others, which counts as a runaway."""
    repeated: float = 0.3
    """Share of repeated three-word runs from which responses are repetitive, if it also doubled."""
    distinct: float = 0.3
    """Share of different three-word runs below which responses are all alike, if it also halved."""

    def check(self, history: History) -> tuple[HackingAlert, ...]:
        """The alerts after the last step of ``history``; none with fewer than ``steps`` steps that draw responses.

        What is said of the KL is of the steps that have it, which may be those of a DriftMonitor alone.

        Args:
            history: all steps of a run so far, with their alerts.
        """
        drawn = drawing_steps(history)
        measured = [record for record in drawn if record.metrics.keys() & KL_MEASURED]
        recent = {alert.kind for record in drawn[-self.silence - 1 :] for alert in record.alerts}
        checks: tuple[tuple[str, Callable[[History], Iterator[str]], History, bool], ...] = (
            ("update_too_large", self._update_too_large, measured, True),
            ("far_from_target", self._far_from_target, measured, True),
            ("far_from_target", self._above_target, measured, False),
            ("below_target", self._below_target, measured, False),
            ("runaway", self._runaway, measured, True),
            ("held_out_fell", self._held_out_fell, drawn, True),
            ("no_signal", self._no_signal, drawn, False),
            ("entropy_collapse", self._entropy_collapse, drawn, True),
            ("prompt_runaway", self._prompt_runaway, measured, True),
            ("repetition", self._repetition, drawn, True),
        )
        alerts: dict[str, HackingAlert] = {}
        for kind, sentences_of, steps, acts in checks:
            raised = {*recent, *alerts}
            # a larger beta, which is the advice about the KL, does not help against large updates
            is_said = kind in raised or (kind == "far_from_target" and "update_too_large" in raised)
            if not is_said and len(steps) >= self.steps and steps[-1] is drawn[-1]:
                for sentence in sentences_of(steps):
                    alerts.setdefault(kind, HackingAlert(kind=kind, sentence=sentence, acts=acts))
        return tuple(alerts.values())

    def _update_too_large(self, history: History) -> Iterator[str]:
        """A sentence if one step's updates move the policy by a large share of the target.

        Where their KL is not measured, by what it is at least.
        """
        last, at_least = history[-self.steps :], ""
        updates = _values(last, "kl/update")
        if self.target_per == "sequence":
            updates = [kl * n for kl, n in zip(updates, _values(last, "response/length"), strict=True)]
        kl, target = fmean(updates), self.target_nats
        if "kl/update" not in last[-1].metrics:
            updates = [self._least_update(*pair, sure=0.0) for pair in pairwise(last)]
            starts, at_least = history[-self.window : 1 - self.steps], "an average of at least "
            kl = max(
                (self._least_update(start, last[-1], sure=self.sure) for start in starts), default=math.nan
            )
        if target is not None and all(update > self.update_share * target for update in (kl, *updates)):
            rate = history[-1].metrics.get("policy/learning_rate")
            shrink = math.sqrt(kl / (target / 10))  # the KL of an update grows with the square of its length
            yield (
                f"the updates of one step move the policy by {at_least}{kl:.3g} nats per {self.target_per}, "
                f"{kl / target:.2g} of the target of {target:g}: the learning rate is too large, and a "
                f"larger beta does not help; divide --learning-rate by about {shrink:.0f}"
                + ("" if rate is None else f" (it is {rate:.2g})")
            )

    def _far_from_target(self, history: History) -> Iterator[str]:
        """A sentence if the KL is more than ``far`` times its target."""
        now, recent = self._kl(history[-self.steps :]), self._kl(history[-self.window :])
        # from the relative errors of more steps: of two prompts, three steps can show no spread by chance
        scale = math.sqrt(min(self.window, len(history)) / self.steps)
        error = now.value * scale * recent.error / recent.value if recent.value else 0.0
        if self.target_nats is not None and now.value - self.sure * error > self.far * self.target_nats:
            yield (
                f"KL(policy ‖ reference) is {now.value:.3g} nats per {self.target_per} over the last {self.steps} "
                f"steps, {now.value / self.target_nats:.1f} times its target of {self.target_nats:g}: beta is too "
                "small or moves too slowly; raise --beta, or --beta-max if a controller is at it, or let --controller "
                "pid move a fixed one"
            )

    def _above_target(self, history: History) -> Iterator[str]:
        """A sentence if the KL has settled above ``above`` times its target."""
        if self.target_nats is None or len(history) < self.settled:
            return
        now, last = self._kl(history[-self.settled :]), self._kl(history[-self.steps :])
        bound, betas = self.above * self.target_nats, _values(history[-self.settled :], "beta")
        is_above = now.value - self.sure * now.error > bound and last.value > bound
        if is_above and not betas[-1] > self.beta_growth * betas[0]:
            under = "" if math.isnan(betas[-1]) else f", under a beta of {betas[-1]:.3g} that does not rise"
            yield (
                f"KL(policy ‖ reference) is {now.value:.3g} nats per {self.target_per} over the last {self.settled} "
                f"steps, {now.value / self.target_nats:.1f} times its target of {self.target_nats:g}{under}: raise "
                "--beta, or with a controller --beta-max"
            )

    def _below_target(self, history: History) -> Iterator[str]:
        """A sentence if beta rises by more than a growing KL explains, while the KL is below its target."""
        window, half, target = self.window, self.window // 2, self.target_nats
        if target is None or len(history) < window + 2:
            return
        betas = _values(history, "beta")
        if betas[-1] != max(betas[-window:]) or not self._kl(history[-window:]).value < target:
            return
        filtered = self._filtered_kl(history[-20 * window :])
        now, growth = fmean(filtered[-window:]), math.log(filtered[-2] / filtered[-2 - half])
        # no controller of kleash answers the growth of a KL below its target more strongly
        explained = math.exp(PIDBeta.proportional * max(0.0, growth) + self.beta_slack)
        if max(now, filtered[-1]) < self.below * target and betas[-1] > explained * betas[-1 - half]:
            yield (
                f"KL(policy ‖ reference), filtered, is {now:.3g} nats per {self.target_per} over the last {window} "
                f"steps, {now / target:.2g} of its target of {target:g}, and beta rose from {betas[-1 - half]:.3g} to "
                f"{betas[-1]:.3g} in {half} steps: what moves beta follows another KL, or another target; compare "
                "--target-per with the KL that the controller is given, and do not raise beta by hand"
            )

    def _runaway(self, history: History) -> Iterator[str]:
        """A sentence if, without a target, reward and KL per token rise together."""
        half = self.window // 2
        if self.target_nats is not None or len(history) < 2 * half:
            return
        before, after = history[-2 * half : -half], history[-half:]
        kl_before, kl_after = (level(part, _kl_name(part, "token")) for part in (before, after))
        rise = level(after, "reward/score").minus(level(before, "reward/score"))
        is_large = kl_after.value - self.sure * kl_after.error > self.runaway_nats
        has_grown = kl_after.value > self.runaway_growth * kl_before.value
        if is_large and has_grown and rise.value > self.sure * rise.error:
            yield (
                f"the reward rose by {rise.value:.3g} within {2 * half} steps while KL(policy ‖ reference) per token "
                f"ran from {kl_before.value:.3g} to {kl_after.value:.3g} nats: what is gained is gained by leaving the "
                "reference; read the samples, and set --target-nats with --controller pid, or raise --beta"
            )

    def _held_out_fell(self, history: History) -> Iterator[str]:
        """A sentence if the held-out reward is below its best, and a smaller KL is not the reason."""
        evaluated = [at for at, record in enumerate(history) if "eval/reward" in record.metrics]
        if len(evaluated) < 2 or evaluated[-1] < len(history) - 1:
            return
        best_at = max(evaluated[:-1], key=lambda at: history[at].metrics["eval/reward"])
        now, best = (level([history[at]], "eval/reward") for at in (-1, best_at))
        paired = level([history[-1]], "eval/reward_change")
        change = now.minus(best) if math.isnan(paired.value) else paired
        half = self.window // 2
        then, last = history[max(0, best_at + 1 - half) : best_at + 1], history[-half:]
        kl_rise = self._kl(last).minus(self._kl(then))
        beyond_training = change.minus(level(last, "reward/score").minus(level(then, "reward/score")))
        # the best of n evaluations is a lucky one; with this bound, a fall by chance is as rare as below a single one
        chance = NormalDist().cdf(-self.sure) / (len(evaluated) - 1)
        prompts = history[-1].metrics.get("eval/prompts", 1e6)  # if it is not logged, of many
        sure = student_t_quantile(1 - chance, max(1.0, prompts - 1))
        # else a policy that went back towards the reference, and lost as much on the training prompts
        is_over_optimised = (
            not kl_rise.value <= self.sure * kl_rise.error
            or beyond_training.value < -sure * beyond_training.error
        )
        # that few prompts all fall alike, as scores of 0 and 1 do, can be chance, too
        if (
            is_over_optimised
            and change.value < -sure * change.error
            and (change.error or 0.5**prompts < chance)
        ):
            certainty = (
                f"by {-change.value / change.error:.1f} standard errors of the difference"
                if change.error
                else "of all prompts alike"
            )
            yield (
                f"the held-out reward is {now.value:.3g}, and was {best.value:.3g} in step {history[best_at].step}, "
                f"its best: a fall {certainty}; the policy is over-optimised: take the checkpoint near that step, and "
                "for another run a smaller --target-nats or more --prompts"
            )

    def _no_signal(self, history: History) -> Iterator[str]:
        """A sentence if hardly a prompt has a spread of rewards, and the task is not solved."""
        last = history[-(self.window // 2) :]
        share, prompts = (level(last, name).value for name in ("reward/zero_std_share", "response/prompts"))
        error = math.sqrt(max(share * (1 - share), 0.0) / (prompts * len(last)))
        spread, first = (level(part, "reward/score_std").value for part in (last, history[: self.window]))
        if (
            len(history) >= self.window
            and share - self.sure * error > self.no_signal
            and not spread < self.solved * first
        ):
            yield (
                f"the responses to {100 * share:.0f} % of the prompts all have one reward over the last {len(last)} "
                f"steps, so that these prompts move nothing (mean reward {level(last, 'reward/score').value:.3g}): "
                "take --prompts of which some answers are right and some wrong, more --samples-per-prompt, a higher "
                "--temperature, or a finer --reward"
            )

    def _entropy_collapse(self, history: History) -> Iterator[str]:
        """A sentence if the entropy fell and the reward did not rise meanwhile.

        The fall began after the last ``steps`` steps with a mean entropy of which less than ``entropy_left`` is left.
        """
        entropies = _values(history, "policy/entropy")
        means = [fmean(entropies[end - self.steps : end]) for end in range(self.steps, len(history) + 1)]
        now = means[-1]
        highs = [at for at, mean in enumerate(means[: -self.steps]) if now < self.entropy_left * mean]
        if len(history) < 2 * self.window or not highs:
            return
        then, start = means[highs[-1]], highs[-1] + self.steps
        period = len(history) - start  # a slow fall is compared over more steps
        parts = (
            history[max(0, start - max(self.window, period)) : start],
            history[-max(self.window, period // 3) :],
        )
        before, after = (level(part, "reward/score") for part in parts)
        rise, spread = after.minus(before), level(parts[0], "reward/score_std").value
        # few responses can hide the rise that a slow fall is the price of; there is time to wait for more
        may_have_risen = (
            period >= self.window and rise.value + self.sure * rise.error > self.small_rise * spread
        )
        if rise.value < self.no_rise * rise.error and not may_have_risen:  # both are 0 once a task is solved
            yield (
                f"the policy's entropy fell from {then:.3g} to {now:.3g} nats per token since step "
                f"{history[start - 1].step} and the reward did not rise ({before.value:.3g} before, {after.value:.3g} "
                "now): it explores less and gains nothing by it; lower --learning-rate, or raise --beta"
            )

    def _prompt_runaway(self, history: History) -> Iterator[str]:
        """A sentence if the KL of the worst prompt outgrows that of the others."""
        excesses = [_excess_of_worst_prompt(record) for record in history]
        last, earlier = excesses[-self.steps :], [math.log(x) for x in excesses[: -self.window] if x > 0]
        if len(earlier) < self.settled:
            return
        sure = student_t_quantile(NormalDist().cdf(self.sure), len(earlier) - 1)
        # where the KL differs much between healthy prompts, that of the worst is often many times its usual excess
        usual, growth = math.exp(median(earlier)), max(self.prompt_growth, math.exp(sure * stdev(earlier)))
        if all(excess > growth * usual for excess in last):
            yield (
                f"the prompt with the largest KL(policy ‖ reference) has {history[-1].metrics['kl/max_prompt']:.3g} "
                f"nats per response, {median(last):.2g} times the mean of the others over the last {self.steps} steps, "
                f"and {usual:.2g} times before: the policy leaves the reference on single prompts; read the samples "
                "with the largest KL, take these out of --prompts, or raise --beta"
            )

    def _repetition(self, history: History) -> Iterator[str]:
        """A sentence if responses repeat themselves or are all alike, other than at first."""
        advice = "if the reward pays for it, correct the --reward; otherwise raise --beta"
        for name in ("response/repetition", "response/distinct"):
            first, recent = level(history[: self.steps], name).value, _values(history[-self.window :], name)
            last, changes = recent[-self.steps :], [abs(after - before) for before, after in pairwise(recent)]
            # a long response that repeats itself changes a whole step: the median leaves such steps out
            margin = self.sure * median(changes or [0.0]) / math.sqrt(self.steps)
            if name == "response/repetition" and all(
                now - margin > max(self.repeated, 2 * first) for now in last
            ):
                yield (
                    f"{100 * fmean(last):.0f} % of the three-word runs in a response have occurred in it before, and "
                    f"{100 * first:.0f} % had in the first steps: responses repeat themselves; {advice}"
                )
            if name == "response/distinct" and all(
                now + margin < min(self.distinct, first / 2) for now in last
            ):
                yield (
                    f"only {100 * fmean(last):.0f} % of the three-word runs of a step's responses are different ones, "
                    f"and {100 * first:.0f} % were in the first steps: responses are all alike; {advice}"
                )

    def _least_update(self, before: StepRecord, now: StepRecord, *, sure: float) -> float:
        """The KL that a step's updates have at least, on average, for that to the reference to rise so, in its unit.

        The root of a small KL is a distance: the updates went as far as this root rose, or further. Both are taken
        ``sure`` standard errors towards each other.
        """
        old, new = self._kl([before]), self._kl([now])
        farthest = math.sqrt(max(old.value + sure * old.error, 0.0))
        nearest = math.sqrt(max(new.value - sure * new.error, 0.0))
        return (max(nearest - farthest, 0.0) / (now.step - before.step)) ** 2

    def _kl(self, records: History) -> Level:
        """The KL in the unit of the target."""
        return level(records, _kl_name(records, self.target_per))

    def _filtered_kl(self, history: History) -> list[float]:
        """The KL after each step by the filter of the beta controllers; NaN where it was not measured."""
        name, filtered = _kl_name(history, self.target_per), []
        controller = PIDBeta(beta=1.0, target_nats=self.target_nats or math.nan)
        for record in history:
            kl = record.metrics.get(name, math.nan)
            controller = controller.after(kl, standard_error=record.metrics.get(f"{name}_error"))
            filtered.append(math.nan if math.isnan(kl) else math.exp(controller.levels[0]))
        return filtered


def drawing_steps(history: History) -> list[StepRecord]:
    """The steps that draw responses, each with metrics and alerts of those until the next, which learn from them again.

    Further passes over responses, and steps between two measurements of a DriftMonitor, draw none.
    """
    steps: list[StepRecord] = []
    for record in history:
        if (
            steps
            and OF_RESPONSES.isdisjoint(record.metrics)
            and not OF_RESPONSES.isdisjoint(steps[-1].metrics)
        ):
            last = steps.pop()
            record = replace(
                record, metrics={**last.metrics, **record.metrics}, alerts=(*last.alerts, *record.alerts)
            )
        steps.append(record)
    return steps


def _kl_name(records: History, per: str) -> str:
    """The metric of the KL that the last of some steps has: the exact one if there are both."""
    exact, sampled = KL_METRICS[per]
    return exact if exact in records[-1].metrics else sampled


def _excess_of_worst_prompt(record: StepRecord) -> float:
    """The KL of the worst prompt of a step over the mean of the other prompts; NaN without others, or a KL."""
    worst, mean, prompts = (
        record.metrics.get(name, math.nan)
        for name in ("kl/max_prompt", _kl_name([record], "sequence"), "response/prompts")
    )
    remainder = prompts * mean - worst
    return worst * (prompts - 1) / remainder if remainder > 0 else math.nan


def level(records: History, name: str) -> Level:
    """The mean of a metric over some steps, with its logged errors, or the differences of successive steps."""
    values, errors = (_values(records, metric) for metric in (name, f"{name}_error"))
    squares, weight = [error**2 for error in errors], len(values)
    if len(values) > 1 and not sum(squares) > 0:  # none are logged, or the scores of each step are all equal
        squares, weight = [(after - before) ** 2 / 2 for before, after in pairwise(values)], len(values) - 1
    return Level(fmean(values), math.sqrt(sum(squares) / weight / len(values)))


def _values(records: History, name: str) -> list[float]:
    """The values of a metric; NaN where a step lacks it."""
    return [record.metrics.get(name, math.nan) for record in records]


def repetition(responses: Sequence[str]) -> float:
    """Share of trigrams that occurred before in the same response; 0 if there is none.

    Trigrams of words, or of characters in a text with hardly any spaces.
    """
    trigrams = [_trigrams(response) for response in responses]
    total = sum(map(len, trigrams))
    return 1 - sum(len(set(of_response)) for of_response in trigrams) / total if total else 0.0


def distinct(responses: Sequence[str]) -> float:
    """Share of distinct trigrams among those of all responses, as in ``repetition``; 1 if there is none."""
    trigrams = [trigram for response in responses for trigram in _trigrams(response)]
    return len(set(trigrams)) / len(trigrams) if trigrams else 1.0


def _trigrams(text: str) -> list[tuple[str, ...]]:
    """All trigrams of words; of characters in a text with hardly any spaces."""
    words = text.split()
    if len(text) > CHARACTERS_IN_A_WORD * max(1, len(words)):
        words = list(text)
    return list(zip(words, words[1:], words[2:], strict=False))
