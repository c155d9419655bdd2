"""A file that is written to while a job uses it: no result, and a sentence that names it."""

import itertools
import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kleash.diagnosis import doctor as doctor_module
from kleash.diagnosis import engine_numbers, measure_mismatch
from kleash.errors import ChangedInputError, SourceError
from kleash.jobs import SweepJob
from kleash.jobs.reading_jobs import DoctorJob
from kleash.measuring import cache_reference, measure, sweep
from kleash.measuring.model_pair import load_models
from kleash.measuring.progress import ProgressReporter
from kleash.measuring.ray_workers import ShardWorker
from kleash.measuring.shards import plan_shards
from kleash.models.cache.reference_cache import ReferenceCache
from kleash.records import CacheJob, MeasureJob, Measurement, RunFolder

LINES = [f"Boat {n} went out {n * n} times before the sun had come up" for n in range(7)]


@pytest.fixture
def change_after(monkeypatch):
    """Has a function called once a number of shards, of runs or caches, are on disk."""

    def change_after(shards, change):
        written = itertools.count(1)

        def counted(write):
            def call(*arguments, **named):
                write(*arguments, **named)
                if next(written) == shards:
                    change()

            return call

        for owner, name in ((RunFolder, "write_shard"), (ReferenceCache, "fill")):
            monkeypatch.setattr(owner, name, counted(getattr(owner, name)))

    return change_after


def write_sources(folder):
    """A file of each kind."""
    responses = [{"prompt": line, "response": " and came back again"} for line in LINES]
    contents = {
        "responses.jsonl": "".join(json.dumps(line) + "\n" for line in responses),
        "text.txt": "\n\n".join(LINES),
        "prompts.txt": "\n".join(LINES),
    }
    for name, content in contents.items():
        (folder / name).write_text(content)
    return {name.partition(".")[0]: folder / name for name in contents}


@pytest.fixture
def sources(tmp_path):
    """A file of each kind, to be changed."""
    return write_sources(tmp_path)


def job_of(models, sources, kind, out, **more):
    """A job of several shards."""
    batch_tokens = 28 if kind == "prompts" else 20
    options = {"max_new_tokens": 4} if kind == "prompts" else {}
    options |= {"policy": str(models[0]), "reference": str(models[1]), kind: str(sources[kind])}
    return MeasureJob(batch_tokens=batch_tokens, out=str(out), **options, **more)


def append(path):
    with path.open("ab") as file:
        file.write(path.read_bytes())


def overwrite_in_place(path):
    """Other bytes of the same size, in the file that others have open or mapped: as ``cp`` and ``rsync --inplace``."""
    content = bytearray(path.read_bytes())
    if path.suffix == ".safetensors":
        tensors = {name: tensor * 1.5 for name, tensor in load_file(path).items()}
        other = path.with_name("other.bin")
        save_file(tensors, other, metadata={"format": "pt"})
        content = bytearray(other.read_bytes())
        other.unlink()
    else:
        content = bytearray(content.replace(b"times", b"hours"))
    with path.open("r+b") as file:
        file.write(content)


def replace_by_rename(path):
    other = path.with_name("other.bin")
    other.write_bytes(path.read_bytes()[::-1])
    other.replace(path)


@pytest.fixture(scope="module")
def alone(pair, tmp_path_factory):
    """The undisturbed measurement of a source of each kind."""
    folder = tmp_path_factory.mktemp("alone")
    sources = write_sources(folder)
    return {kind: measure(job_of(pair, sources, kind, folder / f"run of {kind}")) for kind in sources}


@pytest.mark.parametrize(
    ("kind", "file", "change", "is_last"),
    [
        ("responses", "responses.jsonl", append, False),
        ("prompts", "prompts.txt", replace_by_rename, False),
        ("prompts", "prompts.txt", Path.unlink, True),
        ("text", "policy/model.safetensors", overwrite_in_place, False),
        ("responses", "reference/model.safetensors", overwrite_in_place, True),
        ("text", "policy/tokenizer.json", append, False),
    ],
)
def test_a_changed_file_leaves_no_result(
    models, sources, alone, tmp_path, change_after, kind, file, change, is_last
):
    """After the first shard or after the last."""
    path = tmp_path / file
    shutil.copy2(path, tmp_path / "kept")
    shards = alone[kind].counts.shards
    done = shards if is_last else 1
    assert shards > 2
    job = job_of(models, sources, kind, tmp_path / "run")
    change_after(done, lambda: change(path))
    with pytest.raises((ChangedInputError, SourceError), match=file):
        measure(job)
    assert not (tmp_path / "run" / "measurement.json").exists()
    finished = RunFolder(tmp_path / "run").finished_shards()
    assert len(finished) == done
    # What was finished before the change is right: with the file as it was, the run goes on to the same numbers.
    shutil.copy2(tmp_path / "kept", path)
    resumed = measure(job_of(models, sources, kind, tmp_path / "run", resume=True))
    assert resumed.statistics() == alone[kind].statistics()


def test_a_file_that_is_only_touched_is_the_same(models, sources, tmp_path, change_after):
    paths = [sources["text"], models[0] / "model.safetensors", models[1] / "config.json"]

    def touch():
        for path in paths:
            os.utime(path, ns=(0, 0))

    change_after(1, touch)
    measure(job_of(models, sources, "text", tmp_path / "run"))
    assert Measurement.read(tmp_path / "run").counts.shards > 1


def test_a_worker_scores_nothing_with_changed_weights(models, sources, tmp_path):
    job = job_of(models, sources, "text", tmp_path / "run")
    worker = ShardWorker(job, str(Path.cwd()))
    shards = list(plan_shards(job, load_models(job, None)).shards)
    worker.run(shards[0])
    overwrite_in_place(models[1] / "model.safetensors")
    with pytest.raises(ChangedInputError, match=r"reference/model\.safetensors"):
        worker.run(shards[1])
    with pytest.raises(ChangedInputError, match=r"reference/model\.safetensors"):
        worker.rounding_columns("noise", shards[0].sequences)


@pytest.mark.parametrize("file", ["text.txt", "reference/model.safetensors"])
def test_a_cache_keeps_nothing_of_a_changed_file(models, sources, tmp_path, change_after, file):
    out, path = tmp_path / "cache", tmp_path / file
    job = CacheJob(reference=str(models[1]), text=str(sources["text"]), batch_tokens=20, out=str(out))
    change_after(1, lambda: overwrite_in_place(path))
    with pytest.raises(ChangedInputError, match=file):
        cache_reference(job)
    assert len(list(out.glob("part-*"))) == 1 and not (out / "contents.json").exists()


def test_a_cache_that_is_written_to_leaves_no_result(models, sources, tmp_path, change_after):
    out = tmp_path / "cache"
    cache_reference(
        CacheJob(reference=str(models[1]), text=str(sources["text"]), batch_tokens=20, out=str(out))
    )

    def change():
        for part in out.glob("part-*"):
            with part.open("r+b") as file:
                file.seek(-8, os.SEEK_END)
                file.write(b"\x00" * 8)

    job = job_of(models, sources, "text", tmp_path / "run", reference_cache=str(out))
    change_after(1, change)
    with pytest.raises(ChangedInputError, match="cache/part-"):
        measure(job)
    assert not (tmp_path / "run" / "measurement.json").exists()


def test_a_candidate_that_changes_fails_and_a_source_that_changes_ends_a_sweep(
    models, sources, tmp_path, change_after
):
    options = {"reference": str(models[1]), "text": str(sources["text"]), "batch_tokens": 20}
    shards = measure(job_of(models, sources, "text", tmp_path / "alone")).counts.shards
    job = SweepJob(candidates=(str(models[0]), str(models[1])), out=str(tmp_path / "one"), **options)
    change_after(shards + 1, lambda: overwrite_in_place(models[0] / "model.safetensors"))
    result = sweep(job)
    assert "policy/model.safetensors was written to" in result.candidates[0].failure
    assert not result.candidates[1].failure
    change_after(shards + 1, lambda: torch.empty(10**15))
    lack = sweep(replace(job, out=str(tmp_path / "lack")))
    assert "fit into memory: can't allocate" in lack.candidates[0].failure and not lack.candidates[1].failure
    change_after(2 * shards, lambda: overwrite_in_place(sources["text"]))  # between the two candidates
    with pytest.raises(ChangedInputError, match=r"text\.txt"):
        sweep(replace(job, out=str(tmp_path / "two")))
    assert not (tmp_path / "two" / "sweep.json").exists()


def reverse_the_end(path):
    """Change the codes of the last row of a file of base logits."""
    data = path.read_bytes()
    path.write_bytes(data[:-80] + data[:-81:-1])


class ChangingReporter(ProgressReporter):
    """Has a function called after the first sequences."""

    def __init__(self, change):
        self.change = change

    def add_scored(self, sequences, tokens):
        self.change()
        self.change = lambda: None


def test_files_of_base_logits_are_watched(models, tmp_path, change_after):
    text, logits = tmp_path / "long.txt", tmp_path / "base.logits"
    text.write_text("The sea was calm and a boat went out before dawn. " * 20)
    writing = CacheJob(
        format="llama.cpp", out=str(logits), reference=str(models[1]), text=str(text), window=16
    )
    with pytest.raises(ChangedInputError, match=r"long\.txt"):
        cache_reference(writing, ChangingReporter(lambda: append(text)))
    assert not logits.exists() and not list(tmp_path.glob(".base.logits*"))
    cache_reference(writing)
    changes = {models[0] / "model.safetensors": overwrite_in_place, logits: reverse_the_end}
    for number, (path, change) in enumerate(changes.items()):
        job = MeasureJob(
            reference_cache=str(logits),
            policy=str(models[0]),
            batch_tokens=20,
            out=str(tmp_path / f"run-{number}"),
        )
        change_after(1, partial(change, path))
        with pytest.raises(ChangedInputError, match=path.name):
            measure(job)
        assert not (tmp_path / f"run-{number}" / "measurement.json").exists()


def test_rollouts_that_are_appended_to_are_refused(tmp_path, monkeypatch):
    record = {
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3, 4] * 20,
        "trainer_logprobs": [-1.0, -2.0] * 20,
        "engine_logprobs": [-1.0, -2.001] * 20,
    }
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps({**record, "prompt_token_ids": [n]}) + "\n" for n in range(8)))

    def then_append(function):
        def call(*arguments, **named):
            append(path)
            return function(*arguments, **named)

        return call

    measure_mismatch(path)
    monkeypatch.setattr(engine_numbers, "mismatch", then_append(engine_numbers.mismatch))
    with pytest.raises(ChangedInputError, match=r"rollouts\.jsonl"):
        measure_mismatch(path)
    monkeypatch.setattr(doctor_module, "diagnose_records", then_append(doctor_module.diagnose_records))
    with pytest.raises(ChangedInputError, match=r"rollouts\.jsonl"):
        doctor_module.diagnose_file(DoctorJob(rollouts=(str(path),)))
