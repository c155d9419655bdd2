"""The page of an audit: every number, every sentence, and nothing that runs but kleash's own scripts."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from drawn_charts import curves, drawn, legend
from synthetic_audit import HOSTILE, drawn_audit, plain_audit, synthetic_audit

from kleash.auditing import audit
from kleash.reports import write_audits
from kleash.reports.audit import curve_charts


class Text(HTMLParser):
    """What a reader sees, and the tags it is made of."""

    def __init__(self, page):
        super().__init__()
        self.parts: list[str] = []
        self.tags: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        if self.cdata_elem is None:
            self.parts.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.parts))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_audits(
        tmp_path_factory.mktemp("audits") / "audit.html",
        [synthetic_audit(), plain_audit()],
        "kleash audit 'a b'",
    )


def test_the_page_contains_every_row(page):
    text = Text(page).text
    for seen in (
        "2 functions audited",
        "Backpropagated it follows KL(q ‖ p).",
        "wrong_gradient wrong",
        "It follows KL(q ‖ p).",
        "0.01235",
        "∞",
        "below -2.61",
        "above 11",
        "between -1 and 1.5",
        "0.4000",
        "q rules the token out",
        "gradient is NaN",
        "kleash audit 'a b'",
        "No findings.",
        "3.000 × 10⁻¹⁷",
    ):
        assert seen in text, seen


def test_untrusted_text_is_escaped(page):
    parsed = Text(page)
    assert "img" not in parsed.tags
    assert "script" not in parsed.tags
    assert HOSTILE in " ".join(parsed.parts)


def shaded(axes):
    """The ranges of x that are shaded."""
    return [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches]


def test_curves_of_value_and_gradient_have_the_correct_ones_and_shaded_flat_zones():
    charts = curve_charts(1, drawn_audit())
    value, gradient = (drawn(chart)[0] for chart in charts)
    assert list(curves(gradient)) == legend(gradient) == ["gradient", "log p − log q"]
    assert shaded(gradient) == [pytest.approx((-14.0, -2.6112)), pytest.approx((-1.0, 1.5))]
    assert shaded(gradient)[0][0] == value.get_xlim()[0] == -14
    assert shaded(value) == [pytest.approx((11.0, 14.0))]
    low, high = value.get_ylim()
    assert low < 0 and 10 < high < 50, "not as far as e^14"
    assert "where the gradient is zero or NaN: below -2.61, between -1 and 1.5 nats" in charts[1].description
    assert curve_charts(1, synthetic_audit()) == []


@pytest.mark.parametrize(("name", "convention"), [("k3", "loss"), ("k3", "mean_loss"), ("kl", "logits")])
def test_curves_have_points_enough_to_be_drawn_without_kinks(name, convention):
    def k3_of_tokens(token_logp, token_logq):
        log_ratio = token_logp - token_logq
        values = (-log_ratio).expm1() + log_ratio
        return values.mean() if convention == "mean_loss" else values

    def kl_of_logits(logits_p, logits_q):
        logp, logq = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
        return (logp.exp() * (logp - logq)).sum(-1)

    exact = {"k3": lambda u: np.expm1(-u) + u, "kl": lambda u: np.log(np.cosh(u / 2))}[name]
    charts = curve_charts(1, audit({"k3": k3_of_tokens, "kl": kl_of_logits}[name], convention))
    value, *others = (drawn(chart)[0] for chart in charts)
    (left, right), (low, high) = value.get_xlim(), value.get_ylim()
    between = np.linspace(left, right, 3001)
    for x, y in curves(value).values():
        at = np.interp(between, x, y)
        seen = (exact(between) < high) & (exact(between) > low)
        assert np.abs(at - exact(between))[seen].max() < 2e-3 * (high - low), "under a pixel of 300"
        assert np.interp(0, x, y) == pytest.approx(0, abs=1e-6)
    assert len(charts[0].rows) == (right - left) // 2 + 1, "the table has every second nat"
    assert sum(len(x) for axes in (value, *others) for x, _ in curves(axes).values()) < 1000


@pytest.mark.usefixtures("undrawn")
def test_findings_are_not_repeated_in_the_verdict(tmp_path):
    audit = drawn_audit()
    audit = replace(audit, verdict=("Its value is right.", *(f.sentence for f in audit.findings)))
    text = Text(write_audits(tmp_path / "one.html", [audit])).text
    assert text.count("It follows KL(q ‖ p).") == 1
    assert "Use another" in text, "what to change"


@pytest.mark.usefixtures("undrawn")
def test_many_functions_are_collapsed(tmp_path):
    parsed = Text(write_audits(tmp_path / "many.html", [plain_audit()] * 3 + [synthetic_audit()]))
    folded = Text(write_audits(tmp_path / "few.html", [plain_audit()] * 3))
    assert parsed.tags.count("details") - folded.tags.count("details") >= 4
    assert parsed.text.count("wrong_gradient") == 3, (
        "in the table of all, at its name and where it is explained"
    )


@pytest.mark.usefixtures("undrawn")
def test_a_single_audit_has_no_table_of_all_functions(tmp_path):
    text = Text(write_audits(tmp_path / "one.html", [plain_audit()])).text
    assert "All functions" not in text
    assert "Verdict" in text
