"""The example of the controllers: its table, its picture and its recorded run are what they say."""

import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "beta_controllers.py"))


def test_the_picture_is_the_one_in_the_docs(example, tmp_path):
    example["main"](["--out", str(tmp_path / "beta.svg")])
    drawn = (tmp_path / "beta.svg").read_text(encoding="utf-8")
    assert drawn == (ROOT / "docs" / "images" / "beta.svg").read_text(encoding="utf-8"), (
        "run: python examples/beta_controllers.py --out docs/images/beta.svg"
    )
    lines = [part for part in ET.fromstring(drawn).iter() if part.get("class") == "line"]
    assert len(lines) == 6 * 4 + 4


def test_the_plant_by_hand(example):
    run = example["on_plant"](example["START"]["fixed"](2.0), 0.5, 0, noise=0.0, updates=3)
    assert run.kl == [0.25, 0.25, 0.25] and run.beta == [2.0] * 3
    steered = example["on_plant"](example["START"]["PID"](2.0), 0.5, 1, noise=0.0, updates=4)
    betas, kls, now = [2.0, *steered.beta], [], 0.25
    for beta in betas[:4]:
        now += 0.5 * (0.5 / beta - now)
        kls.append(now)
    assert steered.kl == pytest.approx(kls) and kls[-1] > 0.25


def test_the_recorded_run_is_what_training_gives(example):
    recorded = example["read_runs"]()
    for name in ("PID", "fixed"):
        again = example["train"](example["START"][name](0.1), updates=15)
        assert again.kl == pytest.approx(recorded[name].kl[:15], rel=0.02, abs=1e-6)
        assert again.beta == pytest.approx(recorded[name].beta[:15], rel=0.02)
    assert recorded["fixed"].kl[-1] > 8 * example["TARGET"]
    settled = recorded["PID"].kl[200:]
    assert sum(settled) / len(settled) == pytest.approx(example["TARGET"], rel=0.03)
    assert max(abs(x / example["TARGET"] - 1) for x in settled) < 0.15
