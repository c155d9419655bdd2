"""A run in one or two processes, which draw at step 1 and are given the responses after it."""

import json
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.state import AcceleratorState
from ppo_cases import tiny_job

from kleash.training import ppo, train

genuine = ppo.draw


def two_steps(folder: Path, out: Path, **more: Any) -> None:
    """Train; what was drawn at step 1 lies beside ``out``, "replay.json" in ``folder`` is what step 2 is given."""

    def draw(run, prompts, places, step):
        drawn = genuine(run, prompts, places, step)
        if step == 1:
            said = {str(place): one.response_ids for one, place in zip(drawn, places, strict=True)}
            out.with_name(f"{out.name}-drawn-{run.accelerator.process_index}.json").write_text(
                json.dumps(said)
            )
            return drawn
        logp = ppo.score(run, drawn, [*range(len(drawn))]).columns["token_logp"].cpu().numpy()
        by_policy = np.concatenate([one.logp_sampled for one in drawn])
        np.testing.assert_allclose(by_policy, logp, atol=1e-5, err_msg="drawn by earlier weights")
        given = [tuple(json.loads((folder / "replay.json").read_text())[place]) for place in places]
        return [
            replace(one, response_ids=ids, logp_sampled=np.zeros(len(ids), dtype=np.float32))
            for one, ids in zip(drawn, given, strict=True)
        ]

    ppo.draw = draw
    more |= {"prompts_per_step": 5, "samples_per_prompt": 2, "batch_tokens": 30, "learning_rate": 1e-4}
    more |= {"controller": "pid", "target_nats": 1.0, "device": "cpu", "seed": 2}
    try:  # one process has more responses than the other, and more micro-batches
        train(tiny_job(folder, "llama", out=str(out), **more))
    finally:
        ppo.draw = genuine


def two_ranks(run: Callable[..., Any], *given: Any, **more: Any) -> list[int]:
    """Call ``run`` in two forks of this process that are ranks of one run; returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        fork = os.fork()
        ranks.append(fork)
        if fork == 0:
            try:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
                os.environ |= {name: str(value) for name, value in {**place, "MASTER_PORT": port}.items()}
                os.environ["MASTER_ADDR"] = "127.0.0.1"
                AcceleratorState._reset_state(True)  # of a run of this process
                run(*given, **more)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    return [os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in ranks]
