"""A step in numbers, over all processes: by sums and counts, never by means of means."""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from kleash.records import Sample
from kleash.records.metrics import PART
from kleash.training.ppo.ranks import Ranks
from kleash.training.ppo.rollout import PER_TOKEN, Rollout
from kleash.training.ppo.update import Updated
from kleash.uncertainty import Estimate, clustered_mean, ratio_of_sums

TOP_SHARE = 0.01
"""The tokens with the most KL whose part of the whole is told."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Response:
    """A response in numbers: what processes tell each other of it."""

    place: int
    """Which of the step's responses it is."""
    prompt_id: int
    score: float
    parts: dict[str, float]
    cut: bool
    tokens: dict[str, Float[np.ndarray, " tokens"]]
    """Columns of numbers for each token: ``PER_TOKEN``, "advantages", "returns"."""
    prompt: str
    response: str

    @property
    def kl(self) -> float:
        """KL(policy || reference), exact, summed over its tokens."""
        return float(self.tokens["token_kl"].sum())


def responses_of(rollout: Rollout, returns: Tensor, ranks: Ranks) -> list[Response]:
    """All the step's responses, in their order, on every process. A collective."""
    columns = {**rollout.of_tokens(), "returns": returns}
    arrays = {name: x.cpu().double().numpy() for name, x in columns.items()}
    scores = rollout.scores.tolist()
    own = [
        Response(
            place=place,
            prompt_id=one.prompt_id,
            score=scores[row],
            parts={name: float(values[row]) for name, values in rollout.parts.items()},
            cut=one.finish_reason == "length",
            tokens={name: x[row, : len(one.response_ids)] for name, x in arrays.items()},
            prompt=one.prompt_text,
            response=one.response_text,
        )
        for row, (place, one) in enumerate(zip(rollout.places, rollout.sequences, strict=True))
    ]
    everybody = [one for told in ranks.told(own) for one in told]
    return sorted(everybody, key=lambda one: one.place)


def of_responses(responses: Many[Response], beta: float) -> dict[str, float]:
    """The metrics of what was drawn: rewards, KL(policy || reference), lengths, the critic."""
    clusters = np.array([one.prompt_id for one in responses])
    scores = np.array([one.score for one in responses])
    sums = np.array([one.kl for one in responses])
    lengths = np.array([len(one.tokens["token_kl"]) for one in responses])
    column = {
        name: np.concatenate([one.tokens[name] for one in responses]) for name in (*PER_TOKEN, "returns")
    }
    score, per_sequence = (
        clustered_mean(scores, clusters, unit="none"),
        clustered_mean(sums, clusters, lower=0.0),
    )
    per_token = _per_token(sums, lengths, clusters)
    log_ratio = column["token_logp"] - column["token_logq"]
    drawn = column["behaviour_logp"] - column["token_logp"]
    errors, spread = column["returns"] - column["values"], column["returns"].var()
    return {
        "reward/score": score.value,
        "reward/score_error": score.standard_error,
        "reward/score_std": float(scores.std(ddof=1)) if len(scores) > 1 else float("nan"),
        "reward/adjusted": float((scores - (beta * sums if beta else 0.0)).mean()),
        **{
            f"{PART}{name}": _mean(responses, name)
            for name in responses[0].parts
            if len(responses[0].parts) > 1
        },
        "kl/exact_per_sequence": per_sequence.value,
        "kl/exact_per_sequence_error": per_sequence.standard_error,
        "kl/exact_per_token": per_token.value,
        "kl/exact_per_token_error": per_token.standard_error,
        "kl/k1": float(log_ratio.mean()),
        "kl/k2": float((log_ratio**2 / 2).mean()),
        "kl/k3": float((np.expm1(-log_ratio) + log_ratio).mean()),
        "kl/top_percent_share": top_share(column["token_kl"]),
        "kl/max_token": float(column["token_kl"].max()),
        "policy/entropy": float(column["entropy"].mean()),
        "value/explained_variance": float(1 - errors.var() / spread) if spread > 0 else float("nan"),
        "response/length": float(lengths.mean()),
        "response/cut_share": float(np.mean([one.cut for one in responses])),
        "sampling/k3": float((np.expm1(-drawn) + drawn).mean()),
    }


def of_updates(updated: Updated, moved_nats: float, learning_rate: float) -> dict[str, float]:
    """The metrics of what was made of it.

    Args:
        updated: the sums of all processes.
        moved_nats: KL(policy before || policy now) per token.
        learning_rate: of the updates.
    """
    sums, norms = updated.sums, updated.gradient_norms
    return {
        "policy/loss": sums["policy_loss"] / sums["tokens"],
        "policy/ratio_mean": sums["ratio"] / sums["tokens"],
        "policy/ratio_max": sums["ratio_most"],
        "policy/clip_share": sums["clipped"] / sums["tokens"],
        "policy/gradient_norm": float(np.mean(norms)) if norms else float("nan"),
        "policy/learning_rate": learning_rate,
        "policy/updates": float(len(norms)),
        "value/loss": sums["value_loss"] / sums["tokens"],
        "value/clip_share": sums["value_clipped"] / sums["tokens"],
        "kl/update": moved_nats,
    }


def top_share(token_kl: Float[np.ndarray, " tokens"]) -> float:
    """The share of the KL that the 1 % of tokens (at least one) with the most of it hold.

    NaN where there is none to share, and where a token's is infinite.
    """
    most = max(1, round(TOP_SHARE * len(token_kl)))
    total = token_kl.sum()
    return float(np.sort(token_kl)[-most:].sum() / total) if 0 < total < np.inf else float("nan")


def samples_of(responses: Many[Response]) -> list[Sample]:
    """The responses as the journal keeps them."""
    return [
        Sample(prompt=one.prompt, response=one.response, reward=one.score, kl=one.kl) for one in responses
    ]


def _mean(responses: Many[Response], part: str) -> float:
    return float(np.mean([one.parts[part] for one in responses]))


def _per_token(sums: np.ndarray, lengths: np.ndarray, clusters: np.ndarray) -> Estimate:
    """The mean over tokens, whose errors know which responses answer one prompt."""
    _, label = np.unique(clusters, return_inverse=True)
    totals, counts = (np.bincount(label, weights=x).astype(np.float64) for x in (sums, lengths))
    return ratio_of_sums(totals, counts, lower=0.0)
