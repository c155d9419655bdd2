"""A run that is killed and goes on is the run that was never stopped, to the last bit."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ppo_cases import tiny_job
from safetensors.torch import load_file

from kleash.errors import RunFolderError
from kleash.records import read_steps
from kleash.reports.folder_report import write_report_of
from kleash.store.checksums import seal_folder
from kleash.training import checkpoints
from kleash.training.checkpoints import advice_if_damaged, last_checkpoint, load_progress
from kleash.training.ppo import train_ppo
from kleash.training.run_log import RunLog

WORKER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from ppo_cases import tiny_job
from kleash.training.run_log import RunLog
from kleash.training import checkpoints
from kleash.training.ppo import train_ppo

genuine, count = checkpoints._write, [0]

def dying(folder, run, notes):
    genuine(folder, run, notes)
    count[0] += 1
    if count[0] == 3:  # all of the third checkpoint is there, under the name that it is written under
        (folder / "state.safetensors").write_bytes(b"half")
        print("writing", flush=True)
        time.sleep(600)

checkpoints._write = dying
train_ppo(tiny_job(Path(sys.argv[1]), **eval(sys.argv[2])))
"""
HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo-resume")
    tiny_job(folder)
    return folder


def settings(out, **more):
    steered = {"controller": "pid", "target_nats": 0.5, "seed": 5, "reward": ("ppo_cases:moody",)}
    return {**steered, "steps": 4, "checkpoint_every": 1, "out": str(out), **more}


def without_times(folder):
    records = read_steps(folder)
    numbers = [{k: v for k, v in record.metrics.items() if not k.startswith("time/")} for record in records]
    return [(record.step, record.events) for record in records], json.dumps(numbers)


def killed_while_writing(folder, out):
    """A run in another process, killed with SIGKILL in the middle of writing its third checkpoint."""
    command = [sys.executable, "-W", "ignore", "-c", WORKER, str(folder), repr(settings(out))]
    paths = os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        said = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        assert said == "writing\n", process.stderr.read()[-2000:]
        assert process.wait(timeout=60) == -signal.SIGKILL


def equal(one, other):
    """Whether two finished runs of four steps are the same in all but the time they took."""
    assert without_times(one) == without_times(other)
    states = [load_file(at / "checkpoints/step-000004/state.safetensors") for at in (one, other)]
    assert states[0].keys() == states[1].keys() and any(name.startswith("optimizer/") for name in states[0])
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.fixture
def one_thread():
    """As the other process has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_killed_and_resumed_run_is_bit_identical(folder, tmp_path, one_thread):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    killed_while_writing(folder, broken)
    assert len(read_steps(broken)) == 3, "the third step is in the run log, and in no checkpoint"
    found = last_checkpoint(broken)
    assert found.name == "step-000002" and load_progress(found).progress.step == 2
    uninterrupted = train_ppo(tiny_job(folder, **settings(whole)))
    resumed = train_ppo(tiny_job(folder, **settings(broken, resume=True)))
    assert equal(whole, broken) and resumed.beta == uninterrupted.beta and resumed.steps == 4
    assert [path.name for path in (broken / "checkpoints").iterdir()] == ["step-000004"]


def test_resumed_adapter_run_is_identical(folder, tmp_path, one_thread):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_ppo(tiny_job(folder, **settings(whole, lora_rank=2)))
    train_ppo(tiny_job(folder, **settings(broken, lora_rank=2, steps=2)))
    train_ppo(tiny_job(folder, **settings(broken, lora_rank=2, resume=True)))
    assert equal(whole, broken)


def test_random_generators_are_restored():
    """Python's is left out of the runs above: the checks of shapes and types draw from it."""
    kept = json.loads(json.dumps(checkpoints._generators()))

    def draws():
        return random.gauss(0, 1), np.random.normal(), torch.rand(()).item()  # noqa: NPY002

    first = draws()
    assert draws() != first
    checkpoints._set_generators(kept)
    assert draws() == first


def test_finished_run_resumes_with_more_steps(folder, tmp_path):
    job = tiny_job(folder, out=str(tmp_path), steps=1)
    train_ppo(job)
    result = train_ppo(replace(job, steps=2, resume=True))
    assert result.steps == 2 and [record.step for record in read_steps(tmp_path)] == [1, 2]
    again = train_ppo(replace(job, steps=2, resume=True))
    assert again.metrics == result.metrics and len(read_steps(tmp_path)) == 2


def test_resuming_with_another_number_of_processes_is_noted(folder, tmp_path):
    job = tiny_job(folder, out=str(tmp_path), steps=1)
    train_ppo(job)
    path = last_checkpoint(tmp_path) / "progress.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "generators": state["generators"] * 2}))
    seal_folder(path.parent)
    said = []
    display = SimpleNamespace(note=said.append, stepped=lambda record: None, working=lambda step, text: None)
    run_log = RunLog(tmp_path, replace(job, steps=2, resume=True), display=display)
    assert train_ppo(run_log.job, run_log).steps == 2
    assert said[-2].startswith("going on after step 1, from ") and said[-1].startswith(
        "the checkpoint is of 2 processes, and now there are 1"
    )


def test_resuming_a_changed_job_is_refused(folder, tmp_path):
    from kleash.training.algorithms import train

    job = tiny_job(folder, out=str(tmp_path), steps=1)
    train(job)
    with pytest.raises(
        RunFolderError, match=r"--seed was 0 and is now 1; --clip-range was 0\.2 and is now 0\.3"
    ):
        train(replace(job, clip_range=0.3, seed=1, resume=True))


def test_resuming_with_an_edited_reward_function_is_refused(folder, tmp_path, monkeypatch):
    from kleash.training.algorithms import train

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "edited_reward.py"
    source.write_text("def reward(prompts, responses):\n    return [float(len(r)) for r in responses]\n")
    job = tiny_job(folder, out=str(tmp_path / "run"), steps=1, reward=("edited_reward:reward",))
    train(job)
    assert train(replace(job, steps=2, resume=True)).steps == 2
    source.write_text(source.read_text().replace("float(len(r))", "-float(len(r))"))
    with pytest.raises(
        RunFolderError, match=r"the fingerprint of the reward's edited_reward:reward was 'sha256:"
    ):
        train(replace(job, steps=3, resume=True))
    assert len(read_steps(tmp_path / "run")) == 2


def test_full_disk_keeps_the_previous_checkpoint(folder, tmp_path, monkeypatch):
    job = tiny_job(folder, out=str(tmp_path), steps=2, checkpoint_every=1)
    genuine, count = checkpoints._write, []

    def full(*given):
        genuine(*given)
        count.append(time.monotonic())
        if len(count) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_write", full)
    with pytest.raises(RunFolderError, match=r"no space is left to write .*step-000002"):
        train_ppo(job)
    assert last_checkpoint(tmp_path).name == "step-000001"
    assert load_progress(last_checkpoint(tmp_path)).progress.step == 1


def test_damaged_checkpoint_is_named(folder, tmp_path):
    job = tiny_job(folder, out=str(tmp_path), steps=1)
    train_ppo(job)
    (last_checkpoint(tmp_path) / "state.safetensors").write_bytes(b"nothing")
    with pytest.raises(RunFolderError, match=r"the checkpoint .*step-000001 cannot be read"):
        train_ppo(replace(job, steps=2, resume=True))


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """A run of two steps, and its job."""
    out = tmp_path_factory.mktemp("finished") / "run"
    job = tiny_job(folder, out=str(out), steps=2, checkpoint_every=1)
    train_ppo(job)
    return job


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished.out, tmp_path / "run")
    return replace(finished, out=str(tmp_path / "run"), resume=True)


def test_run_started_from_python_has_all_report_inputs(copied):
    root = Path(copied.out)
    assert write_report_of(root) == root / "report.html"
    assert json.loads((root / "training.json").read_text())["steps"] == 2
    with pytest.raises(RunFolderError, match="--seed was 0 and is now 1"):
        train_ppo(replace(copied, seed=1))


def test_other_files_among_checkpoints_are_ignored(copied):
    folder = Path(copied.out) / "checkpoints"
    (folder / "step-zzz").mkdir()
    (folder / "step-999999").write_text("a file")
    (folder / "step-000001").mkdir()  # half deleted when the run was killed
    (folder / ".writing-step-000003").mkdir()  # half written, by an older kleash
    assert last_checkpoint(Path(copied.out)).name == "step-000002"
    assert checkpoints.step_of(folder / "step-999999") is None
    (folder / "step-1000000").mkdir()
    assert last_checkpoint(Path(copied.out)).name == "step-1000000", "compared as numbers"
    (folder / "step-1000000").rmdir()
    train_ppo(copied)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-999999", "step-zzz"]


def test_unfinished_checkpoint_is_no_advice(tmp_path):
    """The last file is written at the end, so a checkpoint without it cannot be resumed from."""
    for step in (1, 2, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-1/trainer_state.json").touch()
    sentence = advice_if_damaged(tmp_path / "checkpoint-3", "trainer_state.json")
    assert sentence.endswith("goes on from checkpoint-1")


@pytest.mark.parametrize("text", ["{}", "[]", '{"progress": {}}', "[" * 200_000, '{"generators": [1]}'])
def test_unreadable_progress_is_refused(copied, text):
    checkpoint = last_checkpoint(Path(copied.out))
    (checkpoint / "progress.json").write_text(text)
    for sealed in (False, True):
        if sealed:
            seal_folder(checkpoint)
        with pytest.raises(
            RunFolderError,
            match=r"the checkpoint .*progress\.json (is damaged|cannot be read as the progress of a run): .*"
            "no other checkpoint is kept",
        ):
            load_progress(checkpoint)


def test_checkpoint_with_a_flipped_bit_is_refused(copied):
    checkpoint = last_checkpoint(Path(copied.out))
    state = checkpoint / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[-7] ^= 1
    state.write_bytes(content)
    with pytest.raises(RunFolderError, match=r"state\.safetensors is damaged: it has other bytes"):
        train_ppo(copied)
    shutil.copytree(checkpoint, checkpoint.with_name("step-000001"))
    with pytest.raises(RunFolderError, match=r"delete .*step-000002, and --resume goes on from step-000001"):
        train_ppo(copied)


@pytest.mark.parametrize("lines", [0, 1, None])
def test_missing_steps_are_refused(copied, lines):
    path = Path(copied.out) / "steps.jsonl"
    if lines is None:
        path.unlink()
    else:
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))
    with pytest.raises(RunFolderError, match=r"steps\.jsonl"):
        write_report_of(path.parent)
    with pytest.raises(RunFolderError, match=r"steps\.jsonl"):
        train_ppo(copied)
    with pytest.raises(RunFolderError, match="holds a run already"):
        train_ppo(replace(copied, resume=False))
