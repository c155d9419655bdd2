"""Options of jobs that are made in Python take what means the same as their type, and refuse the rest."""

from pathlib import Path

import numpy as np
import pytest

from kleash.errors import OptionError
from kleash.records import MeasureJob, PPOJob


def test_what_means_the_same_is_taken(unhooked):
    job = MeasureJob(limit=np.int64(3), temperature=1, out=Path("a"))
    assert (job.limit, job.temperature, job.out) == (3, 1.0, "a")
    assert type(job.limit) is int
    assert MeasureJob(temperature=np.float32(0.5)).temperature == 0.5
    assert PPOJob(reward=["a:b"]).reward == ("a:b",)
    with pytest.raises(OptionError, match="--reward must be a tuple of texts; it is 'a:b'"):
        PPOJob(reward="a:b")
    with pytest.raises(OptionError, match="--limit must be a whole number"):
        MeasureJob(limit=2.5)
