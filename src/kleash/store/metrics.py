"""The metrics of a training step: names, units, meanings, and the names of verl and TRL."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kleash.estimate import Estimate
from kleash.registry import look_up

PART = "reward/part/"
"""Prefix of the name of one of several rewards."""
OTHER = "trainer/"
"""Prefix of the name of a number that a trainer logs and that is none of these metrics."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of a step."""

    unit: str
    """"nats", "probability", "tokens", "seconds" or "none"; rewards have the unit of the reward."""
    meaning: str
    """Definition, direction of a divergence, and what it is averaged over."""
    verl: str | None = None
    """verl's name, or None."""
    trl: str | None = None
    """TRL's name, or None."""
    heading: str = ""
    """Its name in the line of a step on the terminal; empty where the line does not have it."""
    card: str = ""
    """Its title among the main numbers of a report; empty where it is none."""


_BEFORE = (
    "of the policy that generated, before the step's updates (after them, if a DriftMonitor measured it)"
)

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "reward/score": Metric(
            unit="reward",
            heading="reward",
            card="Reward",
            meaning="mean reward of a response, without a KL penalty",
            verl="critic/score/mean",
            trl="reward",
        ),
        "reward/score_error": Metric(
            unit="reward", meaning="standard error of reward/score, clustered by prompt"
        ),
        "reward/score_std": Metric(
            unit="reward", meaning="standard deviation of the score over responses", trl="reward_std"
        ),
        "reward/zero_std_share": Metric(
            unit="probability",
            meaning="share of prompts whose responses all have the same score, and so no advantage within their group",
            trl="frac_reward_zero_std",
        ),
        "reward/adjusted": Metric(
            unit="reward",
            heading="adjusted",
            meaning="mean over responses of score − beta · KL(policy ‖ reference) summed over the response",
            verl="critic/rewards/mean",
        ),
        "kl/exact_per_sequence": Metric(
            unit="nats",
            heading="KL/sequence",
            card="KL per sequence",
            meaning="KL(policy ‖ reference) between responses: the exact KL of each next token, summed over a "
            f"response, mean over responses; {_BEFORE}",
        ),
        "kl/exact_per_sequence_error": Metric(
            unit="nats", meaning="standard error of kl/exact_per_sequence, clustered by prompt"
        ),
        "kl/exact_per_token": Metric(
            unit="nats",
            heading="KL/token",
            card="KL per token",
            meaning=f"KL(policy ‖ reference), exact, mean over the tokens of all responses; {_BEFORE}",
            verl="actor/reward_kl_penalty",
            trl="kl",
        ),
        "kl/exact_per_token_error": Metric(
            unit="nats", meaning="standard error of kl/exact_per_token, clustered by prompt"
        ),
        "kl/k1": Metric(
            unit="nats", meaning="KL(policy ‖ reference) per token by k1 of the sampled tokens: log p − log q"
        ),
        "kl/k2": Metric(
            unit="nats",
            meaning="k2 of the sampled tokens, half the square of log p − log q, per token: biased, never negative",
        ),
        "kl/k3": Metric(unit="nats", meaning="KL(policy ‖ reference) per token by k3 of the sampled tokens"),
        "kl/k3_error": Metric(unit="nats", meaning="standard error of kl/k3, clustered by prompt"),
        "kl/k3_per_sequence": Metric(
            unit="nats",
            card="KL per sequence by k3",
            meaning="KL(policy ‖ reference) between responses by k3 of the sampled tokens, summed over a response, "
            "mean over responses",
        ),
        "kl/k3_per_sequence_error": Metric(
            unit="nats", meaning="standard error of kl/k3_per_sequence, clustered by prompt"
        ),
        "kl/top_percent_share": Metric(
            unit="probability",
            meaning="share of the total KL(policy ‖ reference) that is in the 1 % of tokens with the largest KL",
        ),
        "kl/max_token": Metric(unit="nats", meaning="the largest exact KL(policy ‖ reference) of one token"),
        "kl/max_token_per_sequence": Metric(
            unit="nats",
            meaning="the largest exact KL(policy ‖ reference) of one token of a response, mean over responses",
        ),
        "kl/max_prompt": Metric(
            unit="nats",
            meaning="the largest KL(policy ‖ reference) of one prompt: exact, or else by k3, summed over a response, "
            f"mean over the responses to the prompt; {_BEFORE}",
        ),
        "kl/target": Metric(
            unit="nats",
            heading="target",
            meaning="target KL of the beta controller, per sequence or per token",
        ),
        "kl/update": Metric(
            unit="nats",
            meaning="KL(policy before ‖ policy after the step's updates) per token, on the step's responses; by k3 in "
            "the last of several passes of TRL's loss over them",
            verl="actor/ppo_kl",
        ),
        "kl/effective_share": Metric(
            unit="probability",
            meaning="effective sample size of the importance weights of the KL(policy ‖ reference), as a share of the "
            "response tokens",
        ),
        "mismatch/kl_engine_trainer": Metric(
            unit="nats", meaning="KL(engine ‖ trainer) per token by k3 of the tokens that the engine drew"
        ),
        "mismatch/kl_trainer_engine": Metric(
            unit="nats",
            meaning="KL(trainer ‖ engine) per token along the prefixes of the engine, importance-weighted",
        ),
        "mismatch/jensen_shannon": Metric(
            unit="nats", meaning="Jensen–Shannon divergence of trainer and engine per token"
        ),
        "mismatch/mean_weight": Metric(
            unit="none", meaning="mean of the trainer's probability over the engine's, 1 up to its error"
        ),
        "mismatch/effective_share": Metric(
            unit="probability", meaning="effective sample size of these weights, as a share of the tokens"
        ),
        "mismatch/largest_log_ratio": Metric(
            unit="nats", meaning="the largest |log ratio| of trainer and engine of one token"
        ),
        "mismatch/tokens": Metric(
            unit="tokens", meaning="tokens with a log-probability of the engine, over all processes"
        ),
        "drift/kl_per_sequence": Metric(
            unit="nats",
            card="KL per sequence of the monitor",
            meaning="KL(policy ‖ reference) between responses to a DriftMonitor's prompts, where the step has a "
            "KL of its own: the monitor's prompts and reference may be others",
        ),
        "drift/kl_per_sequence_error": Metric(
            unit="nats", meaning="standard error of drift/kl_per_sequence, clustered by prompt"
        ),
        "drift/kl_per_token": Metric(
            unit="nats",
            meaning="KL(policy ‖ reference), exact, mean over the tokens of a DriftMonitor's responses",
        ),
        "drift/kl_per_token_error": Metric(
            unit="nats", meaning="standard error of drift/kl_per_token, clustered by prompt"
        ),
        "beta": Metric(
            unit="none",
            heading="beta",
            card="Beta",
            meaning="cost of one nat of KL(policy ‖ reference) in this step, in units of reward",
            verl="actor/reward_kl_penalty_coeff",
            trl="beta",
        ),
        "loss": Metric(unit="none", meaning="the loss of a trainer of transformers or TRL, as it logs it"),
        "policy/loss": Metric(
            unit="none", meaning="the clipped policy loss, mean over the step's updates", verl="actor/pg_loss"
        ),
        "policy/entropy": Metric(
            unit="nats",
            heading="entropy",
            card="Entropy per token",
            meaning="entropy of the next token, mean over the tokens of all responses (of the batch, where none are "
            f"drawn); {_BEFORE}",
            verl="actor/entropy",
            trl="entropy",
        ),
        "policy/ratio_mean": Metric(
            unit="none",
            meaning="probability of a sampled token under the current over that under the generating policy, mean over "
            "tokens and updates",
        ),
        "policy/ratio_max": Metric(unit="none", meaning="largest probability ratio of the step"),
        "policy/clip_share": Metric(
            unit="probability",
            meaning="share of tokens whose ratio was clipped, mean over updates",
            verl="actor/pg_clipfrac",
            trl="clip_ratio/region_mean",
        ),
        "policy/gradient_norm": Metric(
            unit="none",
            meaning="norm of the policy's gradient before clipping, mean over updates; of a trainer, of the last",
            verl="actor/grad_norm",
            trl="grad_norm",
        ),
        "policy/learning_rate": Metric(
            unit="none", meaning="learning rate of the step's updates", verl="actor/lr", trl="learning_rate"
        ),
        "policy/updates": Metric(
            unit="none",
            meaning="number of updates in the step; fewer than configured if it was stopped early",
        ),
        "value/loss": Metric(
            unit="none",
            meaning="half the squared error of the values, clipped, mean over tokens and updates",
            verl="critic/vf_loss",
        ),
        "value/clip_share": Metric(
            unit="probability", meaning="share of tokens whose value was clipped", verl="critic/vf_clipfrac"
        ),
        "value/explained_variance": Metric(
            unit="none",
            meaning="1 − variance of (returns − values) / variance of returns, before the updates",
            verl="critic/vf_explained_var",
        ),
        "response/length": Metric(
            unit="tokens",
            heading="length",
            meaning="tokens of a response, including its end token, mean over responses",
            verl="response_length/mean",
            trl="completions/mean_length",
        ),
        "response/prompts": Metric(
            unit="none",
            meaning="number of prompts: the clusters of the standard errors",
        ),
        "response/cut_share": Metric(
            unit="probability",
            meaning="share of responses that were truncated at --max-new-tokens",
            verl="response_length/clip_ratio",
            trl="completions/clipped_ratio",
        ),
        "response/repetition": Metric(
            unit="probability",
            heading="repeated",
            meaning="share of three-word sequences that occurred before in the same response, over all responses; "
            "0 if there are none",
        ),
        "response/distinct": Metric(
            unit="probability",
            meaning="distinct three-word sequences divided by all, over all responses of the step; 1 if there are none",
        ),
        "pairs/accuracy": Metric(
            unit="probability",
            heading="accuracy",
            card="Preference accuracy",
            meaning="share of pairs in which the chosen response has a larger log ratio to the reference than the "
            "rejected one (a larger log-probability, if the trainer has no reference)",
            trl="rewards/accuracies",
        ),
        "pairs/margin": Metric(
            unit="nats",
            heading="margin",
            meaning="beta · (log ratio of the chosen − log ratio of the rejected response), mean over pairs; of KTO, "
            "the difference of the two means; of log-probabilities, if the trainer has no reference",
            trl="rewards/margins",
        ),
        "teacher/divergence": Metric(
            unit="none",  # which divergence it is, only the job knows
            heading="divergence/token",
            card="Divergence from the teacher",
            meaning="divergence from the teacher that is minimised, exact or from the teacher's top-k lists, mean over "
            "the tokens of all responses, before the step's update; in nats, but total_variation, hellinger and "
            "chi_squared have no unit",
        ),
        "teacher/divergence_error": Metric(
            unit="none", meaning="standard error of teacher/divergence, clustered by prompt"
        ),
        "eval/reward": Metric(
            unit="reward",
            heading="held-out reward",
            card="Held-out reward",
            meaning="mean reward of a response to the held-out prompts, without a KL penalty, after the step",
        ),
        "eval/reward_error": Metric(
            unit="reward", meaning="standard error of eval/reward, clustered by prompt"
        ),
        "eval/reward_change": Metric(
            unit="reward",
            meaning="eval/reward minus that of the best evaluation before: mean over the held-out prompts of the "
            "differences between their own mean rewards",
        ),
        "eval/reward_change_error": Metric(
            unit="reward", meaning="standard error of eval/reward_change, over the differences of the prompts"
        ),
        "eval/prompts": Metric(
            unit="none", meaning="held-out prompts of eval/reward_change: the clusters of its error"
        ),
        "eval/kl_per_sequence": Metric(
            unit="nats",
            heading="held-out KL/sequence",
            card="Held-out KL per sequence",
            meaning="KL(policy ‖ reference) between responses to the held-out prompts: exact, summed over a response, "
            "mean over responses",
        ),
        "eval/kl_per_sequence_error": Metric(
            unit="nats", meaning="standard error of eval/kl_per_sequence, clustered by prompt"
        ),
        "eval/accuracy": Metric(
            unit="probability",
            heading="held-out accuracy",
            card="Held-out accuracy",
            meaning="pairs/accuracy on held-out pairs, after the step",
            trl="eval_rewards/accuracies",
        ),
        "eval/margin": Metric(
            unit="nats",
            meaning="pairs/margin on held-out pairs, after the step",
            trl="eval_rewards/margins",
        ),
        "eval/loss": Metric(
            unit="none", meaning="the loss on held-out data, after the step", trl="eval_loss"
        ),
        "time/rollout": Metric(
            unit="seconds", meaning="generating, rewarding and scoring the step's responses"
        ),
        "time/update": Metric(unit="seconds", meaning="the updates of the step"),
        "time/drift": Metric(
            unit="seconds", meaning="a DriftMonitor's generation and scoring, beside the step"
        ),
        "time/step": Metric(
            unit="seconds", meaning="the whole step", verl="perf/time_per_step", trl="step_time"
        ),
    }
)
"""Name -> metric. Each of several rewards also has ``reward/part/<name>``, and what else a trainer logs has
``trainer/<name>`` (``metric_of``)."""


def metric_of(name: str) -> Metric:
    """The metric called ``name``, also for one of several rewards, and for what else a trainer logs.

    Raises:
        UnknownNameError: if there is none.
    """
    if name.startswith(PART) and name != PART:
        part = name.removeprefix(PART)
        return Metric(
            unit="reward",
            meaning=f"mean over responses of the reward {part}, without its weight",
            trl=f"rewards/{part}/mean",
        )
    if name.startswith(OTHER) and name != OTHER:
        return Metric(unit="none", meaning="as the trainer logs it")
    return look_up(METRICS, name, "metric")


def title_of(name: str, *, has_unit: bool = False) -> str:
    """The title of a metric that a report or the line of a step has, perhaps with its unit, if that is nats."""
    metric = METRICS[name]
    unit = ", nats" if has_unit and metric.unit == "nats" else ""
    return (metric.card or metric.heading) + unit


def per_what(name: str, target_per: str) -> str:
    """What follows the number of a target, which may be of either: " per sequence" or " per token"; else nothing."""
    return f" per {target_per}" if name == "kl/target" else ""


def number_of(metrics: Mapping[str, float], name: str) -> Estimate:
    """A metric of a step with its standard error ``<name>_error``, without a unit; NaN for what the step lacks."""
    value, error = (metrics.get(key, math.nan) for key in (name, f"{name}_error"))
    return Estimate(value=value, unit="none", standard_error=error, ci95=(math.nan, math.nan))


def with_errors(means: Mapping[str, Estimate]) -> dict[str, float]:
    """The metrics of estimates: each value by its name, and its standard error by ``<name>_error``."""
    return {
        metric: number
        for name, mean in means.items()
        for metric, number in ((name, mean.value), (f"{name}_error", mean.standard_error))
    }


def spelt(name: str, spelling: str) -> str:
    """The name of a metric in "kleash", "verl" or "trl"; kleash's if they have none."""
    metric = metric_of(name)
    return {"verl": metric.verl, "trl": metric.trl}.get(spelling) or name
