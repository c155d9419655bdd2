"""What a training run tells about every step: names, units and meanings, and how verl and TRL spell them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kleash.registry import look_up

PART = "reward/part/"
"""Before the name of one of several rewards."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of a step."""

    unit: str
    """"nats", "probability", "tokens", "seconds" or "none"; rewards have the unit of the reward."""
    meaning: str
    """What it is, its direction and what it is per."""
    verl: str | None = None
    """verl's name of the same, where it has one."""
    trl: str | None = None
    """TRL's name of the same, where it has one."""


_BEFORE = "of the policy that answered, before the step's updates"

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "reward/score": Metric(
            unit="reward",
            meaning="mean over responses of what was rewarded, before any KL is taken from it",
            verl="critic/score/mean",
            trl="reward",
        ),
        "reward/score_error": Metric(
            unit="reward", meaning="standard error of reward/score, prompts being the clusters"
        ),
        "reward/score_std": Metric(
            unit="reward", meaning="standard deviation of the score over responses", trl="reward_std"
        ),
        "reward/adjusted": Metric(
            unit="reward",
            meaning="mean over responses of score − beta · KL(policy ‖ reference) summed over the response",
            verl="critic/rewards/mean",
        ),
        "kl/exact_per_sequence": Metric(
            unit="nats",
            meaning="KL(policy ‖ reference) between responses: the exact KL of each next token, summed over a "
            f"response, mean over responses; {_BEFORE}",
        ),
        "kl/exact_per_sequence_error": Metric(
            unit="nats", meaning="standard error of kl/exact_per_sequence, prompts being the clusters"
        ),
        "kl/exact_per_token": Metric(
            unit="nats",
            meaning=f"KL(policy ‖ reference), exact, mean over the tokens of all responses; {_BEFORE}",
            verl="actor/reward_kl_penalty",
            trl="kl",
        ),
        "kl/exact_per_token_error": Metric(
            unit="nats", meaning="standard error of kl/exact_per_token, prompts being the clusters"
        ),
        "kl/k1": Metric(
            unit="nats", meaning="KL(policy ‖ reference) per token as log p − log q of the sampled tokens say"
        ),
        "kl/k2": Metric(
            unit="nats", meaning="half the square of log p − log q, per token: biased as a KL, never negative"
        ),
        "kl/k3": Metric(unit="nats", meaning="KL(policy ‖ reference) per token by k3 of the sampled tokens"),
        "kl/top_percent_share": Metric(
            unit="probability",
            meaning="share of all tokens' KL(policy ‖ reference) that the 1 % of tokens with the most of it hold",
        ),
        "kl/max_token": Metric(unit="nats", meaning="the largest exact KL(policy ‖ reference) of one token"),
        "kl/target": Metric(
            unit="nats", meaning="the KL that beta is steered to, per sequence or per token as asked"
        ),
        "kl/update": Metric(
            unit="nats",
            meaning="KL(policy before ‖ policy after the step's updates) per token, on the step's responses",
            verl="actor/ppo_kl",
        ),
        "beta": Metric(
            unit="none",
            meaning="reward that one nat of KL(policy ‖ reference) costs in this step",
            verl="actor/reward_kl_penalty_coeff",
            trl="beta",
        ),
        "policy/loss": Metric(
            unit="none", meaning="the clipped policy loss, mean over the step's updates", verl="actor/pg_loss"
        ),
        "policy/entropy": Metric(
            unit="nats",
            meaning=f"entropy of the next token, mean over the tokens of all responses; {_BEFORE}",
            verl="actor/entropy",
            trl="entropy",
        ),
        "policy/ratio_mean": Metric(
            unit="none", meaning="probability of a sampled token now over then, mean over tokens and updates"
        ),
        "policy/ratio_max": Metric(unit="none", meaning="the largest such ratio of the step"),
        "policy/clip_share": Metric(
            unit="probability",
            meaning="share of tokens whose ratio was clipped, mean over updates",
            verl="actor/pg_clipfrac",
            trl="clip_ratio/region_mean",
        ),
        "policy/gradient_norm": Metric(
            unit="none",
            meaning="length of the gradient before it was scaled down, mean over updates",
            verl="actor/grad_norm",
            trl="grad_norm",
        ),
        "policy/learning_rate": Metric(
            unit="none", meaning="of the step's updates", verl="actor/lr", trl="learning_rate"
        ),
        "policy/updates": Metric(
            unit="none", meaning="updates in the step; fewer than asked if it was ended early"
        ),
        "value/loss": Metric(
            unit="reward",
            meaning="squared error of the values, clipped, halved, mean over tokens and updates",
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
            meaning="tokens of a response, its end token counted, mean over responses",
            verl="response_length/mean",
            trl="completions/mean_length",
        ),
        "response/prompts": Metric(
            unit="none",
            meaning="prompts that were answered: the independent clusters behind the errors of the step",
        ),
        "response/cut_share": Metric(
            unit="probability",
            meaning="share of responses that were cut off at --max-new-tokens",
            verl="response_length/clip_ratio",
            trl="completions/clipped_ratio",
        ),
        "response/repetition": Metric(
            unit="probability",
            meaning="share of three-word runs that occurred before in the same response, over all responses",
        ),
        "response/distinct": Metric(
            unit="probability",
            meaning="different three-word runs over all of them, in all responses of the step together",
        ),
        "sampling/k3": Metric(
            unit="nats",
            meaning="KL(as generated ‖ as trained) per token by k3: the same weights, computed twice",
            verl="rollout_corr/k3_kl",
        ),
        "pairs/accuracy": Metric(
            unit="probability",
            meaning="share of pairs whose chosen answer gained more against the reference than the rejected one",
            trl="rewards/accuracies",
        ),
        "pairs/margin": Metric(
            unit="nats",
            meaning="beta · (gain of the chosen − gain of the rejected answer), mean over pairs",
            trl="rewards/margins",
        ),
        "teacher/divergence": Metric(
            unit="nats",
            meaning="the divergence that is learned from, exact, mean over the tokens of all responses",
        ),
        "time/rollout": Metric(
            unit="seconds", meaning="of generating, rewarding and scoring the step's responses"
        ),
        "time/update": Metric(unit="seconds", meaning="of the step's updates"),
        "time/step": Metric(
            unit="seconds", meaning="of the whole step", verl="perf/time_per_step", trl="step_time"
        ),
    }
)
"""Name → what it is. ``reward/part/<name>`` stands beside them for each of several rewards."""


def metric_of(name: str) -> Metric:
    """What the metric called ``name`` is.

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
    return look_up(METRICS, name, "metric")


def spelt(name: str, spelling: str) -> str:
    """A metric's name as "kleash", "verl" or "trl" spell it; kleash's own where they have none."""
    metric = metric_of(name)
    return {"verl": metric.verl, "trl": metric.trl}.get(spelling) or name
