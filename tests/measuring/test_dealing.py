"""Any number of ranks measures what one process measures: the same files and the same numbers."""

import json
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from thread_ranks import in_threads

from kleash.engines import LocalEngine, Shard, ShardResult
from kleash.errors import KleashError, RankError, RunFolderError
from kleash.measuring import Measurement, RankGroup, dealing, measure, measure_part, merge
from kleash.measuring.dealing import OpenRun, run_shards
from kleash.measuring.progress import NullProgressReporter
from kleash.models import Pair, load_pair
from kleash.records import MeasureJob, RunFolder, RunHeader
from kleash.store.tables import read_columns

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
    assert len(finished) >= 3
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
    assert not (tmp_path / "run").exists()


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


def test_files_are_hashed_once_a_machine(
    job: MeasureJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kleash.models.checkpoints import file_hashes

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
    assert numbers(merge(out)) == numbers(alone)


@pytest.mark.parametrize("damage", ["missing", "unfinished", "lost shard", "flipped", "other settings"])
def test_parts_that_are_missing_or_differ_are_named(
    job: MeasureJob, parts_of_run: Path, tmp_path: Path, damage: str
) -> None:
    out = shutil.copytree(parts_of_run, tmp_path / "run")
    part = out / "shard-2-of-3"
    if damage == "missing":
        shutil.rmtree(part)
        message = f"{out} lacks shard-2-of-3; score them with kleash measure --shard 2/3 …, then merge"
    elif damage == "unfinished":
        (part / "part.json").unlink()
        message = f"{part} has not finished; run it again with --shard 2/3 --resume, then merge"
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
    with pytest.raises(KleashError) as caught:
        merge(out)
    assert str(caught.value).startswith(message)
    assert not (out / "measurement.json").exists()
