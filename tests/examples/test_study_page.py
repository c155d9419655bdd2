"""The estimator study as a page, as a command and as documentation: the same numbers everywhere."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from estimator_study import __main__ as command
from estimator_study.__main__ import main
from estimator_study.page import (
    case_chart,
    densities_chart,
    findings,
    fit_cells,
    noise_chart,
    row_cells,
    write_study,
)
from estimator_study.results import Study
from estimator_study.study import estimator_study, markdown
from synthetic_run import write_synthetic_run

from kleash.records import Number
from kleash.store.codec import decode


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """The whole study, with a run whose models have hostile names."""
    folder = tmp_path_factory.mktemp("study") / "run"
    write_synthetic_run(folder, prompts=31, tokens=96)
    return estimator_study(folder)


@pytest.fixture(scope="session")
def study_page(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("pages") / "study.html", study)


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
    assert f"{study.normals.crossing:.3f} nats" in text
    seeking = study.case("two-modes-seeking")
    assert f"{100 * seeking.row('k2').bias.value / seeking.kl.value:.0f} %".replace("-", "−") in text


def test_every_row_is_on_the_page(study: Study, study_page: Path) -> None:
    text = study_page.read_text(encoding="utf-8")
    for case in study.cases:
        table = text[text.index(f'<h3 id="{case.name}">') :]
        for row in case.rows:
            cells = row_cells(case, row)
            line = f'<th scope="row">{escaped(cells[0])}</th>' + "".join(
                f'<td class="n">{escaped(cell)}</td>' for cell in cells[1:]
            )
            assert line in table[: table.index("</table>")], (case.name, row.name)
    for fit in (study.two_modes.start, *study.two_modes.projections, *study.two_modes.descents):
        assert "".join(f'<td class="n">{cell}</td>' for cell in fit_cells(fit)[1:]) in text
    for sentence in findings(study):
        assert escaped(sentence) in text


def escaped(text: str) -> str:
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&#39;"), ('"', "&#34;")):
        text = text.replace(character, entity)
    return text


def test_model_names_are_escaped(study_page: Path) -> None:
    text = study_page.read_text(encoding="utf-8")
    assert "runs/&lt;script&gt;alert(&#39;path&#39;)&lt;/script&gt;/policy" in text
    assert "<script>alert" not in text
    figures = re.findall(r'<script type="application/json" id="(figure-[^"]+)">(.*?)</script>', text)
    assert len(figures) == 15
    for name, figure in figures:
        assert json.loads(figure)["data"], name


def test_cells_format_exact_sampled_tiny_and_infinite_numbers(study: Study) -> None:
    near, run = study.case("normals-0.1"), study.case("run")
    assert row_cells(near, near.row("k1"))[1:] == ("0.005000", "0", "20.00", "48.01 %", "100 %")
    assert row_cells(near, near.row("k2"))[1:] == ("0.005013", "0.2500 %", "1.418", "0", "0")
    assert row_cells(near, near.row("k3"))[5] == "10.0 %"
    cells = row_cells(run, run.row("k1"))
    assert all(re.fullmatch(r"−?[\d.]+ ± [\d.]+( %)?", cell) for cell in cells[1:5]), cells
    assert cells[5] == "–"
    small = Number(value=5e-9, unit="nats", standard_error=0.0, ci95=(5e-9, 5e-9))
    shown = row_cells(near, replace(near.row("k2"), bias=small, gradient_error=1e-6))
    assert (shown[2], shown[5]) == ("0.0001000 %", "0.000100 %")
    rounding = replace(small, value=-5e-15)
    assert row_cells(near, replace(near.row("k2"), bias=rounding, gradient_error=1e-12))[2::3] == ("0", "0")
    infinite = Number(value=float("inf"), unit="nats", standard_error=float("nan"), ci95=(0.0, 0.0))
    assert row_cells(near, replace(near.row("k1"), value=infinite))[1] == "∞"


def test_a_study_round_trips_through_json(study: Study) -> None:
    assert decode(Study, json.loads(study.to_json())) == study
    with pytest.raises(KeyError):
        study.case("none")
    with pytest.raises(KeyError):
        study.cases[0].row("none")


def test_findings_quote_the_numbers(study: Study) -> None:
    values, biased, gradients, along = findings(study)
    assert "0.628 nats" in values and "a single k3 varies by 1.42" in values
    assert "a single k1 by 20.0; at 4.5 nats by 20.0 and 0.667" in values
    assert "0.250 % too large at 0.005 nats" in biased and "225 % at 4.5" in biased
    assert "standard deviation 0.604" in gradients and "covers both (2.05)" in gradients
    assert "by 53 to 19\u202f877" in along and "0.600 % to 12.2 %" in along


def test_charts_show_the_rows(study: Study) -> None:
    case = study.case("normals-1")
    chart = case_chart(case)
    dots = chart.figure["data"][0]
    assert dots["x"] == pytest.approx([row.value.value / 0.5 for row in case.rows])
    assert dots["error_x"]["array"] == pytest.approx(
        [row.standard_deviation.value / 0.5 for row in case.rows]
    )
    assert "k1 is the noisiest, at 2.00 times" in chart.description
    low, high = chart.figure["layout"]["xaxis"]["range"]
    assert low < -1 and high > 3
    seeking = case_chart(study.case("two-modes-seeking"))
    assert "The standard deviation of k3 and kl_loss is cut off" in seeking.description
    assert seeking.figure["layout"]["xaxis"]["range"][1] < 2
    noise = noise_chart(study.normals)
    assert [line["name"] for line in noise.figure["data"]] == ["k1", "k2", "k3"]
    assert noise.figure["layout"]["shapes"][0]["x0"] == study.normals.crossing
    drawn = densities_chart(study.two_modes).figure["data"]
    assert drawn[0]["y"] == list(study.two_modes.target)
    assert [line["name"] for line in drawn[2:]] == [fit.name for fit in study.two_modes.projections]


def test_the_command(
    study: Study,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requested_runs: list[Path | None] = []

    def precomputed_study(run: Path | None) -> Study:
        requested_runs.append(run)
        return study

    monkeypatch.setattr(command, "estimator_study", precomputed_study)
    page = tmp_path / "study.html"
    assert main(["--run", "some/run", "--out", str(page)]) == 0
    output = capsys.readouterr()
    assert requested_runs == [Path("some/run")] and page.exists()
    assert f"page: {page}" in output.err
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


@pytest.mark.browser
def test_nothing_overflows_and_every_chart_is_drawn(study_page: Path, driver: object) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    for width in (1280, 390):
        view = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", view)
        driver.get_log("browser")
        driver.get(study_page.as_uri())
        WebDriverWait(driver, 60).until(
            lambda browser: browser.execute_script(
                "return document.documentElement.dataset.charts === 'drawn'"
            )
        )
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        assert driver.execute_script("return document.querySelectorAll('.plot .main-svg').length") >= 15
        assert driver.get_log("browser") == []
