"""Results as CSV and Markdown: all digits, and no text of others that is more than text."""

import csv
import io
import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from page_text import Page
from synthetic_run import synthetic_comparison, synthetic_sweep

from kleash.records import Diagnosis, MismatchRecord, Number
from kleash.reports.formatting import make_visible
from kleash.reports.text_formats import (
    CSV_COLUMNS,
    escape_text,
    markdown_code,
    markdown_table,
    to_csv,
    to_markdown,
)
from kleash.store.number_rows import NumberRow, number_rows
from kleash.store.rollout_results import LABELS, LikelyCause
from kleash.store.summary import Name, Summary, SummaryTable, summarize
from kleash.store.sweep import Attribution

TABLES = ("a|b", "a\\|b", "a\\", 'quote " and, comma', "--- | ---", "line\nbreak | and more", "", " spaces ")
MARKUP = ("`code`", "``", "*bold* _under_ ~~gone~~", "# title", "1. item", "- item", "$x^2$", "@everyone")
HTML = ("<img src=x onerror=alert(1)>", "&lt;b&gt;", "[link](javascript:alert(1))", "![](http://x/y.png)")
HOSTILE = (*TABLES, *MARKUP, *HTML, "\u202eevil", "a\u2028b", "=HYPERLINK(1)")


def number(value, **more):
    return Number(
        **{"value": value, "unit": "nats", "standard_error": 0.1, "ci95": (value - 0.2, value + 0.2), **more}
    )


MISMATCH = MismatchRecord(
    kleash="0.1.0",
    file="a|b.jsonl",
    tokens=10,
    sequences=2,
    prompts=1,
    numbers=dict.fromkeys(LABELS, number(0.25)),
    values={"effective_sample_size": 9.5, "largest_log_ratio": math.inf},
)
CAUSE = LikelyCause(
    cause="temperature", meaning="a | b", probability=0.75, evidence="<b>", next_test="`t`", alike=("other",)
)
DIAGNOSIS = Diagnosis(
    kleash="0.1.0", file="r.jsonl", tokens=10, sequences=2, models=(), examined=True, findings=(CAUSE,)
)


@pytest.fixture(scope="module")
def results(run):
    comparison, sweep = synthetic_comparison(), synthetic_sweep(HOSTILE[:4], ("b|ad",))
    return [run[1], comparison, sweep, MISMATCH, DIAGNOSIS]


def test_every_number_of_a_result_is_a_row_with_all_of_its_digits(results):
    for result in results:
        rows = number_rows(result)
        read = list(csv.DictReader(io.StringIO(to_csv(rows), newline=""), strict=True))
        assert len(read) == len(rows) > 0 and tuple(read[0]) == CSV_COLUMNS
        for row, cells in zip(rows, read, strict=True):
            told = (cells["run"], cells["minus"], cells["name"], cells["unit"])
            assert told == (row.run, row.minus, row.name, row.unit)
            for name, value in row.numbers.items():
                read_value = float(cells[name]) if cells[name] else None
                assert read_value == value or (math.isnan(read_value) and math.isnan(value)), (row, name)
            assert cells["warnings"] == "; ".join(row.warnings)


def test_the_rows_of_a_measurement_are_the_numbers_of_its_json(run):
    measurement = replace(run[1], noise_floor=replace(run[1].noise_floor, warnings=("few", "short")))
    rows = {row.name: row for row in number_rows(measurement)}
    assert len(rows) == len(number_rows(measurement)), "a name stands for one number"
    data = measurement.to_dict()
    for name, stored in (
        ("kl_policy_reference", data["per_token"]["kl_policy_reference"]),
        ("perplexity_ratio", data["perplexity"]["ratio"]),
        ("top1_agreement", data["top1_agreement"]),
        ("sequence_kl_policy_reference", data["per_sequence"]["kl_policy_reference"]),
        ("estimator_k3", data["estimators"]["k3"]),
        ("estimator_k3_bias", data["estimators"]["k3"]["bias"]),
        ("kl_reference_policy_99.9", data["quantiles"]["kl_reference_policy"]["99.9"]),
        ("noise_floor", data["noise_floor"]),
        ("kl_policy_reference_by_position_2_to_4", data["by_position"][2]["kl"]),
    ):
        row = rows[name]
        assert (row.value, row.standard_error) == (stored["value"], stored["standard_error"])
        assert (*row.ci95, row.unit, *row.warnings) == (*stored["ci95"], stored["unit"], *stored["warnings"])
    assert rows["kl_policy_reference"].clusters == 40 and rows["noise_floor"].clusters is None
    assert set(data["per_token"]) | {f"estimator_{name}" for name in data["estimators"]} <= rows.keys()


def test_the_rows_of_a_sweep_have_both_intervals_of_a_pair_and_no_failed_candidate():
    rows = number_rows(synthetic_sweep())
    differences = [row for row in rows if row.minus]
    assert {(row.run, row.minus) for row in differences} == {("q8", "q6"), ("q8", "q4"), ("q6", "q4")}
    assert {row.name for row in differences} == {"kl_policy_reference", "kl_policy_reference_simultaneous"}
    assert [row.ci95 for row in differences if row.name.endswith("simultaneous")] == [(-1.0, -0.01)] * 3
    assert {row.value for row in rows if row.name == "bytes_on_disk"} == {8e9, 4e9, 8e9 // 3}
    assert "torn" not in {row.run for row in rows}


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t"])
def test_names_are_no_formulas_in_a_spreadsheet(start):
    name = f"{start}HYPERLINK(1)"
    row = NumberRow(run=name, minus=name, name="n", value=-0.5, warnings=(name,))
    (read,) = csv.DictReader(io.StringIO(to_csv([row])))
    assert [read[column] for column in ("run", "minus", "warnings")] == [f"'{name}"] * 3
    assert read["value"] == "-0.5"


def test_numbers_that_are_not_finite_are_spelt_as_in_json():
    text = to_csv([NumberRow(run="r", name="n", value=math.nan, ci95=(-math.inf, math.inf))])
    assert text.splitlines()[1] == "r,,n,NaN,,-Infinity,Infinity,none,,,"


def cells_of(markdown):
    """The texts of the cells of the first table, as a Markdown renderer that is not ours shows them."""
    html = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table").render(markdown)
    page = Page(html)
    assert {"table", "thead", "tbody", "tr", "td", "th", "code", "p", "strong", "ul", "li"} >= set(page.names)
    return page.cells


@pytest.mark.parametrize("kind", [Name, str])
def test_hostile_texts_in_tables_are_shown_as_they_stand(kind):
    rows = tuple((kind(text), str(at)) for at, text in enumerate(HOSTILE))
    summary = Summary(headline="h", tables=(SummaryTable(header=("name", "n"), rows=rows),))
    read = cells_of(to_markdown(summary))
    assert read[0] == ["name", "n"] and len(read) == len(HOSTILE) + 1
    for text, (cell, at), place in zip(HOSTILE, read[1:], range(len(HOSTILE)), strict=True):
        expected = make_visible(text) if text or kind is Name else ""
        assert (cell.replace("\u200b", "").strip(), at) == (expected.strip(), str(place))


@settings(max_examples=100)
@given(st.text(st.characters(codec="utf-8"), max_size=40))
@example(" a name that begins with a space")
def test_any_text_stays_text_in_its_cell(text):
    line = f"| a | b | c |\n| --- | --- | --- |\n| {markdown_code(text)} | {escape_text(text)} | 1 |\n"
    read = cells_of(line)
    expected = make_visible(text)
    assert [len(row) for row in read] == [3, 3] and read[1][2] == "1"
    assert read[1][0].split() == expected.split()
    assert read[1][1].replace("\u200b", "").split() == (expected.split() if text else [])


def test_hostile_texts_outside_of_tables_are_shown_as_they_stand(run):
    renderer = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    summary = Summary(headline="h", facts=(("f", "<b>|*x*"),), warnings=HOSTILE)
    html = renderer.render(to_markdown(summary, ["# note"]))
    assert html.count("<li>") == 1 + len(HOSTILE)
    assert "@everyone" not in escape_text("@everyone") and "&#8203;" in escape_text("@everyone")
    for text in HOSTILE:
        paragraph = renderer.render(escape_text(text))
        assert paragraph.count("<") == 2 * paragraph.count("<p>") <= 2, paragraph
    for tag in ("<img", "<h1", "<a ", "<em", "<del", "<ol", "<script", "<b>"):
        assert tag not in html
    assert "script" not in Page(renderer.render(to_markdown(summarize(run[1])))).names


def test_sentences_in_a_table_are_aligned_to_the_left():
    rows = ((Name("q4"), "1.5", "the policy lacks 1 of its weights, which would be random: model.layers.0"),)
    lines = markdown_table(SummaryTable(header=("candidate", "KL", "reason"), rows=rows)).splitlines()
    assert lines[1] == "| --- | ---: | --- |"


def test_every_kind_of_result_has_a_markdown_table(results):
    for result in results:
        rows = cells_of(to_markdown(summarize(result)))
        assert len(rows) > 1 and len({len(row) for row in rows}) <= 3, type(result)
    sweep_rows = cells_of(to_markdown(summarize(results[2])))
    assert [row[0] for row in sweep_rows[1:5]] == list(HOSTILE[:4])
    assert ["b|ad", "its weights are missing"] in sweep_rows
    attribution = Attribution(candidate=1, grouping="layers", tokens=9, clusters=1, warnings=("few",))
    told = summarize(replace(results[2], attributions=(attribution,)))
    assert ("attributed on", "9 tokens, 1 independent cluster") in told.facts
    assert told.warnings[-1] == f"on {HOSTILE[0]} by layers: few"
    with pytest.raises(TypeError, match="int is no result"):
        summarize(3)


def test_one_cluster_has_no_interval_in_a_table(run):
    summary = summarize(replace(run[1], counts=replace(run[1].counts, clusters=1)))
    assert {row[2] for row in summary.tables[0].rows} == {"unknown"}
    assert "unknown" not in {row[2] for row in summarize(run[1]).tables[0].rows}
