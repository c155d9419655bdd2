"""The pages of training in a real browser: drawn, quiet, inert, and readable on a phone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_training import write_hostile_run

from kleash.reports.folder_report import write_report_of

selenium = pytest.importorskip("selenium")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

pytestmark = pytest.mark.browser

PAGES: dict[str, Callable[[Path], Path]] = {
    "run": write_hostile_run,
}


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report_of(PAGES[request.param](tmp_path_factory.mktemp("pages") / request.param))


def visit(driver: Any, page: Path, *, phone: bool = False) -> None:
    size = {"width": 360 if phone else 1280, "height": 800, "deviceScaleFactor": 1, "mobile": phone}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get_log("browser")
    driver.get(page.as_uri())
    drawn = "return document.documentElement.dataset.charts === 'drawn'"
    WebDriverWait(driver, 20).until(lambda browser: browser.execute_script(drawn))


def test_it_opens_without_a_word_in_the_console_and_nothing_runs(driver: Any, page: Path) -> None:
    visit(driver, page)
    assert driver.get_log("browser") == []
    assert driver.execute_script("return window.__pwned") is None
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_every_chart_is_drawn(driver: Any, page: Path) -> None:
    visit(driver, page)
    places = driver.find_elements(By.CSS_SELECTOR, "[data-figure]")
    assert len(places) >= 5
    for place in places:
        assert place.find_elements(By.CSS_SELECTOR, "svg .trace"), place.get_attribute("data-figure")


def test_on_a_phone_nothing_but_tables_is_wider_than_the_screen(driver: Any, page: Path) -> None:
    visit(driver, page, phone=True)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 360
