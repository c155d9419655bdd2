"""Charts in a page: their SVG is text of the page, in its colours, and equal for equal data."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
from synthetic_run import HOSTILE

from kleash.reports.drawing import VARIABLES, Chart, band, dots, name_axes, name_rows, to_svg
from kleash.store import Number

NUMBER = Number(value=0.5, unit="nats", standard_error=0.1, ci95=(0.3, 0.7))
PLAIN = ("$x_1^{$", "\\frac{1}{2}", "]]>", "#1d5c96", 'style="fill: #1d5c96"', "日本語 🙂", "_name")


def chart_of(*names, name="one"):
    """A chart with a row of each name, a band and a title."""

    def panel(axes):
        band(axes, [0, 1], [0, 0], [1, 1])
        dots(axes, [(NUMBER, row) for row in range(len(names))], horizontal=True)
        name_rows(axes, names)
        name_axes(axes, "nats", "row")

    return Chart(
        name=name, title="Title", panels=(panel,), height=8, description="", header=("a",), rows=(("b",),)
    )


def test_any_name_is_one_text_of_the_page():
    svg = to_svg(chart_of(*HOSTILE, *PLAIN, "\udc80"))
    texts = [text.text for text in ET.fromstring(svg.replace("xlink:", "")).iter("text")]
    for name in (*PLAIN, "⟨U+DC80⟩"):
        assert name in texts, name
    assert "<script" not in svg and "<img" not in svg and "<b " not in svg
    assert any("alert(1)</script>" in (text or "") for text in texts)


def test_colours_are_those_of_the_page_s_theme():
    svg = to_svg(chart_of("a"))
    variables = set(re.findall(r"var\(--([\w-]+)\)", svg))
    assert {"accent", "accent-band", "chart-ink", "chart-grid"} <= variables
    assert not re.search("#[0-9a-f]{6}", svg), "no colour that stays in the dark"
    css = (Path(__file__).parents[2] / "src/kleash/reports/assets/style.css").read_text(encoding="utf-8")
    light = css.partition("@media")[0]
    for colour, variable in VARIABLES.items():
        name = variable.removeprefix("var(").removesuffix(")")
        value = re.search(f"{name}: ([^;]+);", light)
        if name != "--accent-band":  # translucent in the page
            assert value[1] == colour


def test_equal_charts_give_equal_bytes_and_ids_of_others_differ():
    first, again, other = (to_svg(chart_of("a", name=name)) for name in ("one", "one", "two"))
    assert first == again
    ids, others = (set(re.findall(r'id="([^"]+)"', svg)) for svg in (first, other))
    assert ids and others and not ids & others
    for name in ids:
        assert f"#{name}" in first, "an id that nothing refers to"


def test_the_user_s_settings_of_matplotlib_neither_matter_nor_change():
    with matplotlib.rc_context({"axes.linewidth": 7.0, "text.usetex": True, "text.parse_math": True}):
        before = dict(matplotlib.rcParams)
        svg = to_svg(chart_of("$a$"))
        assert dict(matplotlib.rcParams) == before
    assert svg == to_svg(chart_of("$a$"))
