"""The example of the controllers: its plant by hand, and a small policy that is held at the target."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "beta_controllers.py"))


def test_the_plant_by_hand(example):
    run = example["on_plant"](example["START"]["fixed"](2.0), 0.5, 0, noise=0.0, updates=3)
    assert run.kl == [0.25, 0.25, 0.25] and run.beta == [2.0] * 3
    steered = example["on_plant"](example["START"]["PID"](2.0), 0.5, 1, noise=0.0, updates=4)
    betas, kls, now = [2.0, *steered.beta], [], 0.25
    for beta in betas[:4]:
        now += 0.5 * (0.5 / beta - now)
        kls.append(now)
    assert steered.kl == pytest.approx(kls) and kls[-1] > 0.25


def test_a_small_policy_settles_at_the_target(example):
    run = example["train"](example["START"]["PID"](0.1), updates=300)
    settled = run.kl[200:]
    assert sum(settled) / len(settled) == pytest.approx(example["TARGET"], rel=0.03)
    assert max(abs(x / example["TARGET"] - 1) for x in settled) < 0.15
