"""Random numbers that depend on what they are for and on nothing else."""

import numpy as np
from jaxtyping import Float

BITS = 64


def exponentials(
    seed: int, keys: list[tuple[str, int, int]], vocabulary: int
) -> Float[np.ndarray, "rows vocabulary"]:
    """Standard exponential draws, one for each token, for each (prompt hash, sample, position).

    Philox 4x64 is keyed by seed and prompt hash and counts from (sample, position), so a row is the same
    whoever else is in the batch, on which machine, and in which version of numpy: its raw output is part of
    the algorithm. A raw number becomes a uniform one as (its upper 53 bits + 1/2)·2⁻⁵³, which is never 0 or
    1.

    With them, ``argmax(logp - log E)`` is a draw from ``logp``, however it was truncated: the Gumbel-max
    trick.

    References:
        Salmon et al. (2011), "Parallel Random Numbers: As Easy as 1, 2, 3".
        Maddison et al. (2014), "A* Sampling", https://arxiv.org/abs/1411.0030
    """
    raw = np.empty((len(keys), vocabulary), dtype=np.uint64)
    for row, (prompt_hash, sample, position) in enumerate(keys):
        key = np.array([seed % 2**BITS, int(prompt_hash, 16)], dtype=np.uint64)
        counter = np.array([0, 0, sample, position], dtype=np.uint64)
        raw[row] = np.random.Philox(key=key, counter=counter).random_raw(vocabulary)
    uniform = (raw >> np.uint64(11)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-53
    return np.negative(np.log(uniform, out=uniform), out=uniform)
