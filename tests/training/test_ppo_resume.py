"""A run that is killed and goes on is the run that was never stopped, to the last bit."""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ppo_cases import tiny_job
from safetensors.torch import load_file

from kleash.errors import RunFolderError
from kleash.records import TrainingFolder, read_steps
from kleash.reports.folder_report import write_report_of
from kleash.store.checksums import seal_folder
from kleash.store.training_folder import last_checkpoint
from kleash.training import checkpoints, ppo, train


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
    """A run in a fork, killed with SIGKILL in the middle of writing its third checkpoint."""
    sealed, wrote, told = [], *os.pipe()

    def dying(unfinished):
        seal_folder(unfinished)
        sealed.append(unfinished)
        if len(sealed) == 3:  # all of the third checkpoint is there, under the name that it is written under
            (unfinished / "model.safetensors").write_bytes(b"half")
            os.write(told, b"writing")
            signal.pause()

    process = os.fork()
    if process == 0:
        try:
            checkpoints.seal_folder = dying
            train(tiny_job(folder, **settings(out)))
        finally:
            os._exit(1)
    os.close(told)
    assert os.read(wrote, 7) == b"writing"
    os.kill(process, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


def equal(one, other):
    """Whether two finished runs of four steps are the same in all but the time they took."""
    assert without_times(one) == without_times(other)
    last = [at / "checkpoints/checkpoint-4" for at in (one, other)]
    weights = [load_file(at / "model.safetensors") for at in last]
    moments = [torch.load(at / "optimizer.bin")["state"] for at in last]
    assert weights[0].keys() == weights[1].keys() and moments[0].keys() == moments[1].keys() and moments[0]
    return all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]) and all(
        torch.equal(moment, moments[1][number][name])
        for number, of_weight in moments[0].items()
        for name, moment in of_weight.items()
    )


def test_killed_and_resumed_run_is_bit_identical(folder, tmp_path, monkeypatch):
    """Also where Accelerate cannot restore the generators, which it logs: a step seeds them."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    monkeypatch.delattr("random.setstate")
    killed_while_writing(folder, broken)
    assert len(read_steps(broken)) == 3, "the third step is in the run log, and in no checkpoint"
    assert last_checkpoint(broken).name == "checkpoint-2"
    uninterrupted = train(tiny_job(folder, **settings(whole)))
    resumed = train(tiny_job(folder, **settings(broken, resume=True)))
    assert equal(whole, broken) and resumed.beta == uninterrupted.beta and resumed.steps == 4
    assert [path.name for path in (broken / "checkpoints").iterdir()] == ["checkpoint-4"]


def test_resumed_adapter_run_is_identical(folder, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(tiny_job(folder, **settings(whole, lora_rank=2)))
    train(tiny_job(folder, **settings(broken, lora_rank=2, steps=2)))
    train(tiny_job(folder, **settings(broken, lora_rank=2, resume=True)))
    assert equal(whole, broken)


@pytest.mark.parametrize("path", ["edited_reward:reward", "./edited_reward.py:reward"])
def test_resuming_with_an_edited_reward_function_is_refused(path, folder, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "edited_reward", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "edited_reward.py"
    source.write_text("def reward(prompts, responses):\n    return [float(len(r)) for r in responses]\n")
    job = tiny_job(folder, out=str(tmp_path / "run"), steps=1, reward=(path,))
    train(job)
    assert train(replace(job, steps=2, batch_tokens=20, resume=True)).steps == 2, "in less memory"
    assert TrainingFolder(tmp_path / "run").header().settings["steps"] == 2, "for --config run.json"
    source.write_text(source.read_text().replace("float(len(r))", "-float(len(r))"))
    with pytest.raises(RunFolderError, match=f"the fingerprint of the reward {path} was 'sha256:"):
        train(replace(job, steps=3, resume=True))
    assert len(read_steps(tmp_path / "run")) == 2


TORCH_WRITES = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 5568 vs 5460")


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("checkpoints/checkpoint-2", OSError(28, "No space left on device")),
        ("checkpoints/checkpoint-2", TORCH_WRITES),
        ("", TORCH_WRITES),  # as from the checkpoints of TRL
    ],
    ids=["python", "torch", "trainer"],
)
def test_full_disk_keeps_the_previous_checkpoint_alone(where, error, folder, tmp_path, monkeypatch):
    job = tiny_job(folder, out=str(tmp_path), steps=1)
    train(job)
    (tmp_path / "checkpoints/.writing-killed").mkdir()

    def full(unfinished, *_):
        beside = [] if where == "" else [path.name for path in unfinished.parent.iterdir()]
        assert ".writing-killed" not in beside, "what a kill left is removed before more is written"
        raise error

    monkeypatch.setattr(*((checkpoints, "seal_folder") if where else (ppo, "one_step")), full)
    with pytest.raises(RunFolderError, match=rf"no space is left to write {tmp_path / where} \("):
        train(replace(job, steps=2, resume=True))
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == ({"checkpoint-1"} if where else {"checkpoint-1", ".writing-killed"})


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """A run of two steps, and its job."""
    out = tmp_path_factory.mktemp("finished") / "run"
    job = tiny_job(folder, out=str(out), steps=2, checkpoint_every=1, reward=("ppo_cases:moody",))
    train(job)
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
        train(replace(copied, seed=1))


def test_other_files_among_checkpoints_are_ignored(copied):
    folder = Path(copied.out) / "checkpoints"
    (folder / "checkpoint-zzz").mkdir()
    (folder / "checkpoint-99").write_text("a file")
    (folder / "checkpoint-3").mkdir()  # half written by a trainer that gives the name first
    (folder / ".writing-step-000003").mkdir()  # half written, by a process that has ended
    shutil.copytree(folder / "checkpoint-2", folder / "checkpoint-10")
    assert last_checkpoint(Path(copied.out)).name == "checkpoint-10", "compared as numbers"
    shutil.rmtree(folder / "checkpoint-10")
    shutil.copytree(folder / "checkpoint-2", folder / "checkpoint-1")  # which a kill left
    train(replace(copied, steps=3))
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["checkpoint-3", "checkpoint-99", "checkpoint-zzz"]


@pytest.mark.parametrize("text", ["{}", "[" * 200_000, '{"step": 2, "leash": [1], "learning_rate": 1e-3}'])
def test_unreadable_progress_is_refused(copied, text):
    checkpoint = last_checkpoint(Path(copied.out))
    (checkpoint / "progress.json").write_text(text)
    seal_folder(checkpoint)
    with pytest.raises(RunFolderError, match=r"progress\.json cannot be read as the progress of a run: "):
        train(copied)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "progress.json"]
)
def test_checkpoint_with_a_flipped_bit_is_refused(copied, name):
    state = last_checkpoint(Path(copied.out)) / name
    content = bytearray(state.read_bytes())
    content[-7] ^= 1
    state.write_bytes(content)
    with pytest.raises(RunFolderError, match="delete the checkpoint, and --resume goes on from the one"):
        train(copied)


def test_a_checkpoint_without_checksums_is_refused(copied):
    (last_checkpoint(Path(copied.out)) / "checksums.jsonl").unlink()
    with pytest.raises(RunFolderError, match="has lost its checksums"):
        train(copied)


@pytest.mark.parametrize(("lines", "said"), [(0, "is damaged"), (1, "is damaged"), (None, "cannot be read")])
def test_missing_steps_are_refused(copied, lines, said):
    path = Path(copied.out) / "steps.jsonl"
    if lines is None:
        path.unlink()
    else:
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))
    with pytest.raises(RunFolderError, match=rf"steps\.jsonl {said}"):
        write_report_of(path.parent)
    with pytest.raises(RunFolderError, match=r"steps\.jsonl"):
        train(copied)
    with pytest.raises(RunFolderError, match="holds a run already"):
        train(replace(copied, resume=False))
