"""Alerts of reward hacking, from the metrics of a training run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kleash.store import HackingAlert, StepRecord

CHARACTERS_IN_A_WORD = 20
"""Average length of words above which a text is taken to be written without spaces."""
KL_METRICS = {"sequence": "kl/exact_per_sequence", "token": "kl/exact_per_token"}


@dataclass(frozen=True, kw_only=True)
class HackingMonitor:
    """Thresholds of the reward hacking alerts.

    All conditions use means over the last ``steps`` steps, where possible relative to the run's first steps. An
    alert is not repeated for ``silence`` steps.
    """

    target_nats: float | None = None
    """The target KL, if there is one."""
    target_per: str = "sequence"
    """"sequence" or "token"."""
    steps: int = 3
    """Steps in the mean."""
    silence: int = 10
    """Steps until an alert is repeated."""
    far: float = 2.0
    """Multiple of the target above which the KL is far from it."""
    above: float = 1.2
    """Multiple of the target above which a settled KL is reported; this alert only informs."""
    settled: int = 8
    """Steps in the mean of a settled KL."""
    runaway_nats: float = 0.5
    """KL per token below which no runaway is reported."""
    runaway_growth: float = 1.5
    """Growth factor of the KL per token that counts as a runaway."""
    sure: float = 3.0
    """Standard errors by which the reward must have risen meanwhile."""
    entropy_left: float = 1 / 3
    """Fraction of the initial entropy below which it has collapsed, unless the reward rose meanwhile by more than a
    standard error: a policy that finds the one right answer has no entropy left either."""
    repeated: float = 0.3
    """Share of repeated three-word runs from which responses are repetitive, if it also doubled."""
    distinct: float = 0.3
    """Share of different three-word runs below which responses are all alike, if it also halved."""
    tail_share: float = 0.5
    """Share of the KL that the top 1 % of tokens hold from which its tail is heavy."""
    tail_nats: float = 4.0
    """KL of the worst token below which no tail is heavy."""

    def check(self, history: Sequence[StepRecord]) -> tuple[HackingAlert, ...]:
        """The alerts after the last step of ``history``; none with fewer than ``steps`` steps.

        Args:
            history: all steps of a run so far, with their alerts.
        """
        if len(history) < self.steps:
            return ()
        recent = {alert.kind for record in history[-self.silence - 1 : -1] for alert in record.alerts}
        far = self._far_from_target(history)
        above = self._above_target(history) if far is None else None
        candidates = (
            ("far_from_target", far),
            ("far_from_target", above),
            ("runaway", self._runaway(history)),
            ("entropy_collapse", self._entropy_collapse(history)),
            ("repetition", self._repetition(history)),
            ("heavy_tail", self._heavy_tail(history)),
        )
        return tuple(
            HackingAlert(kind=kind, sentence=sentence, acts=sentence is not above)
            for kind, sentence in candidates
            if sentence is not None and kind not in recent
        )

    def _far_from_target(self, history: Sequence[StepRecord]) -> str | None:
        """The alert's sentence if the KL is more than ``far`` times its target; None otherwise."""
        now = self._last(history, KL_METRICS[self.target_per])
        if self.target_nats is None or not now > self.far * self.target_nats:
            return None
        return (
            f"KL(policy ‖ reference) is {now:.3g} nats per {self.target_per} over the last {self.steps} steps, "
            f"{now / self.target_nats:.1f} times its target of {self.target_nats:g}: "
            "beta does not keep it near its target"
        )

    def _above_target(self, history: Sequence[StepRecord]) -> str | None:
        """The alert's sentence if the KL has settled above ``above`` times its target; None otherwise."""
        if self.target_nats is None or len(history) < self.settled:
            return None
        name = KL_METRICS[self.target_per]
        now = _mean(history[-self.settled :], name)
        if not (
            now > self.above * self.target_nats and self._last(history, name) > self.above * self.target_nats
        ):
            return None
        beta = history[-1].metrics.get("beta")
        under = "" if beta is None else f", under a beta of {beta:.3g}"
        return (
            f"KL(policy ‖ reference) is {now:.3g} nats per {self.target_per} over the last {self.settled} steps, "
            f"{now / self.target_nats:.1f} times its target of {self.target_nats:g}{under}: give it "
            "more steps, or begin with a larger beta"
        )

    def _runaway(self, history: Sequence[StepRecord]) -> str | None:
        """The alert's sentence if the reward and the KL per token rose together beyond the target; None otherwise."""
        window = max(self.steps, 5)
        if len(history) < 2 * window:
            return None
        before, after = history[-2 * window : -window], history[-window:]
        kl_before, kl_after = (_mean(part, "kl/exact_per_token") for part in (before, after))
        if not (kl_after > self.runaway_nats and kl_after > self.runaway_growth * kl_before):
            return None
        if self.target_nats is not None and _mean(after, KL_METRICS[self.target_per]) <= self.target_nats:
            return None
        rise, noise = _reward_rise(before, after)
        if not rise > self.sure * noise:
            return None
        return (
            f"the reward rose by {rise:.3g} within {2 * window} steps while KL(policy ‖ reference) per token ran from "
            f"{kl_before:.3g} to {kl_after:.3g} nats: what is gained is gained by leaving the reference; read the "
            "samples, and tighten the leash"
        )

    def _entropy_collapse(self, history: Sequence[StepRecord]) -> str | None:
        """The alert's sentence if the entropy fell without a gain in reward; None otherwise."""
        first, now = _mean(history[: self.steps], "policy/entropy"), self._last(history, "policy/entropy")
        rise, noise = _reward_rise(history[: self.steps], history[-self.steps :])
        if not now < self.entropy_left * first or rise > noise:
            return None
        return (
            f"the policy's entropy is {now:.3g} nats per token over the last {self.steps} steps, and was {first:.3g} "
            "in the first ones, and the reward did not rise meanwhile: it hardly chooses any more"
        )

    def _repetition(self, history: Sequence[StepRecord]) -> str | None:
        """The alert's sentence if responses repeat themselves or are all alike, other than at first; None otherwise."""
        name = "response/repetition"
        first, now = _mean(history[: self.steps], name), self._last(history, name)
        if now > self.repeated and now > 2 * first:
            return (
                f"{now:.0%} of the three-word runs in a response have occurred in it before, and {first:.0%} had in "
                "the first steps: responses repeat themselves"
            )
        name = "response/distinct"
        first, now = _mean(history[: self.steps], name), self._last(history, name)
        if now < self.distinct and now < first / 2:
            return (
                f"only {now:.0%} of the three-word runs of a step's responses are different ones, and {first:.0%} were "
                "in the first steps: responses are all alike"
            )
        return None

    def _heavy_tail(self, history: Sequence[StepRecord]) -> str | None:
        """The alert's sentence if few tokens hold most of the KL; None otherwise."""
        share, worst = self._last(history, "kl/top_percent_share"), self._last(history, "kl/max_token")
        if not (share > self.tail_share and worst > self.tail_nats):
            return None
        return (
            f"1 % of the tokens hold {share:.0%} of the KL(policy ‖ reference), up to {worst:.3g} nats on one: "
            "its mean says little, and single tokens carry the updates"
        )

    def _last(self, history: Sequence[StepRecord], name: str) -> float:
        return _mean(history[-self.steps :], name)


def _values(records: Sequence[StepRecord], name: str) -> list[float]:
    return [record.metrics[name] for record in records if name in record.metrics]


def _mean(records: Sequence[StepRecord], name: str) -> float:
    """The mean of a metric; NaN, for which no condition holds, if a step lacks it."""
    values = _values(records, name)
    return sum(values) / len(values) if len(values) == len(records) else math.nan


def _reward_rise(before: Sequence[StepRecord], after: Sequence[StepRecord]) -> tuple[float, float]:
    """By how much the mean reward rose, and the standard error of that; NaN where a step has no reward."""
    rise = _mean(after, "reward/score") - _mean(before, "reward/score")
    return rise, math.sqrt(sum(_variance_of_mean(part) for part in (before, after)))


def _variance_of_mean(records: Sequence[StepRecord]) -> float:
    """The variance of the mean reward: from the steps' standard errors, or from differences of successive steps."""
    errors = _values(records, "reward/score_error")
    if len(errors) == len(records) and all(error > 0 for error in errors):
        return sum(error**2 for error in errors) / len(errors) ** 2
    values = _values(records, "reward/score")
    squares = [(later - earlier) ** 2 for earlier, later in pairwise(values)]
    return sum(squares) / (2 * len(squares) * len(values)) if squares else math.nan


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
