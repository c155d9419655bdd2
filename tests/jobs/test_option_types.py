"""Options of every job: what another type or a number beyond 64 bits leads to."""

from dataclasses import fields
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from kleash.errors import OptionError
from kleash.jobs.demonstration import DemonstrationJob
from kleash.records import (
    CacheJob,
    DistillJob,
    DPOJob,
    GRPOJob,
    MeasureJob,
    PPOJob,
    RLOOJob,
)

JOBS = {
    MeasureJob: {},
    CacheJob: {},
    PPOJob: {},
    GRPOJob: {},
    RLOOJob: {},
    DPOJob: {"pairs": "pairs.jsonl"},
    DistillJob: {},
    DemonstrationJob: {},
}
EVERY = [(job, given, field) for job, given in JOBS.items() for field in fields(job)]


@pytest.mark.parametrize(
    ("job", "given", "field"), EVERY, ids=[f"{j.__name__}-{f.name}" for j, _, f in EVERY]
)
def test_every_option_refuses_what_it_is_not(job, given, field, unhooked):
    """A dictionary suits no option, 10**30 no count, 10**400 no number, and a float no count."""
    for value in ({}, 10**30, 10**400, 10**5000, 2.5, "x", b"x", True, float("nan")):
        try:
            made = job(**{**given, field.name: value})
        except OptionError as error:
            assert "\n" not in str(error) and len(str(error)) < 300
            assert "--" in str(error)
        else:
            assert type(getattr(made, field.name)) in (type(value), float)
            assert value not in ({}, b"x", 10**400, 10**5000)
            assert value != 10**30 or float in (field.type, *get_args(field.type))


def test_what_means_the_same_is_taken(unhooked):
    job = MeasureJob(limit=np.int64(3), temperature=1, out=Path("a"))
    assert (job.limit, job.temperature, job.out) == (3, 1.0, "a")
    assert type(job.limit) is int
    assert MeasureJob(temperature=np.float32(0.5)).temperature == 0.5
    assert PPOJob(reward=["a:b"]).reward == ("a:b",)
    with pytest.raises(OptionError, match="--reward must be a tuple of texts; it is 'a:b', of type str"):
        PPOJob(reward="a:b")
    with pytest.raises(
        OptionError, match="--limit must be a whole number of at most 9223372036854775807; it takes 100 bits"
    ):
        MeasureJob(limit=10**30)
