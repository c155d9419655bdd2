"""A step's responses in numbers, over all processes: by sums and counts, never by means of means."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from kleash.store import Sample
from kleash.store.metrics import PART
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
    """Columns of numbers for each token: "token_kl", "token_logp", "token_logq", "entropy"; and others of the
    trainer's own."""
    prompt: str
    response: str

    @property
    def kl(self) -> float:
        """KL(policy || reference), exact, summed over its tokens."""
        return float(self.tokens["token_kl"].sum())


def of_responses(responses: Sequence[Response], beta: float) -> dict[str, float]:
    """The metrics of what was drawn: rewards, KL(policy || reference), lengths."""
    clusters = np.array([response.prompt_id for response in responses])
    scores = np.array([response.score for response in responses])
    sums = np.array([response.kl for response in responses])
    lengths = np.array([len(response.tokens["token_kl"]) for response in responses])
    score, per_sequence = (
        clustered_mean(scores, clusters, unit="none"),
        clustered_mean(sums, clusters, lower=0.0),
    )
    per_token = _per_token(sums, lengths, clusters)
    token_kl = column_of(responses, "token_kl")
    log_ratio = column_of(responses, "token_logp") - column_of(responses, "token_logq")
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
        "kl/top_percent_share": top_share(token_kl),
        "kl/max_token": float(token_kl.max()),
        "policy/entropy": float(column_of(responses, "entropy").mean()),
        "response/length": float(lengths.mean()),
        "response/prompts": float(score.clusters),
        "response/cut_share": float(np.mean([response.cut for response in responses])),
    }


def column_of(responses: Sequence[Response], name: str) -> Float[np.ndarray, " tokens"]:
    """A column of all responses' tokens, one response after the other."""
    return np.concatenate([response.tokens[name] for response in responses])


def top_share(token_kl: Float[np.ndarray, " tokens"]) -> float:
    """The share of the KL that the 1 % of tokens (at least one) with the most of it hold.

    NaN where there is none to share, and where a token's is infinite.
    """
    most = max(1, round(TOP_SHARE * len(token_kl)))
    total = token_kl.sum()
    return float(np.sort(token_kl)[-most:].sum() / total) if 0 < total < np.inf else float("nan")


def to_samples(responses: Sequence[Response]) -> list[Sample]:
    """The responses as samples of the run log."""
    return [
        Sample(prompt=response.prompt, response=response.response, reward=response.score, kl=response.kl)
        for response in responses
    ]


def _mean(responses: Sequence[Response], part: str) -> float:
    """The mean over the responses to which the reward applies; NaN where it applies to none."""
    values = np.array([response.parts[part] for response in responses])
    return float(values[~np.isnan(values)].mean()) if not np.isnan(values).all() else float("nan")


def _per_token(sums: np.ndarray, lengths: np.ndarray, clusters: np.ndarray) -> Estimate:
    """The mean over tokens, whose errors know which responses answer one prompt."""
    _, label = np.unique(clusters, return_inverse=True)
    totals, counts = (np.bincount(label, weights=x).astype(np.float64) for x in (sums, lengths))
    return ratio_of_sums(totals, counts, lower=0.0)
