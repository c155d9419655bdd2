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
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import HOSTILE, synthetic_comparison, write_synthetic_run

from kleash.errors import RunFolderError
from kleash.records import Measurement, Number, RunFolder
from kleash.reports import write_comparison, write_report
from kleash.reports.heatmap import read_sequences
from kleash.reports.measurement import join_tokens, token_row
from kleash.reports.page import script_json
from kleash.store.measurement import PromptDrift, SequenceTotal
from kleash.store.summary import cells, with_error


class Outline(HTMLParser):
    """Tags with their attributes, and the text outside of scripts."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts.append((self.tags[-1][1], data))
        elif self.cdata_elem is None:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.texts))

    def all(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.tags if name == tag)


@pytest.fixture(scope="module")
def outline(report: Path) -> Outline:
    return Outline(report)


def test_the_page_has_the_headline_and_every_section(outline: Outline, run: tuple[Path, Measurement]) -> None:
    measurement = run[1]
    number = measurement.per_token["kl_policy_reference"]
    assert number.rounded in outline.text
    assert number.format(number.ci95[0]) in outline.text
    for sentence in (measurement.estimand, *measurement.warnings, *measurement.notes, measurement.finished):
        assert sentence in outline.text
    for part in (
        "Noise floor",
        "Per sequence",
        "Total variation",
        "Perplexity ratio",
        "k3",
        "99.9 %",
        "Top-1",
    ):
        assert part in outline.text
    assert "kleash measure" in outline.text
    assert "Shown: the 50 of 80 responses with the largest KL" in outline.text


@pytest.mark.parametrize("name", ["report", "comparison_page"])
def test_the_page_loads_no_other_resource(request: pytest.FixtureRequest, name: str) -> None:
    page = Outline(request.getfixturevalue(name))
    assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "object", "embed", "base")]
    for tag, attributes in page.tags:
        assert not attributes.keys() & {"src", "srcset", "action", "formaction"}, tag
        assert all(not name.startswith("on") for name in attributes), tag
        assert attributes.get("href", "#").startswith("#")


@pytest.mark.parametrize("name", ["report", "comparison_page"])
def test_only_our_scripts_may_run(request: pytest.FixtureRequest, name: str) -> None:
    page = Outline(request.getfixturevalue(name))
    policy = next(
        tag["content"] for tag in page.all("meta") if tag.get("http-equiv") == "Content-Security-Policy"
    )
    promised = re.findall(r"'sha256-([^']+)'", policy or "")
    running = [text for attributes, text in page.scripts if "type" not in attributes]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in running]
    assert digests == promised
    assert len(running) == (2 if name == "report" else 0)
    assert promised or "script-src 'none'" in (policy or "")
    assert "default-src 'none'" in (policy or "")
    assert "unsafe-inline" not in (policy or "").partition("script-src")[2].partition(";")[0]
    data = [attributes["type"] for attributes, _ in page.scripts if "type" in attributes]
    assert set(data) == ({"application/json"} if name == "report" else set()), "the token view's"


def test_untrusted_text_is_escaped(report: Path, outline: Outline) -> None:
    assert not {"b", "img"} & {
        tag for tag, attributes in outline.tags if attributes.get("onerror") is not None
    }
    source = report.read_text(encoding="utf-8")
    for bad in ("<script>alert", "<script>window", "<img", "<!--<script>", "<b onmouseover", "&amp;amp;amp;"):
        assert bad not in source
    assert "<script>alert('prompt')</script>" in outline.text
    assert "49" not in re.findall(r"\{\{ .*? \}\}|49(?= raw)", outline.text)


def test_json_between_script_tags_survives_anything() -> None:
    value = {"texts": [*HOSTILE, "\ud800", "]]>"], "numbers": [math.inf, -math.inf, math.nan, 0.1]}
    text = script_json(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {
        "texts": value["texts"],
        "numbers": ["Infinity", "-Infinity", "NaN", 0.1],
    }


@pytest.mark.parametrize("name", ["report", "comparison_page"])
def test_the_page_is_accessible_to_screen_readers(request: pytest.FixtureRequest, name: str) -> None:
    page = Outline(request.getfixturevalue(name))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert {"header", "nav", "main", "footer"} <= {tag for tag, _ in page.tags}
    assert len(list(page.all("table"))) == len(list(page.all("caption")))
    for attributes in page.all("div"):
        if attributes.get("class") == "plot":
            assert attributes["role"] == "img"
            assert len(attributes["aria-label"] or "") > 40
    for attributes in page.all("section"):
        assert attributes.get("aria-labelledby") in ids or attributes.get("aria-label")
    links = {attributes["href"] for attributes in page.all("a")}
    references = {attributes["xlink:href"] for attributes in page.all("use")}
    references |= set(re.findall(r"url\((#\w+)\)", str(page.tags)))
    assert references and {link.removeprefix("#") for link in references if link} <= set(ids)
    assert {link.removeprefix("#") for link in links if link} <= set(ids)
    assert next(page.all("html"))["lang"] == "en"


def test_a_rebuilt_report_is_the_same(run: tuple[Path, Measurement], report: Path) -> None:
    before = report.read_bytes()
    report.unlink()
    assert write_report(run[0]) == report
    assert report.read_bytes() == before
    assert not list(run[0].glob(".writing-*"))


@pytest.mark.usefixtures("undrawn")
def test_the_table_of_prompts_is_limited_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    many = tuple(
        PromptDrift(prompt_id=at, prompt=f"prompt {at}", sequences=1, tokens=9, kl_per_token=1 / (at + 1),
                    kl_per_sequence=1.0, kl_max=1.0)
        for at in range(700)
    )  # fmt: skip
    measurement = write_synthetic_run(folder, prompts=3, tokens=8, hostile=False)
    counts = type(measurement.counts)(**{**vars(measurement.counts), "prompts": 5000})
    changed = Measurement(**{**vars(measurement), "prompts": many, "counts": counts})
    RunFolder(folder).write_measurement(changed)
    page = Outline(write_report(folder))
    assert "The 500 of 5 000 prompts with the largest KL are listed" in page.text
    assert "prompt 499" in page.text
    assert "prompt 500" not in page.text


def changed(tmp_path: Path, **changes: Any) -> Outline:
    folder = tmp_path / "run"
    write_synthetic_run(folder, prompts=3, tokens=8, hostile=False, changes=changes)
    return Outline(write_report(folder))


def test_infinite_and_nan_numbers_are_shown(tmp_path: Path) -> None:
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
    assert "NaN" in page.text
    assert len(list(page.all("svg"))) == 5


@pytest.mark.usefixtures("undrawn")
def test_a_model_compared_with_itself_has_a_report(tmp_path: Path) -> None:
    zero = Number(value=0.0, unit="nats", standard_error=0.0, ci95=(0.0, 0.0))
    page = changed(
        tmp_path,
        per_token={"kl_policy_reference": zero},
        quantiles={"kl_policy_reference": dict.fromkeys(("50", "99", "max"), zero)},
        worst_tokens=(),
        worst_sequences=(),
        noise_floor=zero,
    )
    assert "no rounding difference" in page.text
    assert "Shown: the" not in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_run_on_text_uses_the_noun_document_and_shows_the_estimators_note(tmp_path: Path) -> None:
    page = changed(
        tmp_path,
        job={"text": "corpus.txt"},
        per_sequence=None,
        estimators={},
        estimators_note="left out: the text's tokens were not drawn",
        noise_floor=None,
    )
    assert "windows to 3 documents" in page.text
    assert "Left out: the text's tokens were not drawn." in page.text
    assert "Noise floor" not in page.text
    assert "Per sequence" not in page.text


@pytest.mark.usefixtures("undrawn")
def test_warnings_are_listed_once_before_the_table_of_means(tmp_path: Path) -> None:
    warning = "one prompt carries 31 % of the variance"
    number = Number(value=0.1, unit="nats", standard_error=0.01, ci95=(0.08, 0.12), warnings=(warning,))
    total = Number(**{**vars(number), "warnings": (warning, "another")})
    whole = SequenceTotal(
        kl_policy_reference=total, control_variate_weight=1.0, monte_carlo=total, exact_terms=total
    )
    page = changed(
        tmp_path, per_token={"kl_policy_reference": number}, per_sequence=whole, warnings=(warning, "other")
    )
    before = page.text.partition("All means KL")[0]
    assert before.count(warning) == 1
    assert "other" in before
    assert "on the KL per sequence: another" in before


@pytest.mark.usefixtures("undrawn")
def test_a_number_s_warnings_are_in_its_row(tmp_path: Path) -> None:
    number = Number(value=0.1, unit="nats", standard_error=0.01, ci95=(0.08, 0.12))
    warned = Number(value=0.1, unit="nats", standard_error=0.01, ci95=(0.08, 0.12), warnings=("3 clusters",))
    page = changed(tmp_path, per_token={"kl_policy_reference": number, "jensen_shannon": warned})
    assert page.text.count("Warning: 3 clusters") == 1


@pytest.mark.usefixtures("undrawn")
def test_the_number_of_shortened_sequences_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kleash.reports.heatmap.MAX_TOKENS_OF_SEQUENCE", 3)
    assert "6 of them only in part" in changed(tmp_path).text


def test_a_token_row_has_its_context_and_probabilities(run: tuple[Path, Measurement]) -> None:
    rows = {}
    names = ["prompt_id", "sample_id", "position", "text", "logp_policy", "logp_reference", "rank_reference"]
    for part in RunFolder(run[0]).parts("tokens", names):
        for values in zip(*(part[name] for name in names), strict=True):
            rows[tuple(int(value) for value in values[:3])] = values[3:]
    for drift in run[1].worst_tokens:
        assert drift.position is not None
        key = drift.prompt_id, drift.sample_id
        tokens = read_sequences(RunFolder(run[0]), [key])
        row = token_row(drift, tokens, {(*key, drift.position - 1)})
        before = [rows[(*key, at)][0] for at in range(max(0, drift.position - 10), drift.position)]
        assert row["before"] == join_tokens(before)
        assert bool(row["before"]) is any(before)
        text, p, q, rank = rows[(*key, drift.position)]
        assert text == drift.text
        assert row["p"] == pytest.approx(math.exp(p), rel=6e-4)
        assert row["q"] == pytest.approx(math.exp(q), rel=6e-4)
        assert row["rank"] == rank
        assert row["is_shown"] is False
        assert token_row(drift, tokens, {(*key, drift.position)})["is_shown"] is True


def test_the_page_of_a_run_of_many_tokens_is_small(tmp_path: Path) -> None:
    """Also of few long sequences, of which many tokens are drawn beside the context of those with the largest KL."""
    measurement = write_synthetic_run(tmp_path, prompts=26, samples=1, tokens=1300, hostile=False)
    assert measurement.counts.tokens > 24_000
    assert write_report(tmp_path).stat().st_size < 1_500_000


@pytest.mark.usefixtures("undrawn")
def test_an_unfinished_run_raises(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"has no measurement\.json; is it a run folder\?"):
        write_report(tmp_path)
    folder = tmp_path / "run"
    write_synthetic_run(folder, prompts=3, tokens=8, hostile=False)
    (folder / "alternatives.parquet").unlink()
    with pytest.raises(RunFolderError, match=r"alternatives\.parquet cannot be read"):
        write_report(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_lone_surrogate_in_a_path_is_rendered(tmp_path: Path) -> None:
    comparison = synthetic_comparison()
    run = type(comparison.runs[0])(**{**vars(comparison.runs[0]), "folder": os.fsdecode(b"caf\xe9")})
    page = Outline(
        write_comparison(
            tmp_path / "page.html",
            type(comparison)(
                **{**vars(comparison), "runs": (run, *comparison.runs[1:]), "warnings": ("half \udce9",)}
            ),
        )
    )
    assert "caf⟨U+DCE9⟩" in page.text
    assert "half \\udce9" in page.text


def test_a_comparison_states_direction_and_shared_prompts(comparison_page: Path) -> None:
    text = Outline(comparison_page).text
    assert "difference from the first" in text and "shared prompts" in text
    difference = synthetic_comparison().differences[0]
    number = difference.differences["kl_policy_reference"]
    assert f"{with_error(number)}{cells(number)[1]}{difference.shared_prompts}" in text
    assert "sources differ" in text
    assert "few shared prompts" in text
    assert "points" in text


def test_a_report_is_made_without_torch(run: tuple[Path, Measurement]) -> None:
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
