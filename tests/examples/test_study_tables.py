"""The estimator study as a command and as documentation: the same numbers in both."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from estimator_study import __main__ as command
from estimator_study.__main__ import main
from estimator_study.results import Study
from estimator_study.study import estimator_study, markdown
from synthetic_run import write_synthetic_run

from kleash.store.codec import decode


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """The whole study, with a run whose models have hostile names."""
    folder = tmp_path_factory.mktemp("study") / "run"
    write_synthetic_run(folder, prompts=31, tokens=96)
    return estimator_study(folder)


def test_every_table_of_the_readme_is_recomputed(study: Study, root: Path) -> None:
    text = (root / "examples/estimator_study/README.md").read_text(encoding="utf-8")
    written = [line for line in text.splitlines() if line.startswith(("| ", "### "))]
    without_run = replace(study, cases=study.cases[:-1])
    computed = [line for line in markdown(without_run).splitlines() if line.startswith(("| ", "### "))]
    assert written == computed
    assert len(computed) > 120


def test_numbers_in_the_prose_match_the_tables(study: Study, root: Path) -> None:
    text = " ".join((root / "examples/estimator_study/README.md").read_text(encoding="utf-8").split())
    ratios = [
        (case.row("k1").standard_deviation.value / case.row("exact").standard_deviation.value) ** 2
        for case in study.cases
        if case.name.startswith("markov-")
    ]
    assert f"by {min(ratios):.0f} (logits 1 ×" in text
    assert f"{max(ratios):,.0f}".replace(",", " ") + " (0.05 ×" in text
    assert f"{study.noise_crossing:.3f} nats" in text
    seeking = study.case("two-modes-seeking")
    assert f"{100 * seeking.row('k2').bias.value / seeking.kl.value:.0f} %".replace("-", "−") in text


def test_a_study_round_trips_through_json(study: Study) -> None:
    assert decode(Study, json.loads(study.to_json())) == study
    with pytest.raises(KeyError):
        study.case("none")
    with pytest.raises(KeyError):
        study.cases[0].row("none")


def test_the_command(
    study: Study, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requested_runs: list[Path | None] = []

    def precomputed_study(run: Path | None) -> Study:
        requested_runs.append(run)
        return study

    monkeypatch.setattr(command, "estimator_study", precomputed_study)
    assert main(["--run", "some/run"]) == 0
    output = capsys.readouterr()
    assert requested_runs == [Path("some/run")]
    assert "N(0, 1) against N(0.1, 1): KL 0.005 nats" in output.out
    assert re.search(r"k1\s+0\.005000\s+0\s+20\.00\s+48\.01 %\s+100 %", output.out)
    assert main(["--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["cases"][0]["kl"]["value"] == pytest.approx(0.005)
    assert data["cases"][-1]["rows"][0]["gradient_error"] is None


def test_a_folder_that_is_no_run_gives_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--run", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"estimator_study: {tmp_path} has no measurement.json")
