"""The example of controllers that begin at a KL of 0: its table, its fit and its plants are what they say."""

import math
import runpy
from pathlib import Path

import pytest

from kleash.leash import FixedBeta

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "beta_from_zero.py"))


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "beta.md").read_text(encoding="utf-8").splitlines()


def test_the_line_of_pid_is_the_one_in_the_docs(example, page):
    assert "| " + " | ".join(example["PLANT_HEADS"]) + " |" in page
    (row,) = example["table"](names=["PID"])
    assert "| " + " | ".join(row) + " |" in page


def test_the_recorded_runs_are_those_in_the_docs(example, page, capsys):
    example["main"](["--recorded"])
    printed = capsys.readouterr().out.splitlines()
    begins = page.index(printed[0])
    assert page[begins : begins + len(printed)] == printed and len(printed) > 3


def test_the_heavy_plant_is_what_fits_the_recorded_run(example):
    fitted, off = example["fit"](example["read_runs"]()["PID of small gains"])
    assert tuple(example["Heavy"]()) == pytest.approx(tuple(fitted), rel=0.01)
    assert off == pytest.approx(0.26, abs=0.01)


def test_each_plant_is_held_by_the_beta_that_is_said_to_hold_it(example):
    root = math.sqrt(example["TARGET"])
    for plant, right in (example["paced"](1 / 50, 40), example["heavy"](2.0)):
        state = example["State"](root)
        assert plant(state, right).root == pytest.approx(root, rel=1e-12)
        assert plant(state, 1.1 * right).root < root < plant(state, right / 1.1).root


def test_the_paced_plant_by_hand(example):
    plant, _ = example["paced"](1 / 10, 40)
    still = example["follow"](plant, FixedBeta(beta=1.0), updates=300)
    pace = [min(1.0, (update / 40) ** 2) for update in range(30)]
    assert still[:30] == pytest.approx(pace, rel=1e-12), "its pace, until a tenth of the way is less"
    assert still[-1] == pytest.approx(1.0, rel=1e-6) and example["settled"](still) < 80
    assert example["overshoot"](still) == 0.0
