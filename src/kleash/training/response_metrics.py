"""Metrics of a step's responses over all processes, from sums and counts and not from means of means."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from kleash.estimators import sampled_kl
from kleash.extras import import_extra
from kleash.store import Sample
from kleash.store.metrics import PART, with_errors
from kleash.uncertainty import clustered_mean, top_share
from kleash.uncertainty.ratios import mean_per_token


@dataclass(frozen=True, eq=False, kw_only=True)
class Response:
    """A response with its rewards and per-token columns, as processes exchange it."""

    prompt_hash: str
    """Of its tokens: responses to equal prompts are one cluster."""
    score: float
    """The weighted sum of its rewards; NaN if none applies."""
    parts: dict[str, float]
    """Each reward by name, without weight; NaN if it does not apply."""
    is_truncated: bool = False
    """Whether it ends without an end token; only known in PPO, since TRL logs the share itself."""
    tokens: dict[str, Float[np.ndarray, " tokens"]]
    """Columns with a number for each token: "token_logp", where they are known "entropy", "token_logq", the exact
    "token_kl" and the importance "weight" of tokens that an older policy drew, and others of the trainer. Without
    tokens if the response is masked as a whole (TRL's ``mask_truncated_completions``), and without columns if none are
    known: it then has rewards alone."""
    prompt: str
    response: str

    @property
    def kl(self) -> float:
        """The exact KL(policy || reference), summed over its tokens; NaN where it is not known."""
        token_kl = self.tokens.get("token_kl", np.empty(0))
        return float(token_kl.sum()) if len(token_kl) else float("nan")


def gather_object(parts: list[Any]) -> list[Any]:
    """The parts of all processes, in their order. A collective."""
    return import_extra("accelerate.utils", "models").gather_object(parts)


def of_first_process(value: Any) -> Any:
    """The object of rank 0. A collective."""
    return gather_object([value])[0]


def response_metrics(responses: Sequence[Response], beta: float) -> dict[str, float]:
    """Metrics of rewards, entropy and lengths, and of KL(policy || reference) as far as the responses have columns.

    Args:
        responses: all responses of a step, of all processes.
        beta: coefficient of the KL, for ``reward/adjusted``.
    """
    counted = [response for response in responses if len(response.tokens.get("token_logp", ()))]
    return {
        **_reward_metrics(responses, beta),
        **(_token_metrics(counted, of_all=len(counted) == len(responses)) if counted else {}),
        "response/prompts": float(len({response.prompt_hash for response in responses})),
    }


def _token_metrics(responses: Sequence[Response], *, of_all: bool) -> dict[str, float]:
    """Metrics of responses with tokens: entropy, KL as far as it is known, and the length if no response is masked."""
    clusters = np.unique([response.prompt_hash for response in responses], return_inverse=True)[1]
    lengths = np.array([len(response.tokens["token_logp"]) for response in responses])
    columns = set.intersection(*({*response.tokens} for response in responses))
    return {
        **(_sampled_metrics(responses, clusters, lengths) if "token_logq" in columns else {}),
        **(_exact_metrics(responses, clusters, lengths) if "token_kl" in columns else {}),
        **({"policy/entropy": float(column_of(responses, "entropy").mean())} if "entropy" in columns else {}),
        **({"response/length": float(lengths.mean())} if of_all else {}),
    }


def _reward_metrics(responses: Sequence[Response], beta: float) -> dict[str, float]:
    """Metrics of the responses that have a reward; none if no response has one."""
    scored = [response for response in responses if not np.isnan(response.score)]
    if not scored:
        return {}
    scores = np.array([response.score for response in scored])
    clusters = np.array([response.prompt_hash for response in scored])
    adjusted = scores - np.array([beta * response.kl if beta else 0.0 for response in scored])
    has_kl = ~np.isnan(adjusted)
    return {
        **with_errors({"reward/score": clustered_mean(scores, clusters, unit="none")}),
        "reward/score_std": float(scores.std(ddof=1)) if len(scores) > 1 else float("nan"),
        **({"reward/adjusted": float(adjusted[has_kl].mean())} if has_kl.any() else {}),
        **{
            f"{PART}{name}": _mean(responses, name)
            for name in responses[0].parts
            if len(responses[0].parts) > 1
        },
    }


def _exact_metrics(
    responses: Sequence[Response], clusters: np.ndarray, lengths: np.ndarray
) -> dict[str, float]:
    """Metrics of the exact KL of each token."""
    sums = np.array([response.kl for response in responses])
    token_kl = column_of(responses, "token_kl")
    return {
        **with_errors(
            {
                "kl/exact_per_sequence": clustered_mean(sums, clusters),
                "kl/exact_per_token": mean_per_token(sums, lengths, clusters),
            }
        ),
        # undefined where the policy is its reference, as before the first update
        **({"kl/top_percent_share": top_share(token_kl, 0.01)} if token_kl.any() else {}),
        "kl/max_token": float(token_kl.max()),
        "kl/max_token_per_sequence": float(
            np.mean([response.tokens["token_kl"].max(initial=0.0) for response in responses])
        ),
        "kl/max_prompt": _largest_of_prompts(sums, clusters),
    }


def _sampled_metrics(
    responses: Sequence[Response], clusters: np.ndarray, lengths: np.ndarray
) -> dict[str, float]:
    """Metrics of the KL that is estimated from the sampled tokens, with their importance weights."""
    token_logp, token_logq = (
        torch.from_numpy(column_of(responses, name)) for name in ("token_logp", "token_logq")
    )
    weights = column_of(responses, "weight") if "weight" in responses[0].tokens else 1.0
    token_kl = {
        name: weights * sampled_kl(token_logp, token_logq, name).numpy() for name in ("k1", "k2", "k3")
    }
    sums = np.add.reduceat(token_kl["k3"], np.cumsum(lengths) - lengths)
    return {
        "kl/max_prompt": _largest_of_prompts(sums, clusters),
        **{f"kl/{name}": float(values.mean()) for name, values in token_kl.items()},
        **with_errors(
            {
                "kl/k3_per_sequence": clustered_mean(sums, clusters),
                "kl/k3": mean_per_token(sums, lengths, clusters),
            }
        ),
    }


def _largest_of_prompts(sums: np.ndarray, clusters: np.ndarray) -> float:
    """The largest of the prompts' mean sums."""
    return float((np.bincount(clusters, weights=sums) / np.bincount(clusters)).max())


def column_of(responses: Sequence[Response], name: str) -> Float[np.ndarray, " tokens"]:
    """A column of the tokens of all responses, concatenated."""
    return np.concatenate([response.tokens[name] for response in responses])


def explained_variance(responses: Sequence[Response]) -> float:
    """The share of the variance of the returns that the critic explains; NaN if they do not vary."""
    returns = column_of(responses, "returns")
    errors, variance = returns - column_of(responses, "values"), returns.var()
    return float(1 - errors.var() / variance) if variance > 0 else float("nan")


def to_samples(responses: Sequence[Response]) -> list[Sample]:
    """The responses as samples of the run log."""
    return [
        Sample(prompt=response.prompt, response=response.response, reward=response.score, kl=response.kl)
        for response in responses
    ]


def _mean(responses: Sequence[Response], part: str) -> float:
    """The mean of a reward over the responses to which it applies; NaN if there are none."""
    values = np.array([response.parts[part] for response in responses])
    return float(values[~np.isnan(values)].mean()) if not np.isnan(values).all() else float("nan")
