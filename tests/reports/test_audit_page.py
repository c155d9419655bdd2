"""The page of an audit: every number, every sentence, and nothing that runs but kleash's own scripts."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic_audit import HOSTILE, drawn_audit, plain_audit, synthetic_audit

from kleash.records import Audit
from kleash.reports import write_audits
from kleash.reports.audit import accuracy_chart, bias, picture


class Text(HTMLParser):
    """What a reader sees, and the tags it is made of."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.tags: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is None:
            self.parts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.parts))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_audits(
        tmp_path_factory.mktemp("audits") / "audit.html",
        [synthetic_audit(), plain_audit()],
        "kleash audit 'a b'",
    )


def test_every_row_is_on_the_page(page: Path) -> None:
    text = Text(page).text
    for seen in (
        "2 functions audited",
        "Backpropagated it follows KL(q || p).",
        "wrong_gradient wrong",
        "It follows KL(q || p).",
        "0.01235",
        "∞",
        "below −2.611",
        "above 11.00",
        "−1.000 to 1.500",
        "q rules the token out",
        "gradient is NaN",
        "kleash audit 'a b'",
        "Nothing was found that contradicts",
        "3.000 × 10⁻¹⁷",
    ):
        assert seen in text, seen


def test_hostile_text_stays_text(page: Path) -> None:
    found = Text(page)
    assert "img" not in found.tags
    assert found.tags.count("script") == 2 + 1, "Plotly, the drawing, and the data of one chart"
    assert HOSTILE in " ".join(found.parts)


def test_the_picture_is_value_and_gradient_beside_the_right_ones_with_dead_zones_shaded() -> None:
    value, gradient = picture(1, drawn_audit())
    lines = {line["name"]: line for line in gradient.figure["data"]}
    assert set(lines) == {"log p − log q", "its gradient"}
    shapes = [(shape["x0"], shape["x1"]) for shape in gradient.figure["layout"]["shapes"]]
    assert shapes == [(-8.0, -2.6112), (-1.0, 1.5)]
    (shade,) = value.figure["layout"]["shapes"]
    assert shade["x0"] == 11.0 and shade["x1"] == pytest.approx(14.3)
    low, high = value.figure["layout"]["yaxis"]["range"]
    assert low < 0 and 10 < high < 50, "not as far as e^14"
    assert "shaded, where the gradient is zero: below −2.611, −1.000 to 1.500 nats" in gradient.described
    assert picture(1, synthetic_audit()) == []


def test_nothing_is_said_twice_and_rounding_is_0(tmp_path: Path) -> None:
    audit = drawn_audit()
    row = replace(audit.values[0], bias=1e-17)
    audit = replace(
        audit, values=(row,), verdict=("Its value is right.", *(f.sentence for f in audit.findings))
    )
    text = Text(write_audits(tmp_path / "one.html", [audit])).text
    assert text.count("It follows KL(q || p).") == 1
    assert bias(row) == "0" and bias(replace(row, bias=1e-3)) == "0.001000"
    assert "10⁻¹⁷ " not in text.partition("Its expected gradient")[0]
    assert "Use another" in text, "what to change"


def test_many_functions_are_folded(tmp_path: Path) -> None:
    found = Text(write_audits(tmp_path / "many.html", [plain_audit()] * 3 + [synthetic_audit()]))
    folded = Text(write_audits(tmp_path / "few.html", [plain_audit()] * 3))
    assert found.tags.count("details") - folded.tags.count("details") >= 4
    assert found.text.count("wrong_gradient") == 3, (
        "in the table of all, at its name and where it is explained"
    )


def test_one_audit_has_no_table_of_all(tmp_path: Path) -> None:
    text = Text(write_audits(tmp_path / "one.html", [plain_audit()])).text
    assert "All of them" not in text
    assert "Verdict" in text


def test_the_chart_names_the_largest_error_and_leaves_gaps_where_there_is_none() -> None:
    chart = accuracy_chart("accuracy", synthetic_audit())
    assert chart is not None
    assert "0.4000 of the value, with float32 inputs at 1.000 × 10⁻⁸ nats" in chart.described
    lines: list[dict[str, Any]] = chart.figure["data"]
    assert [line["name"] for line in lines] == [
        "float32",
        "float32, computed with care",
        "bfloat16",
        "bfloat16, computed with care",
    ]
    assert lines[0]["y"] == [0.4, 1e-9], "an error of nothing lies at the bottom"
    assert lines[2]["y"] == [None]
    assert lines[1]["y"] == [1e-6, 1e-7]


def test_what_was_not_measured_is_not_drawn() -> None:
    assert accuracy_chart("accuracy", plain_audit()) is None


def test_a_record_comes_back_from_its_text() -> None:
    before = synthetic_audit()
    after = Audit.from_json(before.to_json())
    assert after.to_json() == before.to_json()
    assert after.zones[0].low == float("-inf")
    assert replace(after, values=(), gradients=(), edges=(), masks=(), accuracy=()) == replace(
        before, values=(), gradients=(), edges=(), masks=(), accuracy=()
    )
