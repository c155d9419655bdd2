"""PPO-specific metrics of a step: sampling, critic, updates."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from kleash.training.ppo.rollout import Rollout
from kleash.training.ppo.update import UpdateResult
from kleash.training.process_group import ProcessGroup
from kleash.training.responses import Response, column_of


def responses_of(rollout: Rollout, returns: Tensor, group: ProcessGroup) -> list[Response]:
    """All responses of the step in order, on every process. A collective."""
    columns = {**rollout.of_tokens(), "returns": returns}
    arrays = {name: x.cpu().double().numpy() for name, x in columns.items()}
    scores = rollout.scores.tolist()
    local_responses = [
        Response(
            place=place,
            prompt_id=sequence.prompt_id,
            score=scores[row],
            parts={name: float(values[row]) for name, values in rollout.parts.items()},
            cut=sequence.finish_reason == "length",
            tokens={name: x[row, : len(sequence.response_ids)] for name, x in arrays.items()},
            prompt=sequence.prompt_text,
            response=sequence.response_text,
        )
        for row, (place, sequence) in enumerate(zip(rollout.places, rollout.sequences, strict=True))
    ]
    gathered = group.all_gather_object(local_responses)
    return sorted(chain.from_iterable(gathered), key=lambda response: response.place)


def of_critic(responses: Sequence[Response]) -> dict[str, float]:
    """Metrics of the critic, and of sampling against training log-probabilities."""
    drawn = column_of(responses, "behaviour_logp") - column_of(responses, "token_logp")
    returns = column_of(responses, "returns")
    errors, spread = returns - column_of(responses, "values"), returns.var()
    return {
        "value/explained_variance": float(1 - errors.var() / spread) if spread > 0 else float("nan"),
        "sampling/k3": float((np.expm1(-drawn) + drawn).mean()),
    }


def of_updates(updated: UpdateResult, moved_nats: float, learning_rate: float) -> dict[str, float]:
    """Metrics of the updates.

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
