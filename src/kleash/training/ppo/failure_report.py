"""Diagnosis of a diverged update: the step's data is saved, and its first non-finite number named."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from kleash.models.cache.hidden_states import save_tensors
from kleash.store.atomic import write_atomically
from kleash.store.codec import to_json
from kleash.training.ppo.rollout import Rollout
from kleash.training.ppo.shaping import LearningSignals
from kleash.training.process_group import ProcessGroup


def save_batch(
    root: Path, rollout: Rollout, signals: LearningSignals, step: int, group: ProcessGroup
) -> Path:
    """Save a process's responses of a step with all their numbers; returns the folder.

    ``responses-<process>.json`` holds prompts, responses, token ids and scores; ``tokens-<process>.safetensors``
    the numbers of each token, [responses, steps], with their mask.
    """
    folder = root / f"failed-step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        **rollout.token_columns(),
        "advantages": signals.advantages,
        "returns": signals.returns,
        "mask": rollout.mask,
    }
    on_cpu = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    save_tensors(folder / f"tokens-{group.rank}.safetensors", on_cpu)
    responses = [
        {
            "place": index,
            "prompt_id": sequence.prompt_id,
            "sample_id": sequence.sample_id,
            "prompt_ids": sequence.prompt_ids,
            "response_ids": sequence.response_ids,
            "prompt": sequence.prompt_text,
            "response": sequence.response_text,
            "score": score,
        }
        for index, sequence, score in zip(
            rollout.indices, rollout.sequences, rollout.scores.tolist(), strict=True
        )
    ]
    write_atomically(
        folder / f"responses-{group.rank}.json",
        to_json({"responses": responses, "scaled_beta": signals.scaled_beta}),
    )
    return folder


def describe_non_finite(rollout: Rollout, signals: LearningSignals) -> str:
    """A description of the first NaN or infinite number in a process's data of the step; "" if there is none."""
    for name, values in {
        **rollout.token_columns(),
        "advantages": signals.advantages,
        "returns": signals.returns,
    }.items():
        place = _first_non_finite(values, rollout.mask)
        if place is not None:
            row, position = place
            number = values[row, position].item()
            return f"{DESCRIPTIONS[name]} of {rollout.sequences[row].name}, response token {position}, is {number}"
    return ""


DESCRIPTIONS: Mapping[str, str] = {
    "behaviour_logp": "the log-probability in sampling",
    "token_logp": "the policy's log-probability",
    "token_logq": "the reference's log-probability",
    "token_kl": "KL(policy ‖ reference)",
    "entropy": "the entropy",
    "values": "the critic's value",
    "advantages": "the advantage",
    "returns": "the return",
}


def _first_non_finite(values: Tensor, mask: Tensor) -> tuple[int, int] | None:
    indices = np.argwhere((~values.isfinite() & mask).cpu().numpy())
    return None if len(indices) == 0 else (int(indices[0][0]), int(indices[0][1]))
