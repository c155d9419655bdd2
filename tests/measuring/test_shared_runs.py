"""Any number of processes on one folder measure what one process measures: the same files and the same numbers."""

import json
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from command_words import words
from run_files import require_same_parts, untimed
from two_threads import measured_twice

from kleash.engines import LocalEngine
from kleash.errors import CannotRunError, OptionError, RunFolderError
from kleash.measuring import Measurement, measure, model_pair, shard_scoring
from kleash.measuring.model_pair import on_device_of_rank
from kleash.measuring.progress import ProgressReporter
from kleash.measuring.run import default_out
from kleash.measuring.sequence_clusters import SequenceSums, mean_of_sequences
from kleash.measuring.shard_scoring import OpenRun, RunningKL, run_shards
from kleash.models import load_pair
from kleash.records import RunFolder
from kleash.store.checksums import write_checked
from kleash.store.job_folder import RunHeader
from kleash.store.tables import TOKEN_COLUMNS, encode_table, read_columns

# Filters belong to the process, and some processes are threads here.
pytestmark = pytest.mark.filterwarnings("ignore")
HEADER = RunHeader(kleash="1", settings={}, source_sha256="a" * 64, fingerprints={})


@pytest.fixture(scope="module")
def models(job):
    return load_pair(job.policy, job.reference)


def opened(job, models, folder):
    return OpenRun(job=job, pair=models, folder=folder, reporter=ProgressReporter(), source_sha256="")


def score_together(job, models, out, processes, delay=lambda process, shard: None):
    """``run_shards`` of several processes, which are threads: a claim belongs to an open file, not to a process."""

    class DelayedEngine(LocalEngine):
        def run(self, shard):
            delay(process_of[id(self)], shard)
            return super().run(shard)

    process_of = {}
    begin = Barrier(processes)

    def work(process):
        engine = DelayedEngine(pair=models, job=job)
        process_of[id(engine)] = process
        with RunFolder(out).writing(HEADER, resume=True) as folder:
            begin.wait()
            return run_shards(opened(job, models, folder), engine)

    with ThreadPoolExecutor(processes) as threads:
        return [threads.submit(work, process) for process in range(processes)]


def copy_shards(source, folder, indices):
    for index in indices:
        for kind in ("tokens", "sequences"):
            name = f"{kind}/part-{index:05d}.parquet"
            write_checked(folder.root, folder.root / name, (source / name).read_bytes())


def test_processes_write_the_shards_of_one(job, alone, models, tmp_path):
    scored = []
    for future in score_together(job, models, tmp_path, 3, lambda _, shard: scored.append(shard.index)):
        future.result()
    assert sorted(scored) == list(range(alone.counts.shards)), "each is scored once"
    require_same_parts(tmp_path, Path(str(job.out)))
    assert not (tmp_path / ".claims").exists()


def test_what_is_missing_is_scored_and_nothing_else(job, alone, models, tmp_path, monkeypatch):
    draw, source, totals = random.Random(0), Path(str(job.out)), list[int]()
    monkeypatch.setattr(ProgressReporter, "set_total", lambda _, sequences: totals.append(sequences))
    on_disk = draw.sample(range(alone.counts.shards), draw.randint(1, alone.counts.shards - 1))
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        copy_shards(source, folder, on_disk)
        kept = sum(len(set(part["prompt_id"])) for part in folder.parts("tokens", ["prompt_id"]))
    scored = []
    futures = score_together(job, models, tmp_path, 2, lambda _, shard: scored.append(shard.index))
    assert [future.exception() for future in futures] == [None, None]
    assert sorted([*scored, *on_disk]) == list(range(alone.counts.shards))
    assert max(totals) == alone.counts.sequences - kept < alone.counts.sequences, "what is left to do"
    require_same_parts(tmp_path, source)


def test_a_process_that_fails_leaves_its_shards_to_the_others(job, alone, models, tmp_path):
    def fail(process, shard):
        if process == 1 and shard.index > 2:
            raise RunFolderError("no space is left to write part-00003.parquet")
        time.sleep(0.02)

    futures = score_together(job, models, tmp_path, 2, fail)
    assert futures[0].exception() is None and isinstance(futures[1].exception(), RunFolderError)
    require_same_parts(tmp_path, Path(str(job.out)))


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.usefixtures("alone")
def test_until_relative_error_stops_at_the_same_shard(job, models, tmp_path, monkeypatch, processes):
    """Also if processes have scored beyond it, and if the run goes on with shards beyond it on disk."""
    monkeypatch.setattr(shard_scoring, "MIN_CLUSTERS", 8)
    stopping = replace(job, until_relative_error=0.2)
    for future in score_together(stopping, models, tmp_path / "one", 1):
        future.result()
    stop = RunFolder(tmp_path / "one").stop
    assert stop is not None and 2 <= stop < 10
    out = tmp_path / "several"

    def delay(process, shard):
        time.sleep(0.3 if process == 0 and processes > 1 else 0.0)

    for again in range(2):
        for future in score_together(stopping, models, out, processes, delay):
            future.result()
        assert RunFolder(out).stop == stop and RunFolder(out).finished_shards() == tuple(range(stop))
        require_same_parts(out, tmp_path / "one", stop)
        if again == 0:
            with RunFolder(out).writing(HEADER, resume=True) as folder:
                copy_shards(Path(str(job.out)), folder, [stop + 1])


def test_until_relative_error_is_decided_seldom_in_a_run_of_many_shards(job, models, tmp_path, monkeypatch):
    """A decision reads the sums of all sequences: one after each of n shards would take a time of order n²."""
    decisions = []

    def counted(shards, **named):
        decisions.append(len(shards))
        return mean_of_sequences(shards, **named)

    monkeypatch.setattr(shard_scoring, "mean_of_sequences", counted)
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        running = RunningKL(run=opened(replace(job, until_relative_error=1e-9), models, folder))
        monkeypatch.setattr(shard_scoring, "Checksums", None)  # those of all shards are of order n², too
        for index in range(1000):
            columns = [index], [0], [index], [index % 7 + 1.0], [5.0]
            running.add(index, SequenceSums(*map(np.array, columns)))
    assert len(running._sums) == 1000 and running.stop is None
    assert decisions[:100] == list(range(1, 101)) and len(decisions) < 350
    assert all(later <= 1.01 * earlier + 1 for earlier, later in pairwise(decisions))


def test_three_commands_measure_what_one_measures_though_one_is_killed(job, alone, command_forks, tmp_path):
    """One prints the result and owns the exit code of the gate, another one ends with 0."""
    out = tmp_path / "run"
    options = {name: getattr(job, name) for name in ("prompts", "limit", "max_new_tokens", "batch_tokens")}
    line = words("measure", policy=job.policy, reference=job.reference, out=out, at_most=1e-9, **options)
    processes = [command_forks.start(line) for _ in range(3)]
    while not any((out / "sequences").glob("part-*")):
        assert any(process.poll() is None for process in processes)
        time.sleep(0.005)
    processes[1].kill()
    ended = [(process.communicate(), process.returncode) for process in processes]
    codes, killed = sorted(code for _, code in ended), -9
    assert codes in ([killed, 0, 1], [0, 0, 1]), ended  # the second if all was over before the signal
    assert sum("KL(policy ‖ reference)" in output for (output, _), code in ended if code == 1) == 1
    assert not any(output for (output, _), code in ended if code == 0)
    measured, single = Measurement.read(out), Measurement.read(str(job.out))
    assert measured.gate is not None and measured.job == {**single.job, "at_most": 1e-9}
    assert untimed(out, "gate", "job") == untimed(Path(str(job.out)), "gate", "job")
    require_same_parts(out, Path(str(job.out)))


def test_a_second_process_needs_no_resume_and_returns_the_same(job, alone, tmp_path):
    source = Path(str(job.out))
    job = replace(job, out=str(tmp_path / "run"))
    results = measured_twice(job)
    assert sorted(is_own for _, is_own in results) == [False, True]
    assert results[0][0].to_json() == results[1][0].to_json()
    assert untimed(Path(str(job.out))) == untimed(source)
    with pytest.raises(RunFolderError, match="--resume"):
        measure(job)
    measure(replace(job, resume=True))
    assert untimed(Path(str(job.out))) == untimed(source)


@pytest.mark.parametrize("change", ["seed", "source", "package"])
def test_a_process_that_measures_something_else_is_refused_before_its_first_shard(
    job, alone, tmp_path, monkeypatch, change
):
    out = shutil.copytree(Path(str(job.out)), tmp_path / "run")
    shutil.rmtree(out / "sequences")
    (out / "sequences").mkdir()
    shutil.copy(Path(str(job.out)) / "sequences" / "part-00000.parquet", out / "sequences")
    other, message = replace(job, out=str(out), resume=True), ""
    if change == "seed":
        other, message = replace(other, seed=7), "--seed was 0 and is now 7"
    elif change == "source":
        path = tmp_path / "prompts.txt"
        path.write_text(Path(str(job.prompts)).read_text().replace("boat", "goat"))
        other, message = replace(other, prompts=str(path)), "the source's content (sha256) was "
    else:
        version = model_pair.version
        monkeypatch.setattr(model_pair, "version", lambda name: "4.1" if name == "torch" else version(name))
        message = "the version of torch was "
    with pytest.raises(RunFolderError) as caught:
        measure(other)
    assert message in str(caught.value) and "holds another run" in str(caught.value)
    assert len(list((out / "sequences").iterdir())) == 1


def test_a_folder_that_is_not_named_is_a_new_one_on_which_processes_cannot_agree(job, tmp_path, monkeypatch):
    for number in range(4):  # within one second
        Path(default_out(str(tmp_path))).mkdir()
        if number == 1:
            min(tmp_path.iterdir()).rmdir()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="give --out"):
        measure(replace(job, out=None))


@pytest.mark.parametrize(
    ("device", "local", "expected"),
    [
        ("auto", "2", "cuda:1"),
        ("cuda", "3", "cuda:1"),
        ("cuda:1", "2", "cuda:1"),
        ("cpu", "2", "cpu"),
        ("cuda", "1", "cuda"),
    ],
)
def test_the_processes_of_a_machine_take_its_gpus_in_turn(job, monkeypatch, device, local, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for name, value in {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": local}.items():
        monkeypatch.setenv(name, value)
    assert on_device_of_rank(replace(job, device=device)).device == expected


@pytest.mark.parametrize("stop", [None, 0.9])
def test_warnings_about_responses_are_about_those_that_were_scored(job, tmp_path, monkeypatch, stop):
    monkeypatch.setattr(shard_scoring, "MIN_CLUSTERS", 8)
    records = [{"prompt": f"number {number}", "response": "a boat"} for number in range(24)]
    records[-1]["temperature"] = 0.7
    file = tmp_path / "responses.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = {"prompts": None, "responses": str(file), "until_relative_error": stop}
    measurement = measure(replace(job, out=str(tmp_path / "run"), **options))
    sequences = measurement.counts.sequences
    assert (sequences == len(records)) is (stop is None)
    assert ("temperature 0.7" in " ".join(measurement.warnings)) is (stop is None)
    assert f"{sequences} of {sequences} responses came as text" in " ".join(measurement.warnings)


def test_files_of_two_processes_that_do_not_fit_are_refused(job, alone, tmp_path):
    """As where a disk knows no locks, and two machines round apart."""
    out = shutil.copytree(Path(str(job.out)), tmp_path / "run")
    path = out / "tokens" / "part-00000.parquet"
    columns = read_columns(path, list(TOKEN_COLUMNS), lambda path, _: path.read_bytes())
    shorter = {name: values[:-1] for name, values in columns.items()}
    write_checked(out, path, encode_table(shorter, TOKEN_COLUMNS))
    with pytest.raises(RunFolderError, match="different processes"):
        measure(replace(job, out=str(out), resume=True))


@pytest.mark.parametrize("device_map", ["fsdp", "tensor"])
def test_a_model_over_several_processes_is_refused_in_one(device_map, tmp_path):
    with pytest.raises(OptionError, match=f"--device-map {device_map} spreads a model"):
        measure(limit=2, device_map=device_map, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(CannotRunError, match=f"--device-map {device_map}.*this is one process"):
        load_pair("shipped:policy", "shipped:reference", device_map=device_map)
