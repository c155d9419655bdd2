"""The figures of the controllers: the page shows what was written down, and they are within the bars."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return runpy.run_path(str(ROOT / "benchmarks" / "controllers.py"))


@pytest.fixture(scope="module")
def cases():
    return json.loads((RESULTS / "controllers.json").read_text())["figures"]["cases"]


def test_page_contains_the_tables(benchmark, cases):
    page = (ROOT / "docs" / "beta.md").read_text(encoding="utf-8")
    for table in ("settled_table", "peak_table"):
        assert "\n".join(benchmark[table](cases)) in page, "run: python benchmarks/controllers.py"


def test_figures_are_within_the_bars(cases):
    for case in cases:
        if case["beta"] != 0.1:
            assert abs(case["settled"] - 1) < (0.15 if case["noise"] == 0.5 else 0.1), case
        if case["controller"] == "pid" and case["noise"] <= 0.3 and case["beta"] != 0.1:
            assert case["within"] >= 0.85, case
        if case["beta"] == 1.0:
            most = 2.3 if case["lag"] else 1.3 if case["controller"] == "pid" else 1.8
            assert case["peak"] < most, case


def test_a_case_is_simulated_again(benchmark, cases):
    """Without noise a case is one run, which no seed changes."""
    case = next(
        x for x in cases if (x["controller"], x["gain"], x["beta"], x["noise"]) == ("pid", 0.3, 0.3, 0.0)
    )
    run = benchmark["follow"](
        benchmark["START"]["pid"](0.3), benchmark["Case"](0.3, 0, 0.3, 0.0), 0, "reported"
    )
    assert (run.settled, run.peak) == pytest.approx((case["settled"], case["peak"]), rel=1e-9)
