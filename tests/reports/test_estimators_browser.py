"""The interactive page of the estimators against sums in float64, and the tables of the site, in a real browser."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax, rel_entr

selenium = pytest.importorskip("selenium")

pytestmark = pytest.mark.browser

PAGE = Path(__file__).resolve().parents[2] / "docs" / "_static" / "estimators.html"
NUMBERS = """
const texts = row => [...row.cells].map(cell => cell.textContent);
const rows = id => [...document.getElementById(id).tBodies[0].rows].map(texts);
return {
    kl: ["kl-pq", "kl-qp"].map(id => Number(document.getElementById(id).dataset.value)),
    values: rows("values"), slopes: rows("slopes"), overflow: document.documentElement.scrollWidth - innerWidth,
};
"""
MOVE = """
const slider = document.getElementById(arguments[0]);
slider.value = arguments[1];
slider.dispatchEvent(new Event("input", {bubbles: true}));
"""
BARS = """
const bars = [...document.querySelectorAll("#h-k1 rect")];
return bars.map(bar => [+bar.getAttribute("x") + 3.5, +bar.getAttribute("height")]);
"""
START = ([2, 0.5, 0, -1], [0, 0.5, 0, 1])


def opened(driver: Any, width: int = 1280, scheme: str = "light") -> dict[str, Any]:
    """What the page shows at ``width``."""
    view = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", view)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get_log("browser")
    driver.get(PAGE.as_uri())
    return driver.execute_script(NUMBERS)


def check(shown: dict[str, Any], p_logits: list[float], q_logits: list[float], n: int) -> None:
    """The numbers of the page against sums over the four tokens, and gradients against finite differences."""
    logp, logq = log_softmax(np.array([p_logits, q_logits], dtype=np.float64), -1)
    p, q = np.exp(logp), np.exp(logq)
    assert shown["kl"] == pytest.approx([rel_entr(p, q).sum(), rel_entr(q, p).sum()], rel=1e-12)

    functions = {"k1": lambda u: u, "k2": lambda u: u**2 / 2, "k3": lambda u: np.exp(-u) - 1 + u}
    each = {name: function(logp - logq) for name, function in functions.items()}
    for name, *cells in shown["values"]:
        mean = (p * each[name]).sum()
        sd = np.sqrt((p * (each[name] - mean) ** 2).sum() / n)
        assert [float(cell) for cell in cells] == pytest.approx([mean, mean - shown["kl"][0], sd], abs=6e-5)

    def differences(function: Any) -> list[float]:
        steps = 1e-5 * np.eye(4)
        return [float((function(p_logits + h) - function(p_logits - h)) / 2e-5) for h in steps]

    expected = {"KL(p ‖ q)": differences(lambda z: rel_entr(np.exp(log_softmax(z)), q).sum())}
    for name, function in functions.items():
        expected[name] = differences(lambda z, f=function: (p * f(log_softmax(z) - logq)).sum())
    for name, *cells in shown["slopes"]:
        assert [float(cell) for cell in cells[:4]] == pytest.approx(expected[name], abs=6e-5), name
    assert float({name: cells for name, *cells in shown["slopes"]}["k2"][4]) == 1


def test_the_numbers_are_the_sums_and_follow_a_slider(driver: Any) -> None:
    first = opened(driver)
    check(first, *START, n=16)
    driver.execute_script(MOVE, "p0", -1.5)
    driver.execute_script(MOVE, "n", 2)
    moved = driver.execute_script(NUMBERS)
    assert moved["kl"] != first["kl"] and moved["values"] != first["values"]
    check(moved, [-1.5, 0.5, 0, -1], START[1], n=4)
    opened(driver)
    driver.execute_script(MOVE, "n", 10)
    centres, heights = np.array(driver.execute_script(BARS)).T
    line = driver.execute_script("return +document.querySelector('#h-k1 line').getAttribute('x1')")
    assert (centres * heights).sum() / heights.sum() == pytest.approx(line, abs=6), "the mean of k1"
    assert driver.get_log("browser") == []


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_it_fits_a_phone_and_a_desktop(driver: Any, width: int, scheme: str) -> None:
    assert opened(driver, width, scheme)["overflow"] <= 0
    background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 28)"}[scheme]
    assert driver.get_log("browser") == []


def test_it_is_small_and_fetches_nothing() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.encode()) <= 25_000
    assert not any(word in text for word in ("src=", "href=", "fetch(", "@import", "XMLHttpRequest", "url("))


@pytest.mark.parametrize(("width", "is_cards"), [(390, True), (1280, False)])
def test_a_table_of_the_site_is_cards_on_a_phone(
    driver: Any, tmp_path: Path, width: int, is_cards: bool
) -> None:
    rows = "<thead><tr><th>name<th>unit<th>meaning</thead><tbody><tr><td>kl<td>nats<td>KL per token</tbody>"
    code = (
        f'<style>.pre {{ white-space: nowrap }}</style><code><span class="pre">{"kleash." * 20}</span></code>'
    )
    style, script = (PAGE.with_name(name).read_text(encoding="utf-8") for name in ("site.css", "tables.js"))
    view = f'<meta name="viewport" content="width={width}">{code}<style>{style}</style>'
    page = f'{view}<article class="bd-article"><table>{rows}</table></article><script>{script}</script>'
    (tmp_path / "page.html").write_text(page)
    opened(driver, width)
    driver.get((tmp_path / "page.html").as_uri())
    named = "return getComputedStyle(document.querySelector('[data-heading=unit]'), '::before').content"
    assert (driver.execute_script(named) != "none") == is_cards
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
