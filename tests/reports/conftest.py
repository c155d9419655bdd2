"""Run folders and their reports."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from synthetic_audit import drawn_audit, synthetic_audit
from synthetic_run import synthetic_comparison, write_synthetic_run
from synthetic_sweep import synthetic_sweep
from synthetic_training import write_hostile_run
from undrawn_charts import draw_charts

from kleash.records import Measurement
from kleash.reports import write_audits, write_comparison, write_report, write_training_report
from kleash.reports.sweep import write_sweep


@pytest.fixture
def undrawn() -> Iterator[None]:
    """Pages without charts, for tests that look at none; pages of a whole session were made before."""
    draw_charts(False)
    yield
    draw_charts(True)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Measurement]:
    """A run folder full of hostile text, and its measurement."""
    folder = tmp_path_factory.mktemp("runs") / "hostile"
    return folder, write_synthetic_run(folder)


@pytest.fixture(scope="session")
def report(run: tuple[Path, Measurement]) -> Path:
    """Its report."""
    return write_report(run[0])


@pytest.fixture(scope="session")
def comparison_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page that compares three runs, one of them with a hostile name."""
    return write_comparison(tmp_path_factory.mktemp("pages") / "comparison.html", synthetic_comparison())


@pytest.fixture(scope="session")
def sweep_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about a sweep with attributions, one candidate with a hostile and long name."""
    return write_sweep(tmp_path_factory.mktemp("sweeps") / "sweep.html", synthetic_sweep())


@pytest.fixture(scope="session")
def training_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a training run that is told in hostile words."""
    return write_training_report(write_hostile_run(tmp_path_factory.mktemp("training") / "run"))


@pytest.fixture(scope="session")
def audit_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about four audits, which are folded, two of them with hostile text wherever it takes text."""
    folder = tmp_path_factory.mktemp("audits")
    return write_audits(folder / "audit.html", [synthetic_audit(), drawn_audit()] * 2)
