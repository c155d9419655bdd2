"""Any number of ranks measures what one process measures: the same files and the same numbers."""

import json
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from thread_ranks import in_threads

from kleash import version
from kleash.cli import main
from kleash.engines import LocalEngine, Shard, ShardResult
from kleash.errors import KleashError, RankError, RunFolderError
from kleash.measuring import Measurement, RankGroup, dealing, measure, measure_part, merge, run, run_identity
from kleash.measuring.dealing import OpenRun, RunningKL, run_shards
from kleash.measuring.largest_drift import TopEntries
from kleash.measuring.progress import NullProgressReporter
from kleash.measuring.run_identity import require_same_on_all_ranks
from kleash.measuring.sequence_clusters import SequenceClusters, SequenceSums
from kleash.measuring.shards import SourceChecks
from kleash.models import Pair, TokenSequence, load_pair
from kleash.records import MeasureJob, RunFolder
from kleash.store.checksums import write_checked
from kleash.store.job_folder import RunHeader
from kleash.store.locks import folder_lock
from kleash.store.tables import read_columns
from kleash.uncertainty import Estimate

pytestmark = pytest.mark.filterwarnings("ignore")  # filters belong to the process, and ranks are threads here
HEADER = RunHeader(kleash="1", settings={}, source_sha256="a" * 64, fingerprints={})


@pytest.fixture(scope="module")
def job(pair: tuple[Path, Path], prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> MeasureJob:
    """About a dozen shards."""
    policy, reference = map(str, pair)
    return MeasureJob(
        policy=policy,
        reference=reference,
        prompts=str(prompts),
        max_new_tokens=6,
        batch_tokens=8,
        out=str(tmp_path_factory.mktemp("alone") / "run"),
    )


@pytest.fixture(scope="module")
def alone(job: MeasureJob) -> Measurement:
    """The measurement of one process."""
    return measure(job)


@pytest.fixture(scope="module")
def models(job: MeasureJob) -> Pair:
    return load_pair(job.policy, job.reference)


def numbers(measurement: Measurement) -> dict[str, Any]:
    """Everything but the time."""
    return {
        name: value
        for name, value in json.loads(measurement.to_json()).items()
        if name not in ("seconds", "finished")
    }


def deal(
    job: MeasureJob,
    models: Pair,
    out: Path,
    world_size: int,
    delay: Callable[[int, Shard], None] | None = None,
) -> list[Future[Any]]:
    """``run_shards`` on each of some ranks, without loading models or making a report."""

    class DelayedEngine(LocalEngine):
        def run(self, shard: Shard) -> ShardResult:
            if delay is not None:
                delay(ranks_of[id(self)], shard)
            return super().run(shard)

    ranks_of: dict[int, int] = {}

    def work(group: RankGroup) -> Any:
        folder = RunFolder(out, writer=group.rank)
        engine = DelayedEngine(pair=models, job=job)
        ranks_of[id(engine)] = group.rank
        open_run = OpenRun(
            job=job,
            pair=models,
            folder=folder,
            reporter=NullProgressReporter(),
            ranks=group,
            source_sha256="",
        )
        with group.running():
            if group.is_first:
                with folder.writing(HEADER, resume=True):
                    group.broadcast("open", True)
                    return run_shards(open_run, engine)
            group.broadcast("open")
            with folder.joining(HEADER):
                return run_shards(open_run, engine)

    return in_threads(world_size, work)


def parts(out: Path, kind: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / kind).glob("part-*"))}


def require_same_parts(out: Path, reference: Path) -> None:
    assert parts(out, "tokens") == parts(reference, "tokens")
    assert parts(out, "sequences") == parts(reference, "sequences")


@pytest.mark.parametrize("world_size", [2, 3, 20])
def test_ranks_write_the_shards_of_one_process(
    job: MeasureJob, alone: Measurement, models: Pair, tmp_path: Path, world_size: int
) -> None:
    results = [future.result() for future in deal(job, models, tmp_path / "run", world_size)]
    assert [result.total for result in results] == [alone.counts.shards] * world_size
    require_same_parts(tmp_path / "run", Path(str(job.out)))
    assert [path.name for path in (tmp_path / "run").glob("checksums*")] == ["checksums.jsonl"]


@pytest.mark.parametrize("seed", range(3))
def test_ranks_score_what_is_missing_and_nothing_else(
    job: MeasureJob, alone: Measurement, models: Pair, tmp_path: Path, seed: int
) -> None:
    draw, source, out = random.Random(seed), RunFolder(Path(str(job.out))), tmp_path / "run"
    on_disk = draw.sample(range(alone.counts.shards), draw.randint(1, alone.counts.shards - 1))
    with RunFolder(out).writing(HEADER, resume=False) as folder:
        folder.copy_shards(on_disk, source)
    scored: list[int] = []
    futures = deal(job, models, out, 2, lambda rank, shard: scored.append(shard.index))
    assert [future.exception() for future in futures] == [None, None]
    assert sorted([*scored, *on_disk]) == list(range(alone.counts.shards))
    require_same_parts(out, source.root)


def test_a_slow_rank_takes_fewer_shards(
    job: MeasureJob, alone: Measurement, models: Pair, tmp_path: Path
) -> None:
    taken: dict[int, list[int]] = {0: [], 1: []}

    def delay(rank: int, shard: Shard) -> None:
        taken[rank].append(shard.index)
        time.sleep(0.6 if rank == 1 else 0.0)

    deal(job, models, tmp_path / "run", 2, delay)
    assert len(taken[1]) < len(taken[0]) and sorted(taken[0] + taken[1]) == list(range(alone.counts.shards))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_until_relative_error_stops_at_the_same_shard(
    job: MeasureJob, models: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """Also if ranks have scored beyond it, and if the run goes on with shards beyond it on disk."""
    monkeypatch.setattr(dealing, "MIN_CLUSTERS", 8)
    job = replace(job, until_relative_error=0.2)
    (expected,) = (future.result() for future in deal(job, models, tmp_path / "one", 1))
    assert 2 <= expected.total < 10
    delay = (lambda rank, shard: time.sleep(0.3 if rank == 0 else 0.0)) if world_size > 1 else None
    out = tmp_path / "several"
    for again in range(2):
        results = [future.result() for future in deal(job, models, out, world_size, delay)]
        assert results[0].total == expected.total and RunFolder(out).finished_shards() == tuple(
            range(expected.total)
        )
        require_same_parts(out, tmp_path / "one")
        if again == 0:
            source = RunFolder(Path(str(job.out)))
            with RunFolder(out).writing(HEADER, resume=True) as folder:
                folder.copy_shards([expected.total + 1], source)


def test_until_relative_error_is_decided_seldom_in_a_run_of_many_shards(
    job: MeasureJob, models: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decision reads the sums of all sequences: one after each of n shards would take a time of order n²."""
    decisions: list[int] = []
    kl_of = SequenceClusters.kl

    def counted(clusters: SequenceClusters) -> Estimate:
        decisions.append(len(clusters._shards))
        return kl_of(clusters)

    monkeypatch.setattr(SequenceClusters, "kl", counted)
    job = replace(job, until_relative_error=1e-9)
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        open_run = OpenRun(
            job=job,
            pair=models,
            folder=folder,
            reporter=NullProgressReporter(),
            ranks=RankGroup(),
            source_sha256="",
        )
        running = RunningKL(run=open_run, finished=frozenset(), largest=TopEntries(size=1))
        for index in range(1000):
            sums = SequenceSums(
                *(np.array([index]), np.array([0]), np.array([index])),
                *(np.array([index % 7 + 1.0]), np.array([5.0])),
            )
            open_run.ranks.post(f"sums/{index}", {"rank": 0, "sums": sums.to_lists()})
            running.advance()
    assert running.next_index == 1000 and running.stop is None
    assert decisions[:100] == list(range(1, 101)) and len(decisions) < 350
    assert all(later <= 1.01 * earlier + 1 for earlier, later in pairwise(decisions))


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failure_in_a_shard_ends_all_ranks_and_keeps_what_is_finished(
    job: MeasureJob, alone: Measurement, models: Pair, tmp_path: Path, failing_rank: int
) -> None:
    def fail(rank: int, shard: Shard) -> None:
        if rank == failing_rank and shard.index > 2:
            raise RunFolderError("no space is left to write part-00003.parquet")
        time.sleep(0.02)

    futures = deal(job, models, tmp_path / "run", 2, fail)
    assert str(futures[failing_rank].exception()) == "no space is left to write part-00003.parquet"
    other = futures[1 - failing_rank].exception()
    assert isinstance(other, RankError)
    assert str(other) == f"rank {failing_rank} stopped: no space is left to write part-00003.parquet"
    finished = RunFolder(tmp_path / "run").finished_shards()
    assert 3 <= len(finished) <= alone.counts.shards // 2, "the other rank goes on scoring"
    deal(job, models, tmp_path / "run", 1)
    require_same_parts(tmp_path / "run", Path(str(job.out)))


def test_two_ranks_measure_what_one_process_measures(
    job: MeasureJob, alone: Measurement, tmp_path: Path
) -> None:
    job = replace(job, out=str(tmp_path / "run"))
    results = [future.result() for future in in_threads(2, lambda group: measure(job, ranks=group), nodes=2)]
    assert numbers(results[0]) == numbers(results[1]) == numbers(alone)
    assert numbers(Measurement.read(tmp_path / "run")) == numbers(alone)
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"seed": 7},
            "rank 1 on node-1 measures something else: --seed is 7 there and 0 on rank 0; start all",
        ),
        ({"resume": True}, "--resume is True there and False on rank 0"),
        ({"out": "elsewhere"}, "--out is 'elsewhere' there and "),
    ],
)
def test_a_rank_with_other_settings_is_named_before_anything_is_written(
    job: MeasureJob, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    job = replace(job, out=str(tmp_path / "run"))
    jobs = [job, replace(job, **change)]
    futures = in_threads(2, lambda group: measure(jobs[group.rank], ranks=group), nodes=2)
    errors = [future.exception() for future in futures]
    assert all(message in str(error) for error in errors), errors
    assert [error.is_reported for error in errors if isinstance(error, RankError)].count(False) == 1
    assert not (tmp_path / "run").exists()


def test_a_rank_with_another_version_of_a_package_is_named(
    job: MeasureJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def version_of(name: str) -> str:
        seen.append(name)
        return f"4.{seen.count('transformers')}" if name == "transformers" else "1"

    monkeypatch.setattr(run_identity, "version", version_of)
    header = RunHeader(kleash="1", settings={}, source_sha256="a" * 64, fingerprints={})
    futures = in_threads(2, lambda group: require_same_on_all_ranks(job, header, group))
    errors = [future.exception() for future in futures]
    assert all(isinstance(error, RankError) and not error.is_reported for error in errors)
    messages = set(map(str, errors))
    assert len(messages) == 1 and "the version of transformers is '4." in messages.pop()
    assert set(seen) == set(run_identity.PACKAGES)


def test_a_rank_with_other_files_is_named(job: MeasureJob, tmp_path: Path) -> None:
    """The file lies at the same path on both machines and differs in one letter."""
    jobs = []
    for name in ("here", "there"):
        source = tmp_path / f"{name}.txt"
        source.write_text(
            Path(str(job.prompts)).read_text().replace("boat", "boat" if name == "here" else "goat")
        )
        jobs.append(replace(job, out=str(tmp_path / "run"), prompts=str(source)))
    futures = in_threads(2, lambda group: measure(jobs[group.rank], ranks=group), nodes=2)
    assert "the source's content (sha256) is " in str(futures[0].exception())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": None}, "several processes must agree on the run's folder; give --out"),
        ({"prompts": "-"}, "--prompts - is read by one process; write it to a file for several"),
        ({"reference_cache": "cache"}, "--reference-cache cache would be filled by several processes"),
    ],
)
def test_what_several_processes_cannot_share_is_refused(
    job: MeasureJob, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    job = replace(job, **{"out": str(tmp_path / "run"), **change})
    futures = in_threads(2, lambda group: measure(job, ranks=group))
    assert all(str(future.exception()).startswith(message) for future in futures)


def test_a_folder_that_another_machine_does_not_see_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "VISIBLE_S", 0.1)

    def join(group: RankGroup) -> None:
        folder = RunFolder(tmp_path / f"disk-of-{group.rank}", writer=group.rank)
        with group.running(), run._opened_folder(folder, HEADER, group, resume=False):
            group.gather("never", 0)

    there = in_threads(2, join, nodes=2)[1].exception()
    assert str(there) == (
        f"{tmp_path}/disk-of-1/run.json of rank 0 on node-0 is not there on node-1; --out must lie on a disk that all "
        "machines share"
    )


@pytest.mark.parametrize(
    ("device", "nodes", "expected"),
    [
        ("auto", 1, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda", 2, ["cuda:0", "cuda", "cuda:1"]),
        ("cuda:1", 1, ["cuda:1"] * 3),
        ("cpu", 1, ["cpu"] * 3),
    ],
)
def test_the_ranks_of_a_machine_take_its_gpus_in_turn(
    job: MeasureJob, monkeypatch: pytest.MonkeyPatch, device: str, nodes: int, expected: list[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)

    def device_of_rank(group: RankGroup) -> str:
        with group.running():
            return run.on_device_of_rank(replace(job, device=device), group).device

    assert [future.result() for future in in_threads(3, device_of_rank, nodes=nodes)] == expected


def test_checks_of_a_run_that_stops_early_are_those_of_its_shards() -> None:
    checks = SourceChecks(temperature=1.0)
    for temperature in (1.0, None, 0.7):
        checks.add(
            [
                TokenSequence(
                    prompt_id=0,
                    sample_id=0,
                    prompt_ids=(1,),
                    response_ids=(2,),
                    prompt_text="",
                    response_text="",
                    temperature=temperature,
                )
            ]
        )
    assert "temperature 0.7" in checks.warnings()[0] and checks.first(2).warnings() == ()


def test_files_are_hashed_once_a_machine(
    job: MeasureJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kleash.store import file_hashes

    read: list[Path] = []
    hash_piece = file_hashes._hash_piece
    monkeypatch.setattr(file_hashes, "_load_cache", dict)

    def counted(path: Path, start: int) -> bytes:
        read.append(path)
        return hash_piece(path, start)

    monkeypatch.setattr(file_hashes, "_hash_piece", counted)
    job = replace(job, limit=2, max_new_tokens=2)
    for nodes in (1, 2):
        read.clear()
        job = replace(job, out=str(tmp_path / f"run-{nodes}"))
        in_threads(2, lambda group, job=job: measure(job, ranks=group), nodes=nodes)
        weights = [path for path in read if path.suffix == ".safetensors"]
        assert len(weights) == 2 * nodes, weights


@pytest.fixture(scope="module")
def parts_of_run(job: MeasureJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three finished parts."""
    out = tmp_path_factory.mktemp("array") / "run"
    for number in (1, 2, 3):
        measure_part(replace(job, shard=f"{number}/3", out=str(out)))
    return out


def test_merged_parts_are_the_run_of_one_process(
    job: MeasureJob, alone: Measurement, parts_of_run: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(parts_of_run, tmp_path / "run")
    assert numbers(merge(out)) == numbers(alone)
    require_same_parts(out, Path(str(job.out)))
    for name in ("alternatives.parquet",):
        assert read_columns(out / name, ["token_id_policy"])["token_id_policy"].tolist() == (
            read_columns(Path(str(job.out)) / name, ["token_id_policy"])["token_id_policy"].tolist()
        )
    assert main(["merge", str(out), "--at-most", "1e-9", "--quiet"]) == 1
    merged_again = Measurement.read(out)
    assert merged_again.gate is not None and merged_again.gate.verdict == "failed"
    assert numbers(replace(merged_again, gate=None)) == numbers(alone)


def rewrite_record(path: Path, **changes: object) -> None:
    """Change fields of a JSON file of a folder, with its checksum."""
    record = json.loads(path.read_text())
    write_checked(path.parent, path, json.dumps({**record, **changes}))


@pytest.mark.parametrize(
    "damage",
    [
        *("missing", "unfinished", "being written", "copied", "lost shard", "flipped", "other settings"),
        *("other version", "all of another version", "other number of shards"),
    ],
)
def test_parts_that_are_missing_or_differ_are_named(
    job: MeasureJob, parts_of_run: Path, tmp_path: Path, damage: str
) -> None:
    out = shutil.copytree(parts_of_run, tmp_path / "run")
    part = out / "shard-2-of-3"
    lock: AbstractContextManager[None] = nullcontext()
    if damage == "missing":
        shutil.rmtree(part)
        message = f"{out} lacks shard-2-of-3; score them with kleash measure --shard 2/3 …, then merge"
    elif damage == "unfinished":
        (part / "part.json").unlink()
        message = f"{part} has not finished; run it again with --shard 2/3 --resume, then merge"
    elif damage == "being written":
        (part / "part.json").unlink()
        lock = folder_lock(part, "")
        message = f"another process is writing {part}; wait until part 2/3 has finished, then merge"
    elif damage == "copied":
        shutil.rmtree(part)
        shutil.copytree(out / "shard-1-of-3", part)
        message = f"{part} holds part 1/3 of a run, as its part.json says: the folder was copied or renamed; "
    elif damage == "other version":
        rewrite_record(part / "run.json", kleash="9.9")
        message = (
            f"{part} is of another run: kleash is '9.9' there and '{version.__version__}' in shard-1-of-3"
        )
    elif damage == "all of another version":
        for path in out.glob("*/run.json"):
            rewrite_record(path, kleash="9.9")
        message = f"the parts in {out} were scored by kleash 9.9 and this is kleash {version.__version__}; "
    elif damage == "other number of shards":
        rewrite_record(part / "part.json", shards=14)
        message = f"{part} is of another run: the number of shards is 14 there and "
    elif damage == "lost shard":
        (part / "tokens" / "part-00004.parquet").unlink()
        message = f"{part}/tokens/part-00004.parquet is missing, and the run is made of "
    elif damage == "flipped":
        path = part / "tokens" / "part-00004.parquet"
        path.write_bytes(path.read_bytes()[:-9] + b"x" + path.read_bytes()[-8:])
        message = f"{path} is damaged: it has other bytes than were written"
    else:
        shutil.rmtree(part)
        measure_part(replace(job, shard="2/3", seed=5, out=str(out)))
        message = f"{part} is of another run: --seed is 5 there and 0 in shard-1-of-3; score it again with"
    with lock, pytest.raises(KleashError) as caught:
        merge(out)
    assert str(caught.value).startswith(message)
    assert not (out / "measurement.json").exists()


@pytest.mark.parametrize("change", ["source", "policy", "relative source", "relative policy", "run in out"])
def test_a_merge_says_which_inputs_have_changed_or_are_not_there(
    job: MeasureJob, parts_of_run: Path, tmp_path: Path, change: str
) -> None:
    out = shutil.copytree(parts_of_run, tmp_path / "run")
    headers = [json.loads(path.read_text()) for path in sorted(out.glob("*/run.json"))]
    for path, header in zip(sorted(out.glob("*/run.json")), headers, strict=True):
        if change == "source":
            rewrite_record(path, source_sha256="0" * 64)
        elif change == "policy":
            rewrite_record(path, fingerprints={**header["fingerprints"], "policy": "sha256:0"})
        elif change.startswith("relative"):
            name = "prompts" if change == "relative source" else "policy"
            rewrite_record(path, settings={**header["settings"], name: "moved/x.jsonl"})
    if change == "run in out":
        shutil.copytree(out / "shard-1-of-3", out, dirs_exist_ok=True)
        rewrite_record(out / "run.json", settings={**headers[0]["settings"], "seed": 7})
    start, end = {
        "source": (
            f"the parts in {out} were scored with other inputs: the source's content (sha256) was '000",
            "; put these back, or score the parts again, then merge",
        ),
        "policy": (
            f"the parts in {out} were scored with other inputs: the fingerprint of the policy's weights",
            "; put these back, or score the parts again, then merge",
        ),
        "run in out": (
            f"{out} holds another run than its parts: --seed was 7 and is now 0",
            "; move the parts into a folder of their own, then merge",
        ),
    }.get(change, ("", "; relative paths are those of the tasks: merge in the folder in which they ran"))
    with pytest.raises(KleashError) as caught:
        merge(out)
    assert str(caught.value).startswith(start) and str(caught.value).endswith(end)
    assert not (out / "measurement.json").exists()
    assert (out / "tokens").exists() == (change in ("source", "policy", "run in out"))
