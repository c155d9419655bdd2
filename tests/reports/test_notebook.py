"""Results in notebooks: every text is text, and nothing is loaded or run."""

import math
from dataclasses import replace

import pytest
from page_text import Page
from synthetic_audit import synthetic_audit
from synthetic_run import HOSTILE, synthetic_comparison, synthetic_sweep

from kleash.errors import printable
from kleash.records import Diagnosis, MismatchRecord, Number, TrainingResult
from kleash.store.rollout_results import LABELS, LikelyCause
from kleash.store.summary import Name, Summary, SummaryTable, to_html

TAGS = {"div", "table", "thead", "tbody", "tr", "th", "td", "code", "bdi", "details", "summary", "ul", "li"}
NUMBER = Number(
    value=0.25, unit="nats", standard_error=0.1, ci95=(0.05, 0.45), warnings=("one cluster alone",)
)


def shown(html):
    """The page of HTML, after a look at its tags: they are closed, and load and run nothing."""
    page = Page(html)
    assert page.open == [] and set(page.names) <= TAGS
    for tag, attributes in page.tags:
        assert attributes.keys() <= {"style", "open"}, tag
        assert not any("url(" in (value or "") for value in attributes.values())
    return page


@pytest.fixture(scope="module")
def results(run):
    cause = LikelyCause(cause="a", meaning=HOSTILE[0], probability=0.5, evidence="<b>", next_test="")
    shared = {"kleash": "0.1.0", "file": HOSTILE[1], "tokens": 1, "sequences": 1}
    mismatch = MismatchRecord(**shared, prompts=1, numbers=dict.fromkeys(LABELS, NUMBER), values={})
    told = {"stopped": "<b>", "policy": HOSTILE[0], "out": HOSTILE[4]}
    told["metrics"] = {"time/step": 0.5, "beta": 0.1, "reward/score": 2.0, "reward/score_error": 0.25}
    return [
        run[1],
        synthetic_comparison(),
        synthetic_sweep(HOSTILE[:5], ("</div><script>",)),
        mismatch,
        replace(mismatch, renamed={"k<b>": math.inf}),
        Diagnosis(**shared, models=(HOSTILE[2],), examined=True, findings=(cause,)),
        Diagnosis(**shared, models=(), examined=False, findings=(), notes=("<i>few</i>",)),
        synthetic_audit(),
        TrainingResult(kleash="0.1.0", algorithm="ppo", steps=3, **told),
    ]


def test_every_result_is_shown_with_its_numbers_and_no_foreign_markup(results):
    for result in results:
        html = result._repr_html_()
        assert shown(html).texts and len(html) < 60_000, type(result)
        assert repr(result).count("\n") < 6 and "see ." in repr(result), type(result)
        assert "0 warnings" not in repr(result) and "0 notes" not in repr(result)
    (measurement, comparison, sweep, mismatch, *_) = (shown(result._repr_html_()) for result in results)
    kl = next(row for row in measurement.cells if row[0] == "KL(policy ‖ reference)")
    assert kl == ["KL(policy ‖ reference)", "0.235", "0.207 to 0.264", "0.014", "nats"]
    assert "only 40 clusters: the interval leans on few prompts" in measurement.texts
    names = ["step 100", "step 400", "<script>alert('run')</script>"]
    assert [row[0] for row in comparison.cells] == 2 * ["run", *names]  # both directions of the KL
    assert [row[0] for row in sweep.cells[1:6]] == list(HOSTILE[:5])
    none = shown(synthetic_sweep((), ("a", "b"))._repr_html_())
    assert ["a", "its weights are missing"] in none.cells, "of which all failed"
    assert mismatch.cells[1][:2] == ["KL(engine ‖ trainer)", "0.25"]
    last = shown(results[-1]._repr_html_()).cells
    assert last[1:3] == [["reward/score", "2.00 ± 0.25", "reward"], ["beta", "0.1", ""]]
    assert "policy" in results[-1].summary() and "policy" not in replace(results[-1], policy="").summary()


@pytest.mark.parametrize("kind", [Name, str])
def test_any_text_stays_in_its_cell(kind):
    texts = (*HOSTILE, "\udc80")
    rows = tuple((kind(text), "1") for text in texts)
    page = shown(to_html(Summary(headline="h", tables=(SummaryTable(header=("n", "v"), rows=rows),))))
    assert [row[0] for row in page.cells[1:]] == [*map(printable, HOSTILE), "\ufffd"]


def test_colours_are_those_of_the_page(results):
    for result in results:
        html = result._repr_html_().replace("color:inherit", "").replace("rgba(128,128,128,.4)", "")
        assert "color:" not in html and "background:" not in html.replace("background:none", "")
