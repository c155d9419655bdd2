"""Run folders, their reports, and a browser that opens them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic_audit import plain_audit, synthetic_audit
from synthetic_run import synthetic_comparison, write_synthetic_run

from kleash.records import Measurement
from kleash.reports import write_audits, write_comparison, write_report

FLAGS = (
    "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    "disable-component-update disable-sync"
)


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
def audit_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about two audits, one of them with hostile text wherever it takes text."""
    folder = tmp_path_factory.mktemp("audits")
    return write_audits(folder / "audit.html", [synthetic_audit(), plain_audit()])


@pytest.fixture(scope="session")
def driver(chromium: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Headless Chromium without a network."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium[0]
    for flag in FLAGS.split():
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.set_capability("unhandledPromptBehavior", "ignore")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=chromium[1]))
    try:
        browser.execute_cdp_cmd("Network.enable", {})
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        yield browser
    finally:
        browser.quit()
