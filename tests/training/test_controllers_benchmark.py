"""The figures of what controllers reach: the command runs, and the page shows what was written down."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "controllers.json"


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return runpy.run_path(str(ROOT / "benchmarks" / "controllers.py"))


def test_page_contains_table_and_figure(benchmark):
    figures = json.loads(RESULT.read_text())["figures"]
    page = (ROOT / "docs" / "beta.md").read_text(encoding="utf-8")
    assert "\n".join(benchmark["table"](figures["runs"])) in page
    drawn = (ROOT / "docs" / "images" / "controllers.svg").read_text(encoding="utf-8")
    assert drawn == benchmark["picture"](figures), "run: python benchmarks/controllers.py --draw"


def test_every_controller_reaches_its_target():
    runs = json.loads(RESULT.read_text())["figures"]["runs"]
    assert len(runs) == 9 and all(abs(run["settled"] - 1) < 0.15 for run in runs)
    for run in runs:
        mean = sum(run["kl"][-15:]) / 15
        assert run["settled"] == pytest.approx(mean / 8, rel=1e-3) and len(run["kl"]) == 50
