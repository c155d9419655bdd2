"""When training breaks down: what it was doing is saved, and said in a sentence."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from kleash.models.cache.hidden_states import save_tensors
from kleash.records import write_atomically
from kleash.records.codec import to_json
from kleash.training.ppo.rollout import Rollout
from kleash.training.ppo.shaping import Shaped
from kleash.training.ranks import Ranks


def save_batch(root: Path, rollout: Rollout, shaped: Shaped, step: int, ranks: Ranks) -> Path:
    """Write a process's responses of a step with every number that was made of them; returns the folder.

    ``responses-<process>.json`` holds prompts, responses, token ids and scores; ``tokens-<process>.safetensors``
    the numbers of each token, [responses, steps], with their mask.
    """
    folder = root / f"failed-step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        **rollout.of_tokens(),
        "advantages": shaped.advantages,
        "returns": shaped.returns,
        "mask": rollout.mask,
    }
    on_cpu = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    save_tensors(folder / f"tokens-{ranks.index}.safetensors", on_cpu)
    responses = [
        {
            "place": place,
            "prompt_id": one.prompt_id,
            "sample_id": one.sample_id,
            "prompt_ids": one.prompt_ids,
            "response_ids": one.response_ids,
            "prompt": one.prompt_text,
            "response": one.response_text,
            "score": score,
        }
        for place, one, score in zip(rollout.places, rollout.sequences, rollout.scores.tolist(), strict=True)
    ]
    write_atomically(
        folder / f"responses-{ranks.index}.json", to_json({"responses": responses, "price": shaped.price})
    )
    return folder


def where_it_broke(rollout: Rollout, shaped: Shaped) -> str:
    """The first number of a process's step that is NaN or infinite, in words; "" where none is."""
    for name, values in {
        **rollout.of_tokens(),
        "advantages": shaped.advantages,
        "returns": shaped.returns,
    }.items():
        where = _first_non_finite(values, rollout.mask)
        if where is not None:
            row, position = where
            number = values[row, position].item()
            return f"{MEANT[name]} of {rollout.sequences[row].name}, response token {position}, is {number}"
    return ""


MEANT: Mapping[str, str] = {
    "behaviour_logp": "the log-probability at drawing",
    "token_logp": "the policy's log-probability",
    "token_logq": "the reference's log-probability",
    "token_kl": "KL(policy || reference)",
    "entropy": "the entropy",
    "values": "the critic's value",
    "advantages": "the advantage",
    "returns": "the return",
}


def _first_non_finite(values: Tensor, mask: Tensor) -> tuple[int, int] | None:
    bad = np.argwhere((~values.isfinite() & mask).cpu().numpy())
    return None if len(bad) == 0 else (int(bad[0][0]), int(bad[0][1]))
