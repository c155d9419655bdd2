"""A measurement or a sweep in experiment trackers: its numbers and settings, and no harm to it if a tracker fails."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_run import write_sweep_folder
from synthetic_sweep import synthetic_sweep
from tracker_service import Service

from kleash import MeasureJob, measure
from kleash.cli import main
from kleash.errors import MissingExtraError, OptionError, TrackerWarning
from kleash.jobs import SweepJob
from kleash.jobs.reading_jobs import ReportJob
from kleash.measuring import sweep
from kleash.records import Measurement, Number
from kleash.reports.trackers import scalars_of, send_result, sweep_scalars

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_tracker_gets_every_number_with_its_interval_and_the_settings(name, run, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, name, service.as_module(name))
    folder, measurement = run
    assert send_result((name, name), measurement, folder) == []
    ((step, logged),) = service.logged
    kl = measurement.per_token["kl_policy_reference"]
    prefix = "measurement/kl_policy_reference"
    assert (
        step == 0 and logged[prefix] == kl.value and logged[f"{prefix}_standard_error"] == kl.standard_error
    )
    assert (logged[f"{prefix}_ci95_low"], logged[f"{prefix}_ci95_high"]) == kl.ci95
    assert logged["measurement/tokens"] == measurement.counts.tokens
    assert logged["measurement/perplexity_ratio"] == measurement.perplexity["ratio"].value
    assert service.settings["seed"] == "3" and service.settings["kleash"] == "0.1.0"
    assert service.settings["fingerprint_policy"] == measurement.models["policy"].fingerprint
    assert {"kleash", folder.name} <= {*service.began.values()} and service.finished == 1
    for variable in ("WANDB_PROJECT", "WANDB_NAME", "TRACKIO_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(variable, "mine")
    service.began.clear()
    assert send_result((name,), measurement, folder) == []
    assert service.began.get("project", "mine") == "mine"
    assert (service.began.get("name") == "mine") == (name == "wandb")


class PrintingService(Service):
    """A service that prints, as trackio does when a run begins and ends."""

    def init(self, **more):
        print("* project initialized")
        return super().init(**more)

    def log(self, values, step=None):
        print("* logged")
        super().log(values, step)

    def finish(self):
        print("* run finished")
        super().finish()


def test_what_a_tracker_prints_is_no_output_of_the_command(run, monkeypatch, capsys):
    service = PrintingService()
    monkeypatch.setitem(sys.modules, "trackio", service.as_module("trackio"))
    code = main(["report", str(run[0]), "--json", "--report-to", "trackio"])
    printed = capsys.readouterr()
    assert code == 0 and json.loads(printed.out)["counts"]["tokens"] == run[1].counts.tokens
    told = [line for line in printed.err.splitlines() if line.startswith("*")]
    assert told == ["* project initialized", "* logged", "* run finished"]
    assert service.finished == 1


def test_tensorboard_has_the_scalars(run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert send_result(("tensorboard",), run[1], tmp_path) == []
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    expected = scalars_of(run[1])
    assert set(events.Tags()["scalars"]) == set(expected)
    (text,) = events.Tensors("settings/text_summary")
    assert "    seed: 3\n" in text.tensor_proto.string_val[0].decode()
    for name, value in expected.items():
        assert [event.value for event in events.Scalars(name)] == [pytest.approx(value, rel=1e-6)]


def test_what_is_unknown_is_no_scalar_and_infinity_is(run):
    number = Number(value=math.inf, unit="nats", standard_error=math.nan, ci95=(math.nan, math.nan))
    scalars = scalars_of(replace(run[1], per_token={"kl_policy_reference": number}))
    name = "measurement/kl_policy_reference"
    assert scalars[name] == math.inf and f"{name}_standard_error" not in scalars
    assert f"{name}_ci95_low" not in scalars
    assert not any(map(math.isnan, scalars.values()))


@pytest.mark.parametrize("part", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_a_sentence_and_the_others_get_the_numbers(part, run, monkeypatch):
    def fail(*_, **__):
        raise OSError("no network\nsecond line")

    broken, working = Service(), Service()
    monkeypatch.setattr(broken, part, fail)
    monkeypatch.setitem(sys.modules, "wandb", broken.as_module("wandb"))
    monkeypatch.setitem(sys.modules, "trackio", working.as_module("trackio"))
    (sentence,) = send_result(("wandb", "trackio"), run[1], run[0])
    assert "no network" in sentence and "second line" not in sentence
    assert sentence.endswith(f"which is in {run[0]}; send it with kleash report {run[0]} --report-to wandb")
    assert len(working.logged) == working.finished == 1


def test_a_measurement_is_on_disk_whatever_a_tracker_does(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    service = Service()

    def refuse(**_):
        assert (out / "measurement.json").exists() and (out / "report.html").exists()
        raise RuntimeError("not logged in")

    monkeypatch.setattr(service, "init", refuse)
    monkeypatch.setitem(sys.modules, "wandb", service.as_module("wandb"))
    line = ["measure", "--limit", "2", "--max-new-tokens", "8", "--quiet", "--out", str(out)]
    assert main([*line, "--report-to", "wandb"]) == 0
    error = capsys.readouterr().err
    assert error.startswith(
        "kleash: warning: the tracker wandb did not get the measurement (the tracker wandb"
    )
    assert "not logged in" in error and error.count("\n") == 1
    assert main(["report", str(out), "--report-to", "wandb"]) == 2
    assert "send it with kleash report" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "wandb", service.as_module("wandb"))
    assert main(["report", str(out), "--report-to", "wandb"]) == 0
    assert service.logged == [(0, scalars_of(Measurement.read(out)))]


def test_measure_warns_of_a_tracker_and_returns_the_measurement(run, tmp_path, monkeypatch):
    monkeypatch.setattr("kleash.measuring.run._measurement_of", lambda _: run[1])
    module = Service().as_module("wandb")
    monkeypatch.delattr(module, "log")
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.warns(TrackerWarning, match="wandb did not get the measurement"):
        assert measure(report_to=("wandb",), out=tmp_path) is run[1]


@pytest.mark.parametrize(
    ("run_job", "options"),
    [(measure, {}), (sweep, {"candidates": ("q8",), "reference": "base", "text": "t"})],
)
def test_a_missing_tracker_is_noticed_before_anything_is_loaded(run_job, options, tmp_path, monkeypatch):
    monkeypatch.setattr("kleash.extras.is_installed", lambda name: False)
    with pytest.raises(MissingExtraError, match="mlflow is not installed; run: pip install mlflow"):
        run_job(report_to=("mlflow",), out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_trackers_of_what_is_no_whole_measurement_are_refused(tmp_path, capsys):
    with pytest.raises(OptionError, match="--report-to must be one of tensorboard, wandb, trackio, mlflow;"):
        ReportJob(folder=Path("o"), report_to=("w",))
    (tmp_path / "steps.jsonl").write_text("")
    assert main(["report", str(tmp_path), "--report-to", "tensorboard"]) == 2
    assert "--report-to are for measurements and sweeps" in capsys.readouterr().err


def test_a_tracker_changes_no_setting_of_a_run():
    assert MeasureJob(report_to=("wandb",)).settings() == MeasureJob().settings()
    jobs = [SweepJob(candidates=("q8",), text="t", reference="base", report_to=to) for to in ((), ("wandb",))]
    assert jobs[0].measure_job(1, Path("o")) == jobs[1].measure_job(1, Path("o"))


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_tracker_gets_the_candidates_of_a_sweep_as_steps(name, tmp_path, monkeypatch):
    service, result = Service(), synthetic_sweep()
    first, second, third, *others = result.candidates
    swapped = (replace(first, numbers=third.numbers), second, replace(third, numbers=first.numbers))
    result = replace(result, candidates=(*swapped, *others))  # whose order is not that of the command line
    monkeypatch.setitem(sys.modules, name, service.as_module(name))
    folder = tmp_path / "quantisations"
    assert send_result((name, name), result, folder) == []
    measured = [candidate for candidate in result.candidates if not candidate.failure]
    assert [step for step, _ in service.logged] == [candidate.number for candidate in measured]
    order = sorted(measured, key=lambda candidate: candidate.numbers[result.rank_by].value)
    for candidate, (_, logged) in zip(measured, service.logged, strict=True):
        prefix, kl = "sweep/kl_policy_reference", candidate.numbers["kl_policy_reference"]
        assert (logged[prefix], logged[f"{prefix}_standard_error"]) == (kl.value, kl.standard_error)
        assert (logged[f"{prefix}_ci95_low"], logged[f"{prefix}_ci95_high"]) == kl.ci95
        assert logged["sweep/bytes_on_disk"] == candidate.bytes_on_disk
        assert order[int(logged["sweep/rank"]) - 1] is candidate
    for candidate in result.candidates:
        assert service.settings[f"candidate_{candidate.number}"] == candidate.name
        assert service.settings.get(f"failure_{candidate.number}", "") == candidate.failure
        assert service.settings.get(f"letters_{candidate.number}", "") == candidate.letters
    assert service.settings["kleash"] == result.kleash
    assert folder.name in service.began.values() and service.finished == 1


def test_a_sweep_is_on_disk_whatever_a_tracker_does(tmp_path, monkeypatch, capsys):
    out, service, result = tmp_path / "a sweep", Service(), synthetic_sweep()

    def refuse(**_):
        assert (out / "sweep.json").exists()
        raise RuntimeError("not logged in")

    def write_result(*_):
        return write_sweep_folder(out, result), True

    monkeypatch.setattr(service, "init", refuse)
    monkeypatch.setitem(sys.modules, "wandb", service.as_module("wandb"))
    monkeypatch.setattr("kleash.measuring.sweep_run._sweep", write_result)
    names = ["--candidates", "q8", "--reference", "base", "--text", "t", "--report-to", "wandb"]
    assert main(["sweep", "--quiet", "--out", str(out), *names]) == 2  # of the candidate that failed
    error = capsys.readouterr().err
    assert "warning: the tracker wandb did not get the sweep (the tracker wandb" in error
    assert f"send it with kleash report '{out}' --report-to wandb" in error and "not logged in" in error
    assert main(["report", str(out), "--report-to", "wandb"]) == 2
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "wandb", service.as_module("wandb"))
    assert main(["report", str(out), "--report-to", "wandb"]) == 0
    assert dict(service.logged) == sweep_scalars(result)
