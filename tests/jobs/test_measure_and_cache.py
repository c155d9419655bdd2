import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kleash.errors import KleashError, OptionError
from kleash.jobs.algorithms import PPOJob
from kleash.records import CacheJob, MeasureJob


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": "a", "text": "b"}, "give one of --prompts, --text and --responses"),
        ({"policy": "x", "reference_cache": "x.kld"}, "--responses; x.kld is no file with a text in it"),
        ({"temperature": float("nan")}, "--temperature must be a number of 0 or more; it is nan"),
        ({"top_p": 0.0}, "--top-p must be above 0 and at most 1; it is 0.0"),
        ({"top_k": 0}, "--top-k must be at least 1; it is 0"),
        ({"resume": True}, "--resume continues the run in a folder; give the folder as --out"),
        ({"temperature": 0.0, "samples_per_prompt": 3}, "all 3 samples of a prompt would be the same"),
        ({"window": 8, "stride": 9}, "--stride 9 would leave tokens out between windows of 8"),
        ({"dtype": "fp32"}, "--dtype must be one of auto, float32, bfloat16, float16, float64; it is 'fp32'"),
        ({"until_relative_error": 1.0}, "--until-relative-error must be a number between 0 and 1; it is 1.0"),
        ({"seed": -1}, "--seed must be a whole number from 0 to 2^63 - 1; it is -1"),
    ],
)
def test_what_means_nothing_is_refused_with_its_reason(options, message):
    with pytest.raises(OptionError) as caught:
        MeasureJob(**options)
    assert message in str(caught.value)
    assert isinstance(caught.value, KleashError) and isinstance(caught.value, ValueError)


def test_it_knows_whether_draws_leave_something_out():
    assert not any(MeasureJob(**options).truncates for options in ({}, {"top_p": 1.0}))
    assert all(MeasureJob(**options).truncates for options in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}))


def test_settings_leave_out_where_the_result_goes():
    plain, elsewhere = MeasureJob(), MeasureJob(out="x", resume=True, quiet=True, json=True)
    assert plain.settings() == elsewhere.settings()
    assert plain.settings() != MeasureJob(seed=1).settings()


def test_a_path_is_as_good_as_its_name(unhooked):
    here = {"reference": Path("models/base"), "out": Path("runs") / "first"}
    measured = MeasureJob(**here, policy=Path("tuned"), text=Path("a.txt"), reference_cache=Path("cache"))
    named = {"reference": "models/base", "out": "runs/first", "policy": "tuned"}
    assert measured == MeasureJob(**named, text="a.txt", reference_cache="cache")
    assert json.loads(json.dumps(measured.settings())) == measured.settings()
    assert CacheJob(**here, text=Path("a.txt")).measurement().text == "a.txt"
    assert PPOJob(policy=Path("tuned"), prompts=Path("p.txt"), reward=("judge",)).source == "p.txt"


def test_what_means_the_same_is_taken(unhooked):
    job = MeasureJob(
        limit=np.int64(3), temperature=1, dtype=torch.bfloat16, device=torch.device("cpu"), out=Path("a")
    )
    assert (job.limit, job.temperature, job.dtype, job.device, job.out) == (3, 1.0, "bfloat16", "cpu", "a")
    assert type(job.limit) is int
    assert MeasureJob(temperature=np.float32(0.5)).temperature == 0.5
    assert PPOJob(reward=["a:b"]).reward == ("a:b",)
    with pytest.raises(OptionError, match="--reward must be a list of texts; it is 'a:b'"):
        PPOJob(reward="a:b")
    with pytest.raises(OptionError, match="--limit must be a whole number"):
        MeasureJob(limit=2.5)
