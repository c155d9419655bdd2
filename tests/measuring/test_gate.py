"""The gate --at-most: exit codes of measure, report and compare, and where the verdict stands."""

import json

import pytest

from kleash.cli import main
from kleash.measuring import compare
from kleash.records import Measurement
from kleash.store.measurement import Verdict, exit_code_of


@pytest.fixture(scope="module")
def run(tmp_path_factory, pair, prompts):
    """A run of forty prompts with a gate that every KL passes."""
    out = tmp_path_factory.mktemp("gated") / "run"
    models = ["--policy", str(pair[0]), "--reference", str(pair[1]), "--prompts", str(prompts)]
    words = [*models, "--max-new-tokens", "6", "--out", str(out), "--at-most", "1000", "--quiet"]
    assert main(["measure", *words]) == 0
    return out


def flattened(text):
    return " ".join(text.split())


def test_the_verdict_stands_in_the_measurement_and_the_report(run):
    measurement = Measurement.read(run)
    gate, kl = measurement.gate, measurement.per_token["kl_policy_reference"]
    assert gate is not None and gate.verdict == "passed" and gate.at_most == 1000
    assert (gate.value, gate.ci95, gate.clusters) == (kl.value, kl.ci95, 40)
    assert "Gate passed" in (run / "report.html").read_text()
    assert json.loads((run / "run.json").read_text())["settings"]["at_most"] == 1000


def test_a_resumed_run_may_have_another_limit(run, capsys):
    words = ["--config", str(run / "run.json"), "--out", str(run), "--resume", "--at-most"]
    assert main(["measure", *words, "0"]) == 1
    output = capsys.readouterr().out
    assert "gate: failed: KL(policy ‖ reference) per token is above 0 nats" in flattened(output)
    assert main(["measure", *words, "1000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gate"]["verdict"] == "passed"


def test_report_gives_the_verdict_for_another_limit(run, capsys, monkeypatch):
    measurement, reads = Measurement.read(run), []
    kl = measurement.per_token["kl_policy_reference"]
    monkeypatch.setattr(Measurement, "read", lambda folder: reads.append(folder) or measurement)
    before = (run / "measurement.json").read_bytes()
    assert main(["report", str(run), "--at-most", repr(kl.ci95[0] / 2)]) == 1
    assert main(["report", str(run), "--at-most", repr(2 * kl.ci95[1])]) == 0
    capsys.readouterr()
    limit = kl.ci95[1] * (1 - 3e-5)  # the upper end has these four digits, too
    assert main(["report", str(run), "--at-most", repr(limit)]) == 3
    output = flattened(capsys.readouterr().out)
    assert f"gate: undecided: whether KL(policy ‖ reference) per token is at most {limit:.15g} nats" in output
    assert float(output.partition("upper end")[2].partition(" is ")[2].split()[0]) > limit
    assert "more tokens, of other prompts or documents, may decide" in output
    assert "Gate undecided" in (run / "report.html").read_text()
    assert (run / "measurement.json").read_bytes() == before
    assert main(["report", str(run)]) == 0
    assert "Gate passed" in (run / "report.html").read_text() and reads == [run] * 4


def test_compare_gates_every_later_run(run, tmp_path, capsys):
    kl = Measurement.read(run).per_token["kl_policy_reference"]
    words = ["compare", str(run), str(run), "--out", str(tmp_path / "page.html")]
    assert main([*words, "--at-most", repr(2 * kl.ci95[1])]) == 0
    assert "passed" in capsys.readouterr().out and "gate passed" in (tmp_path / "page.html").read_text()
    assert main([*words, "--at-most", "0", "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert first["gate"] is None and second["gate"]["verdict"] == "failed"
    assert main([*words, "--at-most", repr(kl.value)]) == 3
    assert all(one.gate is None for one in compare([run, run]).runs)


def test_a_failure_outweighs_what_is_undecided():
    passed, failed, undecided = (
        Verdict(quantity="x", at_most=1.0, verdict=name) for name in ("passed", "failed", "undecided")
    )
    assert exit_code_of([passed, failed, undecided]) == 1
    assert exit_code_of([passed, undecided]) == 3
    assert exit_code_of([passed]) == 0 == exit_code_of([])


@pytest.mark.parametrize("limit", ["-1", "nan", "inf"])
def test_a_limit_that_means_nothing_is_refused(limit, run, capsys):
    for words in (["measure", "--out", "x"], ["report", str(run)], ["compare", str(run), str(run)]):
        assert main([*words, "--at-most", limit]) == 2
        assert "--at-most must be a number of nats, at least 0; it is" in capsys.readouterr().err
