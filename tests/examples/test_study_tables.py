"""The estimator study as a command and as documentation: the same numbers in both."""

import subprocess
import sys

import pytest
from estimator_study.results import Study
from estimator_study.study import estimator_study


@pytest.fixture(scope="module")
def study() -> Study:
    return estimator_study()


def test_every_table_of_the_readme_is_printed_by_the_command(root):
    text = (root / "examples/estimator_study/README.md").read_text(encoding="utf-8")
    written = [line for line in text.splitlines() if line.startswith(("| ", "### "))]
    command = [sys.executable, str(root / "examples/estimator_study")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert written == [line for line in printed.splitlines() if line.startswith(("| ", "### "))]
    assert len(written) > 100


def test_numbers_in_the_prose_match_the_tables(study, root):
    text = " ".join((root / "examples/estimator_study/README.md").read_text(encoding="utf-8").split())
    cases = [case for case in study.cases if case.name.startswith("markov-")]
    spreads = [[case.row(name).standard_deviation for name in ("k1", "exact")] for case in cases]
    ratios = [(k1 / exact) ** 2 for k1, exact in spreads]
    assert f"by {min(ratios):.0f} (logits 1 ×" in text
    assert f"{max(ratios):,.0f}".replace(",", " ") + " (0.05 ×" in text
    assert f"{study.noise_crossing:.3f} nats" in text
    seeking = study.case("two-modes-seeking")
    assert f"{100 * seeking.row('k2').bias / seeking.kl:.0f} %".replace("-", "−") in text
