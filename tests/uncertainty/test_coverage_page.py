"""The coverage tables of docs/uncertainty.md: they and the sentences about them hold the stored figures."""

import re
import runpy
from pathlib import Path
from typing import Any

import make_uncertainty_page as maker
import pytest


@pytest.fixture(scope="module")
def benchmark(root: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "benchmarks")
        return runpy.run_path(str(root / "benchmarks" / "coverage.py"))


def test_the_page_has_the_figures_that_the_benchmark_stored() -> None:
    text, figures = maker.PAGE.read_text(encoding="utf-8"), maker.figures()
    assert maker.page(text, figures) == text, "run: python tools/make_uncertainty_page.py"
    first = figures["means"][0]
    first["coverage"]["kleash"] += 0.01
    assert maker.page(text, figures) != text
    prose = " ".join(text.split())
    assert f"({figures['measurements']:,} simulated measurements".replace(",", " ") in prose
    (good_to,) = re.findall(r"a cell is good to ±([\d.]+)", prose)
    assert (
        f"{100 * (0.25 / figures['measurements']) ** 0.5:.1f}" == good_to
    )  # the standard error of a share of 1/2


def test_the_sentences_beside_the_tables_are_true() -> None:
    text, means = " ".join(maker.PAGE.read_text(encoding="utf-8").split()), maker.figures()["means"]

    def shares(spread: float, name: str, where: Any) -> list[float]:
        return [
            100 * one["coverage"][name] for one in means if one["spread"] == spread and where(one["clusters"])
        ]

    (words,) = re.findall(
        r"From 16 clusters on \*kleash\* covers (\d+) to (\d+) %; on 8 it covers (\d+) to (\d+)", text
    )
    many, few = shares(1.0, "kleash", lambda n: n >= 16), shares(1.0, "kleash", lambda n: n == 8)
    assert [f"{x:.0f}" for x in (min(many), max(many), min(few), max(few))] == list(words)
    assert "need 32 clusters for 95 % coverage" in text
    assert min(shares(1.5, "kleash", lambda n: n >= 32)) >= 95 > max(shares(1.5, "kleash", lambda n: n < 32))
    assert max(shares(1.5, "clustered", lambda n: n <= 512)) < 95


def test_the_benchmark_simulates_what_it_says(benchmark: dict[str, Any]) -> None:
    """The truth is 1, and an interval of 1.96 independent errors misses it where samples of a prompt are alike."""
    row = benchmark["cell"](32, 16, 1.0, 200, 0)
    assert (row["clusters"], row["samples"], row["spread"]) == (32, 16, 1.0)
    assert row["coverage"]["plain"] < 0.6 < 0.85 < row["coverage"]["kleash"] <= 1
    assert row["median_width"]["plain"] < row["median_width"]["clustered"] < row["median_width"]["kleash"]
    sums, counts = benchmark["simulate"](benchmark["np"].random.default_rng(0), (2000, 4, 3), 0.5)
    assert abs(sums.sum((0, 1)) / counts.sum((0, 1)) - 1).max() < 0.1
    assert counts.min() == 16 and counts.max() == 128
    quantiles = benchmark["quantile_row"](32, 20, 0)["coverage"]
    assert set(quantiles) == {"0.5", "0.9", "0.99"} and min(quantiles.values()) > 0.6
