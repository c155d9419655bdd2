"""Rollouts as the doctor gets them, from rectangular columns."""

from collections.abc import Sequence

import numpy as np

from kleash.diagnosis import RolloutRecord


def rollouts_of(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    trainer: np.ndarray,
    engine: np.ndarray,
    reference: np.ndarray | None = None,
) -> list[RolloutRecord]:
    """A record for each row of the columns [responses, time]; all tokens count."""
    return [
        RolloutRecord(
            prompt_ids=tuple(map(int, prompts[number])),
            response_ids=tuple(map(int, responses[number])),
            trainer=trainer[number],
            engine=engine[number],
            reference=None if reference is None else reference[number],
            is_counted=np.ones(len(responses[number]), dtype=bool),
            location=f"response {number}",
        )
        for number in range(len(responses))
    ]
