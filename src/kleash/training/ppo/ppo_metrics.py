"""PPO-specific metrics of a step: sampling, critic, updates."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from kleash.training.ppo.rollout import Rollout
from kleash.training.ppo.update import UpdateResult
from kleash.training.process_group import ProcessGroup
from kleash.training.response_metrics import Response, column_of, mean_sampled_kl


def gather_responses(rollout: Rollout, returns: Tensor, group: ProcessGroup) -> list[Response]:
    """The responses of all processes, in the order of the step. A collective."""
    columns = {**rollout.token_columns(), "returns": returns}
    arrays = {name: x.cpu().double().numpy() for name, x in columns.items()}
    scores = rollout.scores.tolist()
    local_responses = [
        Response(
            index=index,
            prompt_hash=sequence.prompt_hash,
            score=scores[row],
            parts={name: float(values[row]) for name, values in rollout.parts.items()},
            is_truncated=sequence.finish_reason == "length",
            tokens={name: x[row, : len(sequence.response_ids)] for name, x in arrays.items()},
            prompt=sequence.prompt_text,
            response=sequence.response_text,
        )
        for row, (index, sequence) in enumerate(zip(rollout.indices, rollout.sequences, strict=True))
    ]
    gathered = group.all_gather_object(local_responses)
    return sorted(chain.from_iterable(gathered), key=lambda response: response.index)


def critic_metrics(responses: Sequence[Response]) -> dict[str, float]:
    """Metrics of the critic, and of the difference between log-probabilities in sampling and in scoring."""
    returns = column_of(responses, "returns")
    errors, variance = returns - column_of(responses, "values"), returns.var()
    return {
        "value/explained_variance": float(1 - errors.var() / variance) if variance > 0 else float("nan"),
        "sampling/k3": mean_sampled_kl(responses, "behaviour_logp", "token_logp", "k3"),
    }


def update_metrics(result: UpdateResult, update_kl: float, learning_rate: float) -> dict[str, float]:
    """Metrics of the updates.

    Args:
        result: sums over all processes.
        update_kl: KL(policy before || policy after the updates) in nats per token.
        learning_rate: learning rate of the updates.
    """
    sums, norms = result.sums, result.gradient_norms
    return {
        "policy/loss": sums["policy_loss"] / sums["tokens"],
        "policy/ratio_mean": sums["ratio"] / sums["tokens"],
        "policy/ratio_max": sums["ratio_max"],
        "policy/clip_share": sums["clipped"] / sums["tokens"],
        "policy/gradient_norm": float(np.mean(norms)) if norms else float("nan"),
        "policy/learning_rate": learning_rate,
        "policy/updates": float(len(norms)),
        "value/loss": sums["value_loss"] / sums["tokens"],
        "value/clip_share": sums["value_clipped"] / sums["tokens"],
        "kl/update": update_kl,
    }
