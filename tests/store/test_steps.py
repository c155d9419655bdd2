"""The lines of a run: whole or not there, and cut where a run goes on."""

import math

import pytest

from kleash.errors import RunFolderError
from kleash.records import (
    HackingAlert,
    Sample,
    StepRecord,
    TrainingFolder,
    TrainingResult,
    read_samples,
    read_steps,
)
from kleash.store.checksums import record_checksums
from kleash.store.job_folder import RunHeader
from kleash.store.steps import append_step, keep_steps

SAMPLE = Sample(prompt="“Well,\u2028", response='he said\n\x00"\ud83d', reward=-1.5, kl=math.inf)
HEADER = RunHeader(kleash="1", settings={"seed": 0}, source_sha256="a", fingerprints={"policy": "p"})


def record(step):
    return StepRecord(
        step=step,
        metrics={"beta": 0.1 * step, "kl/k1": math.nan, "reward/score": -math.inf},
        events=("beta was bounded",),
        alerts=(HackingAlert(kind="runaway", sentence="it runs"),),
    )


def written(folder, steps):
    for step in range(1, steps + 1):
        append_step(folder, record(step), [SAMPLE, SAMPLE])
    return folder


def test_what_is_written_is_read_back(tmp_path):
    written(tmp_path, 2)
    first, second = read_steps(tmp_path)
    assert (first.step, second.step) == (1, 2)
    assert second.metrics["beta"] == 0.2 and math.isnan(second.metrics["kl/k1"])
    assert second.metrics["reward/score"] == -math.inf
    assert (second.events, second.alerts) == (record(2).events, record(2).alerts)
    samples = read_samples(tmp_path)
    assert [one.step for one in samples] == [1, 1, 2, 2]
    assert samples[0].sample.prompt == SAMPLE.prompt and samples[0].sample.kl == math.inf


def test_a_run_that_has_not_begun_has_no_steps(tmp_path):
    assert read_steps(tmp_path) == () and read_samples(tmp_path) == ()
    keep_steps(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", [1, 10, 60, None])
def test_a_line_of_an_interrupted_step_is_dropped(tmp_path, left):
    """A kill comes before the total of the step, with its line half written or whole."""
    path = written(tmp_path, 2) / "steps.jsonl"
    third = path.read_bytes().splitlines(keepends=True)[1].replace(b'"step": 2', b'"step": 3')
    with path.open("ab") as file:
        file.write(third[:left])
    assert [one.step for one in read_steps(tmp_path)] == [1, 2] + [3] * (left is None)
    keep_steps(tmp_path, 2)
    append_step(tmp_path, record(3), [])
    assert [one.step for one in read_steps(tmp_path)] == [1, 2, 3]


def test_a_line_cut_inside_a_character_is_dropped_too(tmp_path):
    path = written(tmp_path, 1) / "samples.jsonl"
    text = path.read_bytes()
    path.write_bytes(text + text[: text.index("“".encode()) + 1])
    assert len(read_samples(tmp_path)) == 2


def test_going_on_cuts_what_lies_beyond_the_checkpoint(tmp_path):
    keep_steps(written(tmp_path, 5), 3)
    assert [one.step for one in read_steps(tmp_path)] == [1, 2, 3]
    assert [one.step for one in read_samples(tmp_path)] == [1, 1, 2, 2, 3, 3]
    append_step(tmp_path, record(0), [SAMPLE])
    keep_steps(tmp_path, 0)
    assert read_steps(tmp_path) == () and read_samples(tmp_path) == ()


def flipped(lines):
    """A digit of the second line is another one, and the line is still JSON."""
    return [lines[0], lines[1].replace(b'"step": ', b'"step": 1', 1)[:-3] + lines[1][-2:], *lines[2:]]


@pytest.mark.parametrize("name", ["steps.jsonl", "samples.jsonl"])
@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        lambda lines: [line.replace(b"1", b"2") for line in lines],
        lambda lines: [lines[2], lines[1], lines[0], *lines[3:]],
        lambda lines: lines[:-1],
        lambda lines: lines[1:],
        lambda lines: [],
    ],
    ids=["a line", "all lines", "two swapped", "the last gone", "the first gone", "all gone"],
)
def test_damage_is_refused_while_a_run_goes_on(tmp_path, name, damage):
    path = written(tmp_path, 3) / name
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(RunFolderError, match="is damaged"):
        (read_steps if name == "steps.jsonl" else read_samples)(tmp_path)
    with pytest.raises(RunFolderError, match="is damaged"):
        keep_steps(tmp_path, 2)


def test_a_run_that_was_cut_is_still_checked(tmp_path):
    keep_steps(written(tmp_path, 5), 3)
    path = tmp_path / "steps.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": 7'))
    with pytest.raises(RunFolderError, match="other bytes"):
        read_steps(tmp_path)


def test_a_line_that_is_none_is_named_and_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "steps.jsonl").write_text('{"step": 1, "metrics": {}}\n{"step": \n')
    with pytest.raises(RunFolderError, match=r"checksums\.jsonl is missing"):
        read_steps(tmp_path)
    record_checksums(tmp_path, tmp_path / "steps.jsonl", hashes={})
    with pytest.raises(RunFolderError, match=r"steps\.jsonl, line 2, cannot be read"):
        read_steps(tmp_path)
    with pytest.raises(RunFolderError, match="cannot be written"):
        append_step(tmp_path / "nowhere", record(1), [])


def test_a_training_run_is_gone_on_with_only_on_request(tmp_path):
    folder = TrainingFolder(tmp_path / "run")
    with folder.writing(HEADER, resume=False):
        assert folder.header() == HEADER
        with pytest.raises(RunFolderError, match="another process is writing"):
            TrainingFolder(folder.root).writing(HEADER, resume=True).__enter__()
    with folder.writing(HEADER, resume=False):  # no step was taken: nothing is lost
        written(folder.root, 1)
    with pytest.raises(RunFolderError, match="holds a run already; go on with it with --resume"):
        folder.check(resume=False)
    with folder.writing(HEADER, resume=True):
        pass


def test_the_result_is_there_once_the_run_has_ended(tmp_path):
    folder = TrainingFolder(tmp_path)
    assert folder.result() is None
    result = TrainingResult(
        kleash="1", algorithm="ppo", steps=3, metrics={"beta": math.nan}, policy="p", out="o", alerts=("w",)
    )
    folder.write_result(result)
    again = folder.result()
    assert again is not None and math.isnan(again.metrics["beta"])
    assert (again.steps, again.stopped, again.alerts) == (3, None, ("w",))
    (tmp_path / "training.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"training.json is damaged"):
        folder.result()
