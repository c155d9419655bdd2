"""The rows of a token table: one for each scored position, those of a sequence one after the other."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


def sequence_spans(prompt: NDArray[Any], sample: NDArray[Any]) -> list[tuple[int, int]]:
    """The first row of each sequence and the one after its last; arguments as of ``sequence_starts``."""
    starts = sequence_starts(prompt, sample).tolist()
    return list(zip(starts, [*starts[1:], len(prompt)], strict=True)) if starts else []


def sequence_starts(prompt: NDArray[Any], sample: NDArray[Any]) -> Ids:
    """The row at which each sequence begins.

    Args:
        prompt: the column ``prompt_id``.
        sample: the column ``sample_id``.
    """
    if not len(prompt):
        return np.zeros(0, dtype=np.int64)
    new = (prompt[1:] != prompt[:-1]) | (sample[1:] != sample[:-1])
    return np.concatenate([[0], np.flatnonzero(new) + 1]).astype(np.int64)
