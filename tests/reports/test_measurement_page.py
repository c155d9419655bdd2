"""The pages as files: whole, escaped, complete, and made without torch."""

import base64
import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from page_text import Page
from synthetic_run import HOSTILE, synthetic_comparison, write_synthetic_run

from kleash.errors import RunFolderError
from kleash.records import Number, RunFolder
from kleash.reports import write_comparison, write_report
from kleash.reports.heatmap import read_sequences
from kleash.reports.measurement import join_tokens, token_row
from kleash.reports.page import script_json
from kleash.store.measurement import PromptDrift, SequenceTotal
from kleash.store.summary import cells, with_error


@pytest.fixture(scope="module")
def outline(report):
    return Page(report)


def test_the_page_has_the_headline_and_every_section(outline, run):
    measurement = run[1]
    number = measurement.per_token["kl_policy_reference"]
    assert number.rounded in outline.text
    assert number.format(number.ci95[0]) in outline.text
    for sentence in (measurement.estimand, *measurement.warnings, *measurement.notes):
        assert sentence in outline.text
    parts = ("Noise floor", "Per sequence", "Total variation", "Perplexity ratio", "99.9 %", "Top-1")
    for part in (*parts, "KL(policy ‖ reference); 95 % interval"):
        assert part in outline.text
    assert "kleash measure" in outline.text and f"finished {measurement.finished}. All" in outline.text
    assert "Shown: the 50 of 80 responses with the largest KL" in outline.text


@pytest.mark.parametrize("name", ["report", "comparison_page"])
def test_the_page_loads_no_other_resource(request, name):
    page = Page(request.getfixturevalue(name))
    assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "object", "embed", "base")]
    for tag, attributes in page.tags:
        assert not attributes.keys() & {"src", "srcset", "action", "formaction"}, tag
        assert all(not name.startswith("on") for name in attributes), tag
        assert attributes.get("href", "#").startswith("#")


@pytest.mark.parametrize("name", ["report", "comparison_page"])
def test_only_our_scripts_may_run(request, name):
    page = Page(request.getfixturevalue(name))
    (policy,) = (m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    promised = re.findall(r"'sha256-([^']+)'", policy)
    running = [text for attributes, text in page.scripts if "type" not in attributes]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in running]
    assert digests == promised
    assert len(running) == (2 if name == "report" else 0)
    assert promised or "script-src 'none'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    data = [attributes["type"] for attributes, _ in page.scripts if "type" in attributes]
    assert set(data) == ({"application/json"} if name == "report" else set()), "the token view's"


def test_untrusted_text_is_escaped(report, outline):
    assert not [tag for tag, attributes in outline.tags if "onerror" in attributes]
    source = report.read_text(encoding="utf-8")
    for bad in ("<script>alert", "<script>window", "<img", "<!--<script>", "<b onmouseover", "&amp;amp;amp;"):
        assert bad not in source
    assert not {"\u202e", "\x1b"}.intersection(source)
    assert "<script>alert('prompt')</script>" in outline.text
    assert "49" not in re.findall(r"\{\{ .*? \}\}|49(?= raw)", outline.text)


def test_json_between_script_tags_survives_anything():
    value = {"texts": [*HOSTILE, "\ud800", "]]>"], "numbers": [math.inf, -math.inf, math.nan, 0.1]}
    text = script_json(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"texts": value["texts"], "numbers": ["Infinity", "-Infinity", "NaN", 0.1]}


@pytest.mark.parametrize("name", ["report", "comparison_page"])
def test_the_page_is_accessible_to_screen_readers(request, name):
    page = Page(request.getfixturevalue(name))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert {"header", "nav", "main", "footer"} <= set(page.names)
    assert len(page.all("table")) == len(page.all("caption"))
    for attributes in page.all("div"):
        if attributes.get("class") == "plot":
            assert attributes["role"] == "img" and len(attributes["aria-label"]) > 40
    for attributes in page.all("section"):
        assert attributes.get("aria-labelledby") in ids or attributes.get("aria-label")
    links = {attributes["href"] for attributes in page.all("a")}
    references = {attributes["xlink:href"] for attributes in page.all("use")}
    references |= set(re.findall(r"url\((#\w+)\)", str(page.tags)))
    assert references and {link.removeprefix("#") for link in references if link} <= set(ids)
    assert {link.removeprefix("#") for link in links if link} <= set(ids)
    assert page.all("html")[0]["lang"] == "en"


def test_a_rebuilt_report_is_the_same(run, report):
    before = report.read_bytes()
    report.unlink()
    assert write_report(run[0]) == report
    assert report.read_bytes() == before
    assert not list(run[0].glob(".writing-*"))


@pytest.mark.usefixtures("undrawn")
def test_the_table_of_prompts_says_that_there_are_more(tmp_path):
    folder = tmp_path / "run"
    many = tuple(
        PromptDrift(prompt_id=at, prompt=f"prompt {at}", sequences=1, tokens=9, kl_per_token=1 / (at + 1),
                    kl_per_sequence=1.0, kl_max=1.0)
        for at in range(500)
    )  # fmt: skip
    measurement = write_synthetic_run(folder, prompts=3, tokens=8, hostile=False)
    counts = replace(measurement.counts, prompts=5000)
    RunFolder(folder).write_measurement(replace(measurement, prompts=many, counts=counts))
    page = Page(write_report(folder))
    assert "The 500 of 5 000 prompts with the largest KL are listed" in page.text
    assert "prompt 499" in page.text


def changed(tmp_path, **changes):
    folder = tmp_path / "run"
    write_synthetic_run(folder, prompts=3, tokens=8, hostile=False, changes=changes)
    return Page(write_report(folder))


def test_infinite_and_nan_numbers_are_shown(tmp_path):
    endless = Number(value=math.inf, unit="nats", standard_error=math.nan, ci95=(math.nan, math.nan))
    unknown = Number(value=math.nan, unit="nats", standard_error=math.nan, ci95=(math.nan, math.nan))
    steps = dict.fromkeys(("50", "max"), endless)
    page = changed(
        tmp_path,
        per_token={"kl_policy_reference": endless, "kl_reference_policy": unknown},
        quantiles={"kl_policy_reference": steps},
        prompts=(PromptDrift(prompt_id=0, prompt="p", sequences=1, tokens=2, kl_per_token=math.inf,
                             kl_per_sequence=math.nan, kl_max=math.inf),),
    )  # fmt: skip
    assert "∞ nats" in page.text.replace("\xa0", " ")
    assert "NaN" in page.text and len(page.all("svg")) == 5


@pytest.mark.usefixtures("undrawn")
def test_a_model_compared_with_itself_has_a_report(tmp_path):
    zero = Number(value=0.0, unit="nats", standard_error=0.0, ci95=(0.0, 0.0))
    numbers = {"per_token": {"kl_policy_reference": zero}, "noise_floor": zero}
    numbers["quantiles"] = {"kl_policy_reference": dict.fromkeys(("50", "99", "max"), zero)}
    page = changed(tmp_path, **numbers, worst_tokens=(), worst_sequences=())
    assert "no rounding difference" in page.text and "Shown: the" not in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_run_on_text_uses_the_noun_document_and_shows_the_estimators_note(tmp_path):
    page = changed(
        tmp_path,
        job={"text": "corpus.txt"},
        per_sequence=None,
        estimators={},
        estimators_note="left out: the text's tokens were not drawn",
        noise_floor=None,
    )
    assert (
        "windows of 3 documents" in page.text and "Left out: the text's tokens were not drawn." in page.text
    )
    assert "Noise floor" not in page.text and "Per sequence" not in page.text


@pytest.mark.usefixtures("undrawn")
def test_warnings_are_listed_once_before_the_table_of_means_and_in_the_row_of_their_number(tmp_path):
    warning = "one prompt carries 31 % of the variance"
    number = Number(value=0.1, unit="nats", standard_error=0.01, ci95=(0.08, 0.12), warnings=(warning,))
    total = replace(number, warnings=(warning, "another"))
    parts = dict.fromkeys(("monte_carlo", "exact_terms", "largest_token"), total)
    whole = SequenceTotal(kl_policy_reference=total, control_variate_weight=1.0, **parts)
    per_token = {"kl_policy_reference": number, "jensen_shannon": replace(number, warnings=("3 clusters",))}
    page = changed(tmp_path, per_token=per_token, per_sequence=whole, warnings=(warning, "other"))
    before = page.text.partition("All means KL")[0]
    assert before.count(warning) == 1 and "other" in before
    assert "on the KL per sequence: another" in before
    assert page.text.count("Warning: 3 clusters") == 1


def test_a_token_row_has_its_context_and_probabilities(run):
    rows, worst = {}, run[1].worst_tokens
    names = ["prompt_id", "sample_id", "position", "text", "logp_policy", "logp_reference", "rank_reference"]
    for part in RunFolder(run[0]).parts("tokens", names):
        for values in zip(*(part[name] for name in names), strict=True):
            rows[tuple(int(value) for value in values[:3])] = values[3:]
    assert worst
    for drift in worst:
        key = drift.prompt_id, drift.sample_id
        tokens = read_sequences(RunFolder(run[0]), [key])
        row = token_row(drift, tokens, {(*key, drift.position - 1)})
        before = [rows[(*key, at)][0] for at in range(max(0, drift.position - 10), drift.position)]
        after = [rows[place][0] for at in range(1, 5) if (place := (*key, drift.position + at)) in rows]
        assert (row["before"], row["after"]) == (join_tokens(before), join_tokens(after))
        assert bool(row["before"]) is any(before)
        _, p, q, rank = rows[(*key, drift.position)]
        assert (row["p"], row["q"]) == pytest.approx((math.exp(p), math.exp(q)), rel=1e-12)
        assert row["rank"] == rank and row["is_shown"] is False
        assert token_row(drift, tokens, {(*key, drift.position)})["is_shown"] is True


def test_the_page_of_a_run_of_many_tokens_is_small(tmp_path):
    """Also of few long sequences, of which many tokens are drawn beside the context of those with the largest KL."""
    measurement = write_synthetic_run(tmp_path, prompts=26, samples=1, tokens=1300, hostile=False)
    assert measurement.counts.tokens > 24_000
    assert write_report(tmp_path).stat().st_size < 1_500_000


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_one_of_its_files_raises(tmp_path):
    write_synthetic_run(tmp_path, prompts=3, tokens=8, hostile=False)
    (tmp_path / "alternatives.parquet").unlink()
    with pytest.raises(RunFolderError, match=r"alternatives\.parquet cannot be read"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_lone_surrogate_in_a_path_and_one_sign_of_negative_numbers_are_rendered(tmp_path):
    comparison = synthetic_comparison()
    run = replace(comparison.runs[0], folder=os.fsdecode(b"caf\xe9"))
    difference = comparison.differences[0]
    numbers = {name: replace(number, value=-1.5) for name, number in difference.differences.items()}
    changed = replace(
        comparison,
        runs=(run, *comparison.runs[1:]),
        differences=(replace(difference, differences=numbers), *comparison.differences[1:]),
        warnings=("half \udce9",),
    )
    page = Page(write_comparison(tmp_path / "page.html", changed))
    assert "caf⟨U+DCE9⟩" in page.text and "half \\udce9" in page.text
    assert "−1.5" in page.text and "-1.5" not in page.text


def test_a_comparison_states_direction_and_shared_prompts(comparison_page):
    text = Page(comparison_page).text
    assert "difference from the first" in text and "shared prompts" in text
    difference = synthetic_comparison().differences[0]
    number = difference.differences["kl_policy_reference"]
    assert f"{with_error(number)}{cells(number)[1]}{difference.shared_prompts}" in text
    assert "sources differ" in text and "few shared prompts" in text and "points" in text


def test_a_report_is_made_without_torch(run):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pathlib import Path\nfrom kleash.reports import write_report\n"
        "print(write_report(Path(sys.argv[1])).stat().st_size)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(run[0])], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) < 1_500_000
