"""The run log: what is on the disk after each step, what is asked of the trainer, and where else numbers go."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from histories import bent, healthy
from tracker_service import Service

from kleash.errors import CannotRunError, MissingExtraError, RunFolderError, TrackerWarning, UnknownNameError
from kleash.records import HackingAlert, PPOJob, Sample, StepRecord, read_samples, read_steps
from kleash.reports.trackers import open_trackers
from kleash.store.steps import append_step
from kleash.training import Advice, RunLog

SAMPLES = [Sample(prompt="p", response=f"one two three four {at}", reward=1.0, kl=0.1) for at in range(6)]


def run_log_of(folder: Path, **options: Any) -> RunLog:
    run_log = RunLog(folder, PPOJob(**options), display=mock.Mock())
    run_log.begin(0)
    return run_log


def play(run_log: RunLog, history: list[StepRecord]) -> list[Advice]:
    return [run_log.step(record.step, record.metrics) for record in history]


def test_logged_step_is_on_disk_and_the_next_one_hides_no_damage_to_it(tmp_path: Path) -> None:
    run_log = run_log_of(tmp_path)
    with pytest.raises(UnknownNameError, match=r"no metric is called 'kl/k4'; did you mean 'kl/k"):
        run_log.step(1, {"kl/k4": 1.0})
    assert run_log.step(1, {"beta": 0.1, "reward/part/x": 2}, SAMPLES, ["beta was bounded"]) == Advice()
    (record,) = read_steps(tmp_path)
    texts = {"response/repetition": 0.0, "response/distinct": (2 + 6) / 18}  # two that all have, and the last
    assert record.metrics == {"beta": 0.1, "reward/part/x": 2.0, **texts}
    assert record.events == ("beta was bounded",)
    assert [one.sample for one in read_samples(tmp_path)] == [SAMPLES[at] for at in (0, 1, 3, 4)]
    run_log.display.stepped.assert_called_once_with(record)  # type: ignore[attr-defined]
    (tmp_path / "steps.jsonl").write_text('{"step": 1, "metrics": {}}\n')
    run_log.step(2, {"beta": 0.1})  # to read and hash all lines at each of n steps takes a time of order n²
    with pytest.raises(RunFolderError, match=r"steps\.jsonl is damaged"):
        read_steps(tmp_path)


def test_errors_over_few_prompts_warn_once(tmp_path: Path) -> None:
    for prompts, expected in ((8.0, 1), (30.0, 0)):
        run_log = run_log_of(tmp_path)
        for step in (1, 2):
            run_log.step(step, {"response/prompts": prompts})
        again = RunLog(tmp_path, PPOJob(), display=run_log.display)
        again.begin(2)
        again.step(3, {"response/prompts": prompts})
        notes = run_log.display.note.call_args_list  # type: ignore[attr-defined]
        assert str(notes).count("only 8 clusters; below 30") == expected
        assert read_steps(tmp_path)[0].metrics["response/prompts"] == prompts


@pytest.mark.parametrize(
    ("shares", "warns"),
    [([1.19] * 12, False), ([1.21] * 12, True), ([1.9] * 5 + [1.19] * 3, False)],  # the last is back below
)
@pytest.mark.parametrize("per", ["sequence", "token"])
@pytest.mark.parametrize("controller", ["fixed", "pid", "ziegler", "dual"])
def test_kl_above_1_2_times_target_raises_alert_after_eight_steps(
    tmp_path: Path, controller: str, per: str, shares: list[float], warns: bool
) -> None:
    run_log = run_log_of(tmp_path, controller=controller, target_nats=0.5, target_per=per)
    name, same = f"kl/exact_per_{per}", {"beta": 0.25, f"kl/exact_per_{per}_error": 1e-6}
    history = bent(healthy(len(shares), target=None), 0, lambda at, now: {name: shares[at - 1] * 0.5, **same})
    found = [(at, alert) for at, advice in enumerate(play(run_log, history), 1) for alert in advice.alerts]
    assert [(at, alert.kind, alert.acts) for at, alert in found] == [(8, "far_from_target", False)] * warns
    for _, alert in found:
        assert f"0.605 nats per {per} over the last 8 steps, 1.2 times its target of 0.5" in alert.sentence
        assert "under a beta of 0.25" in alert.sentence


@pytest.mark.parametrize("act", ["warn", "stop", "halve-lr", "tighten"])
def test_alert_advises_the_jobs_on_hacking_action(tmp_path: Path, act: str) -> None:
    history = bent(healthy(43), 40, lambda at, now: {"kl/exact_per_sequence": 40.0})
    run_log = run_log_of(tmp_path, on_hacking=act, target_nats=6.0)
    advice = play(run_log, history)
    assert [one.act for one in advice if one.alerts] == [None if act == "warn" else act]
    assert {one.act for one in advice if not one.alerts} == {None}
    assert [alert.kind for record in read_steps(tmp_path) for alert in record.alerts] == ["far_from_target"]
    done = {"halve-lr": "the learning rate is halved", "tighten": "beta is doubled"}.get(act)
    said = [event for record in read_steps(tmp_path) if record.alerts for event in record.events]
    assert len(said) == (done is not None) and all(event.startswith(done) for event in said)


def test_monitor_state_survives_resume(tmp_path: Path) -> None:
    history = bent(healthy(60), 40, lambda at, now: {"kl/exact_per_sequence": 40.0})
    folders = [tmp_path / "whole", tmp_path / "parts"]
    for folder in folders:
        folder.mkdir()
    play(run_log_of(folders[0], target_nats=6.0), history)
    first = run_log_of(folders[1], target_nats=6.0)
    play(first, history[:47])
    with pytest.raises(RunFolderError, match="ends at step 47, and the checkpoint is of step 48"):
        RunLog(folders[1], PPOJob()).begin(48)
    notes = {42: "nothing is left to do after step 42; give more --steps", 60: "going on after step 42"}
    for steps, said in notes.items():
        again = RunLog(folders[1], PPOJob(target_nats=6.0, steps=steps), display=mock.Mock())
        again.begin(42)  # the last checkpoint
        again.display.note.assert_called_once_with(said)
    assert [record.step for record in again.history] == list(range(1, 43))
    play(again, history[42:])
    assert read_steps(folders[1]) == read_steps(folders[0])
    without = RunLog(tmp_path, PPOJob(resume=True, out=str(tmp_path)), display=mock.Mock())
    without.begin(0)
    assert "has no checkpoint to go on from" in without.display.note.call_args.args[0]


@pytest.mark.parametrize("acts", [False, True])
def test_a_resumed_run_has_ended_only_at_an_alert_that_acts(acts: bool, tmp_path: Path) -> None:
    from kleash.training.step_logger import StepLogger

    alert = HackingAlert(kind="no_signal", sentence="hardly a prompt moves anything", acts=acts)
    append_step(tmp_path, StepRecord(step=1, metrics={}, alerts=(alert,)), [])
    job = PPOJob(on_hacking="stop")
    assert StepLogger(job, RunLog(tmp_path, job)).was_stopped(1) is acts


def test_tensorboard_logs_every_step_under_requested_names(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def told(folder: Path) -> dict[str, list[tuple[int, float]]]:
        found = EventAccumulator(str(folder / "tensorboard"))
        found.Reload()
        return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    run_log = run_log_of(tmp_path, report_to=("tensorboard",), metric_names="verl")
    for step in (1, 2, 3):
        run_log.step(step, {"beta": float(step), "kl/k3": 0.5})
    run_log.close()
    assert told(tmp_path)["actor/reward_kl_penalty_coeff"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert set(told(tmp_path)) == {"actor/reward_kl_penalty_coeff", "kl/k3"}
    assert "beta" in read_steps(tmp_path)[0].metrics

    run_log.begin(1)  # goes on after step 1: what lay beyond is forgotten there too
    run_log.step(2, {"beta": 7.0})
    run_log.close()
    assert told(tmp_path)["actor/reward_kl_penalty_coeff"] == [(1, 1.0), (2, 7.0)]


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_trackers_log_through_accelerate(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, name, service.as_module(name))
    run = tmp_path / "my-run"
    run.mkdir()
    run_log = run_log_of(run, report_to=(name, name), metric_names="trl", reward=("a:b", "c:d"))
    run_log.step(1, {"beta": 0.5, "kl/exact_per_token": 0.25})
    run_log.close()
    run_log.close()
    assert (service.logged, service.finished) == ([(1, {"beta": 0.5, "kl": 0.25})], 1)
    assert "my-run" in service.began.values() and "kleash" in service.began.values()
    assert service.settings["reward"] == "a:b c:d" and service.settings["algorithm"] == "ppo"


def test_missing_or_unreachable_tracker_is_one_sentence_and_closes_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "trackio", "mlflow", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingExtraError, match=f"{name} is not installed; run: pip install .*$"):
            open_trackers((name,), {}, tmp_path)
    first, broken = Service(), Service().as_module("trackio")
    monkeypatch.setitem(sys.modules, "wandb", first.as_module("wandb"))

    def refuse(**_: Any) -> None:
        raise RuntimeError("no network\nsecond line")

    broken.init = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", broken)
    with pytest.raises(CannotRunError, match="the tracker trackio cannot be started: no network; set it up"):
        open_trackers(("wandb", "trackio"), {}, tmp_path)
    assert first.finished == 1


@pytest.mark.parametrize(
    ("part", "words"), [("log", "did not get step 2 and gets no"), ("finish", "may lack the last")]
)
def test_a_tracker_that_fails_ends_no_training(
    part: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no network\nsecond line")

    broken, working = Service(), Service()
    monkeypatch.setitem(sys.modules, "wandb", broken.as_module("wandb"))
    monkeypatch.setitem(sys.modules, "trackio", working.as_module("trackio"))
    run_log = run_log_of(tmp_path, report_to=("wandb", "trackio"))
    run_log.step(1, {"beta": 0.5})
    monkeypatch.setattr(broken, part, fail)
    warning = rf"the tracker wandb {words}.* \(no network\); all steps are in"
    with pytest.warns(TrackerWarning, match=warning) as caught:
        run_log.step(2, {"beta": 0.25})
        run_log.step(3, {"beta": 0.125})
        run_log.close()
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    on_disk = [record.step for record in read_steps(tmp_path)]
    assert [step for step, _ in working.logged] == on_disk == [1, 2, 3] and working.finished == 1
