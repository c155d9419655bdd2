"""``kleash train`` from its words to its files and its exit code, with the shipped model."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest

from kleash.cli import main
from kleash.errors import OptionError
from kleash.jobs.algorithms import ALGORITHMS
from kleash.records import PPOJob, TrainingFolder, read_samples, read_steps
from kleash.training import RunLog, train
from kleash.training.algorithms import TRAINERS

TINY = (
    *("--prompts-per-step", "4", "--limit", "4", "--max-new-tokens", "4"),
    *("--minibatches", "1", "--epochs", "1", "--lora-rank", "2", "--learning-rate", "1e-2"),
    *("--set", "lora.lora_alpha=6", 'lora.target_modules=["q_proj"]'),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", "ppo", *TINY, "--steps", "2", "--quiet", "--out", str(folder)]) == 0
    return folder


def test_run_writes_all_files(run: Path) -> None:
    assert [record.step for record in read_steps(run)] == [1, 2]
    assert {one.step for one in read_samples(run)} == {1, 2}
    result = json.loads((run / "training.json").read_text())
    assert (result["algorithm"], result["steps"], result["stopped"]) == ("ppo", 2, None)
    assert result["metrics"]["beta"] == result["beta"] == 0.05
    adapter = json.loads((Path(result["policy"]) / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], adapter["target_modules"]) == (2, 6, ["q_proj"])
    assert "trained by PPO" in (run / "report.html").read_text(encoding="utf-8")


def test_finished_run_resumes_with_more_steps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "ppo", *TINY, "--steps", "3", "--out", str(run)]
    assert main(words) == 2
    assert "holds a run already; go on with it with --resume" in capsys.readouterr().err
    assert main([*words, "--beta", "1", "--resume"]) == 2
    assert "holds another run: --beta was 0.05 and is now 1.0" in capsys.readouterr().err
    assert main([*words, "--resume", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    assert [record.step for record in read_steps(run)] == [1, 2, 3]
    assert main(["train", "ppo", *TINY, "--reward", "builtins:print", "--json", "--out", f"{run}-loud"]) == 2
    assert capsys.readouterr().out == "", "what a reward prints is no output of the command"


def test_steps_are_printed_and_hacking_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = [json.dumps({"question": f"{who} was", "system": "Be kind."}) for who in ("She", "He", "Emma")]
    (tmp_path / "asked.jsonl").write_text("\n".join(rows))
    words = ["--steps", "9", "--seed", "4", "--target-nats", "1e-9", "--on-hacking", "stop"]
    assert main(["train", "ppo", *TINY, *words, "--prompts", "~/asked.jsonl", "--out", "~/run"]) == 1
    said = capsys.readouterr()
    assert "prompts are read from 'question'" in said.err and "the column 'system' is not read" in said.err
    assert "step 1/9: reward" in said.err and "step 3/9: reward" in said.err and "step 4/9" not in said.err
    assert "alert, step 3: the updates of one step move the policy by" in said.err
    assert "stopped: the hacking monitor stopped it after step 3" in said.out and "report.html" in said.out
    assert re.search(r"kl/exact_per_sequence +\S+ ± \S+ +nats *\n", said.out)
    (alert,) = json.loads((tmp_path / "run" / "training.json").read_text())["alerts"]
    assert "divide --learning-rate by" in alert


def test_ctrl_c_keeps_checkpoint_and_prints_resume_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "impatient_reward.py").write_text(
        "times = []\n"
        "def impatient(prompts, responses):\n"
        "    times.append(1)\n"
        "    if len(times) == 3:\n"
        "        raise KeyboardInterrupt\n"
        "    return [float(len(response)) for response in responses]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [*TINY, "--quiet", "--out", "a run", "--reward", "impatient_reward:impatient"]
    four, often = ["--steps", "4"], ["--checkpoint-every", "1"]
    begin = RunLog.begin  # and an evaluation before the first step
    monkeypatch.setattr(RunLog, "begin", lambda log, at, _: begin(log, at) or at or log.step(0, {}))
    assert main(["train", "ppo", *words, *four, "--checkpoint-every", "9"]) == 130
    said = "interrupted after step 2, before the first checkpoint; begin again with --resume --out 'a run'"
    assert said in capsys.readouterr().err
    sys.modules["impatient_reward"].times.clear()
    words += ["--resume", *often]
    assert main(["train", "ppo", *words, *four]) == 130
    said = "interrupted after step 2; the last checkpoint is kept: go on with --resume --out 'a run'"
    assert said in capsys.readouterr().err
    assert main(["report", "a run"]) == 0  # also of a run that has not finished
    assert main(["train", "ppo", *words, *four]) == 0
    assert [record.step for record in read_steps(tmp_path / "a run")] == [0, 1, 2, 3, 4]
    sys.modules["impatient_reward"].times.clear()
    assert main(["train", "ppo", *words, "--steps", "8"]) == 130
    assert main(["report", "a run"]) == 0  # of a run that had finished before it went on
    report = (tmp_path / "a run" / "report.html").read_text(encoding="utf-8")
    assert "running or interrupted" in report and not (tmp_path / "a run" / "training.json").exists()


@pytest.mark.peers("trl")
def test_each_algorithm_has_its_trainer() -> None:
    assert TRAINERS.keys() == ALGORITHMS.keys()
    assert all(callable(resolve_name(f"kleash.training.{path}")) for path in TRAINERS.values())


def test_several_processes_require_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="several processes must agree on one folder; give --out"):
        train(PPOJob())


def test_only_the_first_process_prints(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = replace(TrainingFolder(run).result(), stopped="it stopped after step 3")
    monkeypatch.setattr("kleash.training.ppo.train_ppo", lambda job, run_log: result)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert main(["train", "ppo", "--out", str(run)]) == 0  # nor does it look at what lies there
    assert capsys.readouterr() == ("", "")
