"""Made-up measurements: sums and counts of prompts that differ."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp


def lognormal_prompts(clusters: int, seed: int, spread: float = 1.0, columns: int | None = None):
    """Sums and token counts of prompts whose mean per token is 1 on average."""
    random = np.random.default_rng(seed)
    shape = (clusters,) if columns is None else (clusters, columns)
    counts = random.integers(16, 129, size=shape)
    return counts * np.exp(spread * random.standard_normal(shape) - spread**2 / 2), counts


@st.composite
def prompts(draw, least: int = 3, most: int = 40):
    """Sums and counts of a few prompts that are not all alike."""
    clusters = draw(st.integers(least, most))
    means = draw(hnp.arrays(np.float64, clusters, elements=st.floats(0.015625, 64.0, width=16)))
    counts = draw(hnp.arrays(np.int64, clusters, elements=st.integers(1, 50)))
    means[0] += 0.5 + means.max()
    return means * counts, counts
