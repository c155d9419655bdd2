"""One of the processes of a run: ``ppo_process.py FOLDER REPLAY OUT``; draws at step 1, replays after it."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from ppo_cases import tiny_job

from kleash.training.ppo import rollout, train_ppo

genuine = rollout._draw


def main(folder: Path, replay: Path, out: Path) -> None:
    """Train for two steps; responses of the first are drawn and compared by who called, the second's are given."""

    def draw(setting, asked, places, step):
        drawn = genuine(setting, asked, places, step)
        if step > 1:
            given = json.loads(replay.read_text())
            drawn = [
                replace(
                    one,
                    response_ids=tuple(given[place][: len(given[place])]),
                    logp_sampled=np.zeros(len(given[place]), dtype=np.float32),
                )
                for one, place in zip(drawn, places, strict=True)
            ]
        else:
            name = f"drawn-{setting.ranks.index}.json"
            (out.parent / f"{out.name}-{name}").write_text(
                json.dumps({str(place): one.response_ids for one, place in zip(drawn, places, strict=True)})
            )
        return drawn

    rollout._draw = draw
    train_ppo(
        tiny_job(
            folder,
            "qwen3",
            prompts_per_step=5,
            samples_per_prompt=2,
            batch_tokens=60,
            learning_rate=1e-4,
            seed=2,
            controller="pid",
            target_nats=1.0,
            device="cpu",
            out=str(out),
        )
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
