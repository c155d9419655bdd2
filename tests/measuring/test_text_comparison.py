"""Comparing runs over text: documents, perplexities, warnings, and folders that are no measurements."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from command_words import words
from synthetic_run import synthetic_comparison
from tiny_models import save_tiny, tiny_tokenizer

from kleash.cli import main
from kleash.measuring import compare, measure
from kleash.records import RunFolder
from kleash.store.result_summaries import comparison_warnings
from kleash.store.statistics import PERPLEXITIES

WORDS = ("sea", "calm", "road", "long", "bird", "wire", "house", "town", "rain", "window", "night", "letter")


@pytest.fixture(scope="module")
def runs(pair, tmp_path_factory):
    """Two runs over the same documents, the models the other way round in the second, which has fewer of them."""
    folder = tmp_path_factory.mktemp("texts")
    source = folder / "text.txt"
    draw = np.random.default_rng(3)
    source.write_text("\n\n".join(" ".join(draw.choice(WORDS, 9)) for _ in range(12)))
    first, second = folder / "first", folder / "second"
    models = [{"policy": str(pair[at]), "reference": str(pair[1 - at])} for at in (0, 1)]
    measure(**models[0], text=source, window=24, stride=24, out=first)
    measure(**models[1], text=source, window=24, stride=24, limit=9, out=second)
    return first, second


def losses(run, documents):
    """For each document, its tokens and the sums of both models' negative log-probabilities and of their difference."""
    sums = np.zeros((documents, 4))
    for part in RunFolder(run).parts("tokens", ["prompt_id", "logp_policy", "logp_reference"]):
        for who, p, q in zip(part["prompt_id"], part["logp_policy"], part["logp_reference"], strict=True):
            if who < documents:
                sums[who] += [1.0, -float(p), -float(q), float(q) - float(p)]
    return dict(zip(("tokens", *PERPLEXITIES), sums.T, strict=True))


def test_perplexity_differences_have_jackknife_errors(runs):
    comparison = compare(runs)
    (difference,) = comparison.differences
    first, second = (losses(run, 9) for run in runs)
    for name in PERPLEXITIES:

        def at(keep, name=name):
            here, there = (np.exp(s[name][keep].sum() / s["tokens"][keep].sum()) for s in (second, first))
            return float(here - there)

        everything = np.arange(9)
        number = difference.differences[name]
        assert number.value == pytest.approx(at(everything), rel=1e-9)
        without = np.array([at(everything[everything != document]) for document in everything])
        jackknife = np.sqrt(8 / 9 * ((without - without.mean()) ** 2).sum())
        assert number.standard_error == pytest.approx(jackknife, rel=0.15)
        assert number.ci95[0] < number.value < number.ci95[1]
        of_run = comparison.runs[0].numbers[name]
        whole = losses(runs[0], 12)
        assert of_run.value == pytest.approx(np.exp(whole[name].sum() / whole["tokens"].sum()), rel=1e-9)


def test_a_comparison_on_text_counts_documents(runs, tmp_path, capsys):
    comparison = compare(runs)
    (difference,) = comparison.differences
    assert comparison.runs[0].source == "text"
    hashes = [
        key for part in RunFolder(runs[0]).parts("sequences", ["prompt_hash"]) for key in part["prompt_hash"]
    ]
    assert len(set(hashes)) == len(hashes)  # windows are paired by them
    assert comparison.runs[0].counts.sequences > comparison.runs[0].counts.prompts == 12
    assert (difference.shared_prompts, difference.only_here, difference.only_there) == (9, 0, 3)
    page = tmp_path / "c.html"
    assert main(["compare", *map(str, runs), "--out", str(page)]) == 0
    output = capsys.readouterr().out
    assert "documents" in output and "shared documents" in output and "prompt" not in output
    assert "estimand: of first, the first: KL(" in output and "one difference alone" in output
    html = page.read_text(encoding="utf-8")
    assert "9 shared documents" in html and "Perplexity ratio" in html and "shared prompts" not in html


def test_the_clusters_of_a_comparison_are_those_of_its_runs(pair, tmp_path):
    """Equal documents are one document, and few documents are split into blocks."""
    draw = np.random.default_rng(3)
    repeated, tails = " ".join(draw.choice(WORDS, 23)), [" ".join(draw.choice(WORDS, 300)) for _ in range(2)]
    source = tmp_path / "text.txt"
    source.write_text("\n\n".join([repeated, repeated, *tails]))
    for at in (0, 1):
        models = {"policy": str(pair[at]), "reference": str(pair[1 - at])}
        measure(**models, text=source, window=24, out=tmp_path / str(at) / "drift")
    comparison = compare([tmp_path / "0" / "drift", tmp_path / "1" / "drift"])
    (first, other), (difference,) = comparison.runs, comparison.differences
    assert (first.name, other.name) == ("0", "1"), "without what their folders have in common"
    number = difference.differences["kl_policy_reference"]
    blocks = first.counts.clusters
    assert blocks > first.counts.prompts == difference.shared_prompts == 3
    sums = np.zeros((2, 2, blocks))  # run, (tokens, total), cluster
    labels = {}
    for at in (0, 1):
        columns = ["prompt_id", "sample_id", "kl_policy_reference"]
        for part in RunFolder(tmp_path / str(at) / "drift").parts("tokens", columns):
            for document, window, value in zip(*part.values(), strict=True):
                # 0 and 1 are equal
                block = labels.setdefault((max(1, int(document)), int(window) // 8), len(labels))
                sums[at, :, block] += (1.0, float(value))
    tokens, totals = sums[:, 0], sums[:, 1]
    means = totals.sum(-1) / tokens.sum(-1)
    influence = np.diff((totals - means[:, None] * tokens) / tokens.sum(-1)[:, None], axis=0)[0]
    assert number.value == pytest.approx(means[1] - means[0], rel=1e-9)
    error = np.sqrt(blocks / (blocks - 1) * (influence**2).sum())
    assert number.standard_error == pytest.approx(error, rel=1e-6)
    assert sum("blocks of 8 neighbouring windows" in warning for warning in first.warnings) == 1
    assert not difference.warnings  # said of both runs already


def test_every_warning_is_in_the_terminal_compare_and_json(runs, tmp_path, capsys):
    shown = json.loads((runs[0] / "measurement.json").read_text())
    numbers = [*shown["per_token"].values(), *shown["perplexity"].values(), shown["top1_agreement"]]
    warnings = {warning for number in numbers for warning in number["warnings"]} | set(shown["warnings"])
    pieces = [re.split("[;0-9%]", warning.removeprefix("only ")) for warning in warnings]
    kinds = {next(piece.strip() for piece in parts if len(piece) > 6) for parts in pieces}
    assert kinds
    report = (runs[0] / "report.html").read_text(encoding="utf-8")
    job = shown["job"]
    options = {name: job[name] for name in ("policy", "reference", "text", "window", "stride")}
    capsys.readouterr()
    assert main(words("measure", **options, out=tmp_path / "run")) == 0
    terminal = capsys.readouterr().out
    assert main(["compare", str(runs[0]), str(runs[1]), "--json", "--out", str(tmp_path / "c.html")]) == 0
    compared = "\n".join(json.loads(capsys.readouterr().out)["runs"][0]["warnings"])
    for kind in kinds:
        assert kind in terminal and kind in compared and kind in report, kind


def test_the_summary_begins_with_the_interval_and_names_the_models(pair, tmp_path, capsys):
    source = tmp_path / "prompts.txt"
    source.write_text("The sea\nA long road\nIt is said")
    options = {"policy": pair[0], "reference": pair[1], "prompts": source, "max_new_tokens": 3}
    out = tmp_path / "run"
    assert main(words("measure", **options, out=out)) == 0
    lines = capsys.readouterr().out.splitlines()
    measured = json.loads((out / "measurement.json").read_text())
    assert lines[1].startswith("KL(policy ‖ reference) per token: ") and "(95 % interval " in lines[1]
    assert lines[2:5] == [f"policy: {pair[0]}", f"reference: {pair[1]}", "dtype: float32 on cpu"]
    text = " ".join(lines)
    assert f"{measured['counts']['truncated_sequences']} of them truncated" in text
    for name in ("Perplexity of the policy", "Δp of the observed token", "Noise floor (batching alone)"):
        assert name in text
    assert main(words("measure", **options, limit=1, out=tmp_path / "one")) == 0
    lines = capsys.readouterr().out
    assert "nan" not in lines.lower() and "no interval: one cluster alone" in lines


def test_a_tokenizer_mismatch_with_a_default_model_names_the_option(tmp_path, capsys):
    model = save_tiny(tmp_path / "model")
    source = tmp_path / "text.txt"
    source.write_text("The sea was calm")
    assert len(tiny_tokenizer()) < 1000
    for role, other in (("policy", "reference"), ("reference", "policy")):
        policy = {} if role == "policy" else {"policy": "shipped:policy"}
        models = {role: model, **policy}
        assert main(words("measure", **models, text=source, out=tmp_path / "run", quiet=True)) == 2
        error = capsys.readouterr().err
        assert "the tokenizers differ" in error and error.endswith(f"ships with kleash: give --{other}\n")


def test_a_comparison_says_a_warning_of_several_runs_once():
    """Also where its numerals differ, with their range, and what is said of a run is not repeated for a difference."""
    few, fewer = (f"only {count} clusters; below 30 the error itself is uncertain" for count in (12, 8))
    comparison = synthetic_comparison()
    difference = replace(
        comparison.differences[0],
        differences={
            name: replace(number, warnings=(fewer,))
            for name, number in comparison.differences[0].differences.items()
        },
        warnings=(),
    )
    runs = [
        replace(run, warnings=(warning, "the reference is gone"))
        for run, warning in zip(comparison.runs, (few, fewer, few), strict=True)
    ]
    warnings = comparison_warnings(
        replace(comparison, runs=tuple(runs), differences=(difference,), warnings=())
    )
    assert len(warnings) == 2
    assert warnings[0].startswith("step 100, step 400 and ")
    assert warnings[0].endswith("only 8 to 12 clusters; below 30 the error itself is uncertain")
