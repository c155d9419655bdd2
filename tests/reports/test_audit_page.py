"""The page of an audit: every number, every sentence, and nothing that runs but kleash's own scripts."""

from dataclasses import replace

import numpy as np
import pytest
from drawn_charts import curves, drawn, legend
from page_text import Page
from synthetic_audit import HOSTILE, drawn_audit, plain_audit, synthetic_audit

from kleash.auditing import audit
from kleash.reports import write_audits
from kleash.reports.audit import curve_charts


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("audits") / "audit.html"
    return Page(write_audits(path, [synthetic_audit(), plain_audit()], "kleash audit 'a b'"))


def test_the_page_contains_every_row(page):
    words = ["2 functions audited", "Backpropagated it follows KL(q ‖ p).", "wrong_gradient wrong"]
    words += ["It follows KL(q ‖ p).", "q rules the token out", "gradient is NaN", "No findings."]
    words += ["below -2.61", "above 11", "between -1 and 1.5", "kleash audit 'a b'"]
    for seen in (*words, "0.01235", "∞", "0.4000", "3.000 × 10⁻¹⁷"):
        assert seen in page.words, seen


def test_untrusted_text_is_escaped(page):
    assert not {"img", "script"} & set(page.names)
    assert HOSTILE in " ".join(page.texts)


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
    text = Page(write_audits(tmp_path / "one.html", [audit])).words
    assert text.count("It follows KL(q ‖ p).") == 1
    assert "Use another" in text, "what to change"


@pytest.mark.usefixtures("undrawn")
def test_many_functions_are_collapsed(tmp_path):
    parsed = Page(write_audits(tmp_path / "many.html", [plain_audit()] * 3 + [synthetic_audit()]))
    folded = Page(write_audits(tmp_path / "few.html", [plain_audit()] * 3))
    assert parsed.names.count("details") - folded.names.count("details") >= 4
    # in the table of all, at its name and where it is explained
    assert parsed.words.count("wrong_gradient") == 3


@pytest.mark.usefixtures("undrawn")
def test_a_single_audit_has_no_table_of_all_functions(tmp_path):
    text = Page(write_audits(tmp_path / "one.html", [plain_audit()])).words
    assert "All functions" not in text and "Verdict" in text
