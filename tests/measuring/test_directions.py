"""Which direction of the KL a result is about: the headline by its source, and the gate by ``--direction``."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import write_sweep_folder
from synthetic_sweep import nats, synthetic_sweep

from kleash.cli import main
from kleash.errors import OptionError
from kleash.jobs import MeasureJob, SweepJob
from kleash.measuring import compare, measure
from kleash.measuring.progress import ProgressReporter
from kleash.records import Measurement, Number, RunFolder, summarize
from kleash.reports.gate_verdicts import describe_sweep_gate, gate_of_sweep
from kleash.reports.text_formats import model_card
from kleash.store.sweep import SweepCandidate

POLICY, REFERENCE = "kl_policy_reference", "kl_reference_policy"
LABELS = {POLICY: "KL(policy ‖ reference)", REFERENCE: "KL(reference ‖ policy)"}


class LastKL(ProgressReporter):
    """Keeps the last running KL."""

    kl: Number | None = None

    def update_kl(self, kl):
        self.kl = kl


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, pair, prompts):
    """A run of text and one of prompts, by their headlines."""
    out = tmp_path_factory.mktemp("directions")
    (out / "text.txt").write_text("\n\n".join(f"Boat {n} went out {n * n} times." for n in range(40)))
    models = {"policy": str(pair[0]), "reference": str(pair[1]), "batch_tokens": 256}
    return {
        REFERENCE: MeasureJob(**models, text=str(out / "text.txt"), out=str(out / "text")),
        POLICY: MeasureJob(**models, prompts=str(prompts), max_new_tokens=6, out=str(out / "prompts")),
    }


@pytest.fixture(scope="module")
def runs(jobs):
    for name, job in jobs.items():
        reporter = LastKL()
        measured = measure(replace(job, until_relative_error=1e-6), reporter)
        assert reporter.kl.value == pytest.approx(measured.per_token[name].value, rel=1e-9)
    return {name: Path(str(job.out)) for name, job in jobs.items()}


@pytest.mark.parametrize("name", [POLICY, REFERENCE])
def test_every_number_of_the_headline_is_of_the_direction_of_the_source(runs, name):
    measured = Measurement.read(runs[name])
    parts = list(RunFolder(runs[name]).parts("tokens", ["prompt_id", "position", POLICY, REFERENCE]))
    tokens = {key: np.concatenate([part[key] for part in parts]).astype(float) for key in parts[0]}
    kl, other = tokens[name], tokens[REFERENCE if name == POLICY else POLICY]
    assert measured.headline == name and abs(kl.mean() - other.mean()) > 1e-3 * kl.mean()
    assert list(measured.statistics())[:2] == [name, REFERENCE if name == POLICY else POLICY]
    assert measured.per_token[name].value == pytest.approx(kl.mean(), rel=1e-9)
    last, headline = measured.convergence[-1], measured.per_token[name]
    assert (last.mean, last.ci95) == (headline.value, headline.ci95)
    assert measured.worst_tokens[0].kl == kl.max()
    by_prompt = np.bincount(tokens["prompt_id"].astype(int), weights=kl)
    assert max(each.kl_per_sequence for each in measured.prompts) == pytest.approx(by_prompt.max(), rel=1e-9)
    assert measured.worst_sequences[0].kl == pytest.approx(by_prompt.max(), rel=1e-9)
    first = tokens["position"] == 0
    assert measured.by_position[0].kl.value == pytest.approx(kl[first].mean(), rel=1e-9)
    assert sum(each.share_of_kl for each in measured.by_confidence) == pytest.approx(1)
    top = np.sort(kl)[::-1][: int(np.ceil(len(kl) / 100))]
    assert measured.top_percent_share == pytest.approx(top.sum() / kl.sum(), rel=1e-6)


@pytest.mark.parametrize("name", [POLICY, REFERENCE])
def test_every_output_begins_with_the_headline_and_has_both_directions(runs, name, capsys):
    measured, label = Measurement.read(runs[name]), LABELS[name]
    other = LABELS[REFERENCE if name == POLICY else POLICY]
    assert measured.estimand.startswith(f"{label} in nats per token")
    summary = summarize(measured)
    assert summary.headline.startswith(f"{label} per token")
    assert [row[0] for row in summary.tables[0].rows[:2]] == [label, other]
    page = (runs[name] / "report.html").read_text()
    assert f'<p class="what">{label} per token</p>' in page
    assert page.index(label) < page.index(other)
    assert f'data-kl="{label}" data-reverse="{other}"' in page
    assert f"{label} is {measured.per_token[name].rounded}" in model_card(measured).replace("\\", "")
    assert main(["report", str(runs[name]), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows[0]["name"] == name and any(row["name"] == f"{name}_by_position_0_to_1" for row in rows)


def test_a_gate_limits_the_headline_or_the_direction_that_is_named(runs, tmp_path, capsys):
    words = ["report", str(runs[REFERENCE]), "--at-most", "1e-9"]
    for option, name in (
        ([], REFERENCE),
        (["--direction", "reference-policy"], REFERENCE),
        (["--direction", "policy-reference"], POLICY),
    ):
        assert main([*words, *option, "--json"]) == 1
        gate = json.loads(capsys.readouterr().out)["gate"]
        assert gate["quantity"] == f"per_token.{name}"
        assert gate["value"] == Measurement.read(runs[REFERENCE]).per_token[name].value
        assert main([*words, *option]) == 1
        assert f"gate: failed: {LABELS[name]} per token" in " ".join(capsys.readouterr().out.split())
        assert main([*words, *option, "--format", "markdown"]) == 1
        assert f"{LABELS[name]} per token is above" in capsys.readouterr().out
    page = ["--out", str(tmp_path / "page.html")]
    for option, name in (([], REFERENCE), (["--direction", "policy-reference"], POLICY)):
        compared = ["compare", str(runs[REFERENCE]), str(runs[REFERENCE]), "--at-most", "1e-9", *page]
        assert main([*compared, *option, "--json"]) == 1
        result = json.loads(capsys.readouterr().out)
        assert result["headline"] == REFERENCE
        assert result["runs"][1]["gate"]["quantity"] == f"per_token.{name}"
    tables = summarize(compare([runs[REFERENCE]] * 2)).tables
    assert [table.header[1] for table in tables[:2]] == [LABELS[REFERENCE], LABELS[POLICY]]


def test_a_resumed_run_may_name_another_direction(jobs, runs):
    again = replace(jobs[REFERENCE], until_relative_error=1e-6, resume=True, at_most=1.0)
    gates = [measure(replace(again, direction=word)).gate for word in (None, "policy-reference")]
    assert [gate.quantity for gate in gates if gate] == [f"per_token.{name}" for name in (REFERENCE, POLICY)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "policy-reference"}, "--direction says which KL --at-most limits"),
        ({"direction": "forward", "at_most": 1.0}, "must be one of policy-reference, reference-policy"),
    ],
)
def test_a_direction_without_a_limit_or_a_meaning_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        MeasureJob(**options)
    with pytest.raises(OptionError, match=message):
        compare(["a", "b"], **options)


def limited(points, at_most, **changes):
    """A sweep of candidates of a size, a KL and an error, with a limit."""
    candidates = tuple(
        SweepCandidate(
            number=number,
            name=f"q{number}",
            folder="",
            numbers={REFERENCE: nats(kl, error), POLICY: nats(2 * kl, error)},
            bytes_on_disk=size,
        )
        for number, (size, kl, error) in enumerate(points, 1)
    )
    plain = {"pairs": (), "attributions": (), "rank_by": REFERENCE}
    sweep = replace(synthetic_sweep(), candidates=candidates, **plain, **changes)
    return gate_of_sweep(sweep, at_most)


@pytest.mark.parametrize(
    ("points", "verdict", "smallest", "undecided"),
    [
        ([(9, 0.1, 0.01), (5, 0.5, 0.01), (3, 2.0, 0.01)], "passed", 2, ()),
        ([(9, 0.1, 0.01), (5, 0.97, 0.1), (3, 2.0, 0.01)], "undecided", 1, (2,)),
        ([(9, 0.1, 0.01), (5, 0.5, 0.01), (7, 0.97, 0.1)], "passed", 2, ()),  # the undecided one is larger
        ([(9, 1.5, 0.01), (5, 2.0, 0.01)], "failed", None, ()),
        ([(9, 0.98, 0.1), (5, 1.02, 0.1), (3, 2.0, 0.1)], "undecided", None, (2, 1)),
        ([(5, 0.5, 0.01), (5, 0.4, 0.01), (5, 0.97, 0.1)], "passed", 2, ()),  # of one size: the nearest
        ([(None, 0.1, 0.01), (5, 0.5, 0.01)], "passed", 2, ()),
        ([(None, 0.1, 0.01), (5, 2.0, 0.01)], "passed", 1, ()),
    ],
)
def test_the_smallest_candidate_within_a_limit(points, verdict, smallest, undecided):
    sweep = limited(points, 1.0)
    gate = sweep.gate
    assert (gate.verdict, gate.smallest, gate.undecided) == (verdict, smallest, undecided)
    assert gate.exit_code == {"passed": 0, "failed": 1, "undecided": 3}[verdict]
    sentence = describe_sweep_gate(sweep)
    assert sentence.startswith(f"{verdict}: ") and LABELS[REFERENCE] in sentence
    assert all(f"q{number} (" in sentence for number in (*undecided, *([smallest] if smallest else [])))
    lost = SweepCandidate(number=9, name="q9", folder="", failure="damaged")  # of any size and KL
    sweep = gate_of_sweep(replace(sweep, candidates=(*sweep.candidates, lost)), 1.0)
    assert sweep.gate.exit_code == 3 and describe_sweep_gate(sweep).endswith("; q9 could not be measured")


def test_the_noise_floor_and_few_clusters_count_in_the_gate_of_a_sweep():
    points = [(9, 0.1, 0.001), (5, 0.5, 0.001)]
    assert limited(points, 0.51).gate == replace(limited(points, 1.0).gate, at_most=0.51)
    few = limited(points, 1.0, clusters=20).gate
    assert (few.verdict, few.smallest, few.undecided) == ("undecided", None, (2, 1))
    sweep = limited(points, 0.51)
    noisy = replace(sweep, candidates=tuple(replace(c, noise_floor=nats(0.02, 0)) for c in sweep.candidates))
    gate = gate_of_sweep(noisy, 0.51).gate
    assert (gate.smallest, gate.undecided) == (1, (2,))


def test_the_folder_of_a_sweep_answers_for_another_limit_and_direction(tmp_path, capsys):
    write_sweep_folder(tmp_path, replace(limited([(9, 0.1, 0.001), (5, 0.5, 0.001)], 0.01), gate=None))
    words = ["report", str(tmp_path), "--at-most"]
    assert main([*words, "0.6"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"gate: passed: q2 (5 bytes) is the smallest candidate whose {LABELS[REFERENCE]}" in output
    assert "Gate passed: q2" in (tmp_path / "sweep.html").read_text()
    assert main([*words, "0.6", "--direction", "policy-reference", "--format", "markdown"]) == 0
    output = capsys.readouterr().out
    assert "q1 (9 bytes) is the smallest candidate" in output and LABELS[POLICY] in output
    assert main([*words, "0.05", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["gate"]["verdict"] == "failed"
    assert [each["gate"]["verdict"] for each in result["candidates"]] == ["failed", "failed"]


def test_a_sweep_ranks_attributes_and_limits_one_direction():
    job = SweepJob(candidates=("a",), text="t", at_most=1.0)
    assert job.statistic == REFERENCE
    assert replace(job, direction="policy-reference").statistic == POLICY
    assert SweepJob(candidates=("a",), responses="r").statistic == REFERENCE
