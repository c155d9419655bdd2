"""One of the processes of a run: ``ppo_process.py FOLDER OUT``. Draws at step 1, is given the responses after it."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ppo_cases import tiny_job

from kleash.training import ppo

genuine = ppo.draw


def two_steps(folder: Path, out: Path, **more: Any) -> None:
    """Train; what was drawn at step 1 lies beside ``out``, "replay.json" in ``folder`` is what step 2 is given."""

    def draw(run, asked, places, step, *more):
        drawn = genuine(run, asked, places, step, *more)
        if step == 1:
            said = {str(place): one.response_ids for one, place in zip(drawn, places, strict=True)}
            out.with_name(f"{out.name}-drawn-{run.group.rank}.json").write_text(json.dumps(said))
            return drawn
        given = [tuple(json.loads((folder / "replay.json").read_text())[place]) for place in places]
        return [
            replace(one, response_ids=ids, logp_sampled=np.zeros(len(ids), dtype=np.float32))
            for one, ids in zip(drawn, given, strict=True)
        ]

    ppo.draw = draw
    try:
        ppo.train_ppo(job_of(folder, out, **more))
    finally:
        ppo.draw = genuine


def job_of(folder: Path, out: Path, **more: Any) -> Any:
    """The run that is compared: one process has more responses than the other, and more micro-batches."""
    return tiny_job(
        folder,
        "llama",
        prompts_per_step=5,
        samples_per_prompt=2,
        batch_tokens=30,
        learning_rate=1e-4,
        seed=2,
        controller="pid",
        target_nats=1.0,
        device="cpu",
        out=str(out),
        **more,
    )


if __name__ == "__main__":
    where, to = map(Path, sys.argv[1:])
    two_steps(where, to)
    torch.distributed.destroy_process_group()
