"""Where ``--engine ray`` stops scaling: a discrete-event simulation with measured costs of the driver.

    python benchmarks/ray_scaling.py --log run/workers.jsonl        # measures the costs, simulates, writes results
    python benchmarks/ray_scaling.py --recorded FILE                # shard times from a result of processes_ray.py
    python benchmarks/ray_scaling.py --costs FILE --shard-seconds 5    # with the costs in an earlier result

The costs of the driver for a shard of 53 responses of 256 tokens are measured on this machine, as processor time where
the driver works and as wall time where it waits for the disk: handing it out and receiving it from a real worker of
Ray, encoding and writing its files, and reading it for the measurement. The times of shards are drawn from those that a
run recorded in ``workers.jsonl``, scaled to a mean; 10^6 prompts are 18 868 such shards.

In the simulation the driver is one server and the disk another one behind it. A worker asks for its next shard when it
has room, waits for the driver, and keeps at most ``depth`` shards. Efficiency is the time of all shards divided by the
number of workers and by the time of the run. "before" is a driver that encodes each shard's files itself, writes them
in one thread, and gives a worker one shard at a time; "now" is what the code does.
"""

import argparse
import heapq
import json
import logging
import os
import random
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from time import perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np
from harness import write_result

from kleash.engines import Shard, ShardResult
from kleash.engines.ray.task_queue import IN_FLIGHT, LATE_FACTOR
from kleash.jobs import MeasureJob
from kleash.measuring.estimand import estimand_of
from kleash.measuring.largest_drift import MAX_SEQUENCES, TopEntries
from kleash.measuring.measurement import count_sequences, sum_tokens
from kleash.measuring.remote_shards import PackedShard, pack_shard, take_alternatives, threshold
from kleash.measuring.shard_writer import MAX_WAITING, ShardWriter, WrittenShard
from kleash.measuring.token_quantiles import token_quantiles
from kleash.models import Prompt
from kleash.store import RunFolder
from kleash.store.job_folder import RunHeader
from kleash.store.run_folder import encode_shard, encode_top
from kleash.store.tables import TOKEN_COLUMNS, TOP_COLUMNS, encode_table
from kleash.store.worker_log import read_worker_lines

RESPONSES, TOKENS = 53, 256
PROMPTS = 10**6
SHARDS = -(-PROMPTS // RESPONSES)
WORKERS = (1, 10, 30, 100, 300, 1000)
MEASURED_SHARDS = 24


class Costs(NamedTuple):
    """Seconds of the driver for one shard."""

    hand_out: float
    receive: float
    bookkeeping: float
    encode: float
    write_one_thread: float
    write: float
    measure: float
    """For the measurement at the end: two passes over the files."""


def synthetic_shard(number: int, draw: np.random.Generator) -> tuple[Shard, ShardResult]:
    """A shard of long-tailed KL."""
    rows, first = RESPONSES * TOKENS, number * RESPONSES
    tokens: dict[str, Any] = {}
    for name, kind in TOKEN_COLUMNS.items():
        if kind == "float32":
            tokens[name] = draw.gamma(0.3, 1.0, rows).astype(np.float32)
        elif kind == "int32":
            tokens[name] = draw.integers(0, 30_000, rows).astype(np.int32)
        else:
            tokens[name] = [f" word{value}" for value in draw.integers(0, 5000, rows)]
    tokens["prompt_id"] = np.repeat(np.arange(first, first + RESPONSES), TOKENS).astype(np.int32)
    tokens["sample_id"] = np.zeros(rows, np.int32)
    tokens["position"] = np.tile(np.arange(TOKENS), RESPONSES).astype(np.int32)
    for name in ("entropy_policy", "entropy_reference"):
        tokens[name] = np.minimum(tokens[name], 5.0)
    for name in ("top1_probability_policy", "top1_probability_reference", "total_variation"):
        tokens[name] = draw.random(rows).astype(np.float32)
    for name in ("logp_policy", "logp_reference", "logp_sampled"):
        tokens[name] = -tokens[name] - 0.01
    sequences = {
        "prompt_id": np.arange(first, first + RESPONSES, dtype=np.int32),
        "sample_id": np.zeros(RESPONSES, np.int32),
        "prompt_hash": ["0" * 16] * RESPONSES,
        "prompt": ["It was an evening of the year, and " * 6] * RESPONSES,
        "response": ["the sea was calm and a boat went out " * 30] * RESPONSES,
        "finish_reason": ["length"] * RESPONSES,
        "tokens": np.full(RESPONSES, TOKENS, np.int32),
    }
    likeliest: dict[str, np.ndarray] = {}
    for role in ("policy", "reference"):
        likeliest[f"token_id_{role}"] = draw.integers(0, 30_000, (rows, 5)).astype(np.int32)
        likeliest[f"probability_{role}"] = draw.random((rows, 5)).astype(np.float32)
    prompts = tuple(
        Prompt(
            prompt_id=first + n,
            token_ids=tuple(range(50)),
            text="It was an evening " * 12,
            prompt_hash="0" * 16,
        )
        for n in range(RESPONSES)
    )
    return Shard(index=number, prompts=prompts), ShardResult(
        tokens=tokens, sequences=sequences, likeliest=likeliest
    )


def measure_costs(folder: Path) -> tuple[Costs, dict[str, Any]]:
    """Measure the costs on this machine; also sizes of what is sent and written."""
    draw = np.random.default_rng(0)
    results = [synthetic_shard(number, draw) for number in range(MEASURED_SHARDS)]
    begin = process_time()
    for _, result in results:
        encode_shard(result.tokens, result.sequences)
    encode = (process_time() - begin) / MEASURED_SHARDS
    largest, packed = TopEntries(size=MAX_SEQUENCES), []
    for shard, result in results:
        packed.append(pack_shard(shard, result, threshold(largest), largest.column))
        take_alternatives(packed[-1], largest)
    hand_out, receive = measure_ray([shard for shard, _ in results], packed)
    begin = process_time()
    tops = [take_alternatives(part, TopEntries(size=MAX_SEQUENCES)) for part in packed]
    listed = [json.dumps(part.sums.to_lists()) for part in packed]
    for text in listed:
        json.loads(text)
    count = (process_time() - begin) / MEASURED_SHARDS
    header = RunHeader(kleash="0", settings={}, source_sha256="0" * 64, fingerprints={})
    with RunFolder(folder / "one").writing(header, resume=False) as run_folder:
        begin = perf_counter()
        for (shard, _), part, top in zip(results, packed, tops, strict=True):
            run_folder.write_encoded_shards(
                {shard.index: part.files._replace(top=encode_table(top, TOP_COLUMNS))}
            )
        write_one_thread = (perf_counter() - begin) / MEASURED_SHARDS
        measure = measure_passes(run_folder)
    with RunFolder(folder / "several").writing(header, resume=False) as several:
        begin = perf_counter()
        with ShardWriter(several) as writer:
            for (shard, _), part, top in zip(results, packed, tops, strict=True):
                writer.add(WrittenShard(shard.index, part.sums), part.files._replace(top=encode_top(top)))
                list(writer.written())
            list(writer.written(wait_for_all=True))
        write = (perf_counter() - begin) / MEASURED_SHARDS
    sizes = {
        "bytes of files a shard": len(packed[0].files.tokens) + len(packed[0].files.sequences),
        "load average": [round(load, 1) for load in os.getloadavg()],
    }
    return Costs(hand_out, receive, count, encode, write_one_thread, write, measure), sizes


def measure_passes(folder: RunFolder) -> float:
    """Processor time a shard of the passes over the files of a finished run."""
    begin = process_time()
    counts = count_sequences(folder, on_text=False)
    estimand = estimand_of(MeasureJob(max_new_tokens=TOKENS), all_have_logprobs=True, split=False)
    sum_tokens(folder, estimand, counts.clusters)
    token_quantiles(folder, counts.clusters, "kl_policy_reference")
    return (process_time() - begin) / MEASURED_SHARDS


def measure_ray(shards: Sequence[Shard], packed: Sequence[PackedShard]) -> tuple[float, float]:
    """Processor time of the driver for handing out a shard, and for receiving one, with a real worker of Ray."""
    import ray

    ray.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )

    class Sender:
        def __init__(self, packed: Sequence[PackedShard]) -> None:
            self._packed = packed

        def score(self, shard: Shard, batch_tokens: int, hint: Any) -> PackedShard:
            return self._packed[shard.index]

    try:
        actor = ray.remote(Sender).remote(list(packed))  # pyright: ignore[reportAttributeAccessIssue]
        score: Any = actor.score
        ray.get(score.remote(shards[0], 1, None))
        hand_out, receive = 0.0, 0.0
        for _ in range(2):
            begin = process_time()
            calls = [score.remote(shard, 1, None) for shard in shards]
            hand_out += process_time() - begin
            ray.wait(calls, num_returns=len(calls))
            begin = process_time()
            while calls:
                ready, _ = ray.wait(calls, num_returns=1)
                ray.get(ready[0])
                calls.remove(ready[0])
            receive += process_time() - begin
    finally:
        ray.shutdown()
    return hand_out / 2 / len(shards), receive / 2 / len(shards)


@dataclass(frozen=True)
class Driver:
    """What the driver does for a shard."""

    serve: float
    """Seconds of its one thread."""
    write: float
    """Seconds of the disk."""
    writes_beside: bool
    """Whether it goes on while the disk works."""
    depth: int
    """Shards that a worker has."""
    repeats_late: bool
    """Whether workers without work score late shards as well."""


@dataclass(order=True)
class Event:
    """The end of a shard in a worker; shard -1 stands for a worker that has none and asks again."""

    time: float
    worker: int = field(compare=False)
    shard: int = field(compare=False)


def simulate(
    times: Sequence[float], workers: int, driver: Driver, stragglers: dict[int, float]
) -> dict[str, float]:
    """Simulate a run; its seconds, efficiency, share of time in which the driver works, and seconds of the tail."""
    next_shard, now_free, disk_free = 0, 0.0, 0.0
    disk_ends: deque[float] = deque()
    events: list[Event] = []
    queues: list[deque[int]] = [deque() for _ in range(workers)]
    starts: dict[int, float] = {}
    done: set[int] = set()
    open_shards: set[int] = set()
    copied: set[int] = set()
    busy = tail_begin = end = 0.0
    mean = fmean(times)

    def seconds_of(shard: int, worker: int) -> float:
        return times[shard] * stragglers.get(worker, 1.0)

    def begin(worker: int, moment: float) -> None:
        shard = queues[worker][0]
        starts.setdefault(shard, moment)
        heapq.heappush(events, Event(moment + seconds_of(shard, worker), worker, shard))

    for worker in list(range(workers)) * driver.depth:
        if next_shard < len(times):
            now_free += driver.serve / 2
            queues[worker].append(next_shard)
            open_shards.add(next_shard)
            next_shard += 1
            if len(queues[worker]) == 1:
                begin(worker, now_free)
    while events and len(done) < len(times):
        event = heapq.heappop(events)
        if event.shard >= 0:
            queues[event.worker].popleft()
            if queues[event.worker]:
                begin(event.worker, event.time)
            moment = max(event.time, now_free)
            if driver.writes_beside and len(disk_ends) >= MAX_WAITING:
                moment = max(moment, disk_ends.popleft())
            busy += driver.serve
            now_free = moment + driver.serve
            if event.shard not in done:
                done.add(event.shard)
                open_shards.discard(event.shard)
                disk_free = max(disk_free, now_free) + driver.write
                disk_ends.append(disk_free)
                if not driver.writes_beside:
                    busy += driver.write
                    now_free = disk_free
            end = max(end, now_free, disk_free)
        shard = None
        if next_shard < len(times):
            shard, next_shard = next_shard, next_shard + 1
            open_shards.add(shard)
            tail_begin = now_free
        elif driver.repeats_late and not queues[event.worker]:
            now = max(now_free, event.time)
            behind = [n for queue in queues for n in list(queue)[1:] if n in open_shards and n not in copied]
            late = [n for n in open_shards if starts.get(n, now) < now - LATE_FACTOR * IN_FLIGHT * mean]
            shard = min(behind, default=min(late, key=lambda n: starts[n], default=None))
            if shard is None:  # looks again later, as the driver does
                heapq.heappush(events, Event(now + mean / 4, event.worker, -1))
            else:
                now_free = max(now_free, event.time)
                starts[shard] = now
                copied.add(shard)
        if shard is not None:
            queues[event.worker].append(shard)
            if len(queues[event.worker]) == 1:
                begin(event.worker, now_free)
    return {
        "seconds": round(end, 1),
        "efficiency": round(sum(times) / workers / end, 3),
        "driver_busy": round(busy / end, 3),
        "tail_seconds": round(end - tail_begin, 1),
    }


def drivers(costs: Costs) -> dict[str, Driver]:
    """The driver before and now, and what each change is worth."""
    served = costs.hand_out + costs.receive + costs.bookkeeping
    before = Driver(served + costs.encode, costs.write_one_thread, False, 1, False)
    encoded = replace(before, serve=served)
    threads = replace(encoded, write=costs.write, writes_beside=True)
    return {
        "before": before,
        "workers encode the files": encoded,
        "and a thread writes batches of them": threads,
        "now: and workers have the next shard": replace(threads, depth=IN_FLIGHT, repeats_late=True),
    }


def shard_times(recorded: Sequence[float], mean: float, draw: random.Random) -> list[float]:
    """Seconds of all shards: recorded seconds a token, scaled to a mean."""
    rates = list(recorded) or [1.0]
    average = fmean(rates)
    return [mean * draw.choice(rates) / average for _ in range(SHARDS)]


def main() -> None:
    """Measure or read costs, simulate, print and write ``results/ray_scaling.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--log", type=Path, help="workers.jsonl of a run, whose shard times are drawn from")
    parser.add_argument("--recorded", type=Path, help="a result of processes_ray.py, likewise")
    parser.add_argument("--costs", type=Path, help="a result of this script, whose costs are taken")
    parser.add_argument("--shard-seconds", type=float, nargs="+", default=[1.0, 10.0, 60.0])
    options = parser.parse_args()
    if options.costs is not None:
        figures = json.loads(options.costs.read_text())["figures"]
        costs, sizes, spread = Costs(**figures["costs"]), figures["sizes"], figures["recorded"]
    else:
        with tempfile.TemporaryDirectory() as folder:
            costs, sizes = measure_costs(Path(folder))
        spread = []
    if options.log is not None:
        lines = read_worker_lines(options.log.parent).values()
        spread = [round(line.seconds / line.tokens, 7) for line in lines if line.tokens]
    if options.recorded is not None:
        rounds = json.loads(options.recorded.read_text())["figures"]["rounds"]
        spread = [rate for row in rounds for rate in row["recorded"]]
    print(json.dumps({"costs": costs._asdict(), "sizes": sizes}, indent=2), flush=True)
    runs: list[dict[str, Any]] = []
    for mean in options.shard_seconds:
        times = shard_times(spread, mean, random.Random(0))
        for name, driver in drivers(costs).items():
            for workers in WORKERS:
                outcome = simulate(times, workers, driver, {})
                runs.append({"shard_seconds": mean, "driver": name, "workers": workers, **outcome})
                print(json.dumps(runs[-1]), flush=True)
    now = drivers(costs)["now: and workers have the next shard"]
    for repeats in (False, True):  # one of the workers is 20 times slower
        times, slow = (
            shard_times(spread, 10.0, random.Random(0)),
            {0: 20.0},
        )
        outcome = simulate(times, 100, replace(now, repeats_late=repeats), slow)
        runs.append(
            {"shard_seconds": 10.0, "driver": f"slow workers, repeats={repeats}", "workers": 100, **outcome}
        )
        print(json.dumps(runs[-1]), flush=True)
    serve = costs.hand_out + costs.receive + costs.bookkeeping
    figures = {
        "costs": costs._asdict(),
        "sizes": sizes,
        "recorded": spread,
        "shards": SHARDS,
        "files": {"before": 3 * SHARDS, "now": 2 * SHARDS},
        "shards_per_second": {"driver": round(1 / serve, 1), "disk": round(1 / costs.write, 1)},
        "measurement_seconds": round(costs.measure * SHARDS, 1),
        "runs": runs,
    }
    write_result("ray_scaling", figures, packages=("torch", "ray", "pyarrow"))


if __name__ == "__main__":
    main()
