"""The example of the controllers: its plant by hand, and a small policy that is held at the target."""

import runpy

import pytest
from documentation import ROOT


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "beta_controllers.py"))


def test_a_small_policy_settles_at_the_target(example):
    run = example["train"](example["START"]["PID"](0.1), updates=300)
    settled = run.kl[200:]
    assert sum(settled) / len(settled) == pytest.approx(example["TARGET"], rel=0.03)
    assert max(abs(x / example["TARGET"] - 1) for x in settled) < 0.15
