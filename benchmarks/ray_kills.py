"""Failures of ``kleash measure --engine ray`` on a real cluster: is nothing lost, and does each end in a sentence?

    python benchmarks/ray_kills.py                              # all, in some minutes
    python benchmarks/ray_kills.py --cases "a node is lost" "Ctrl-C"

A local cluster of a head and two nodes is started (``ray.cluster_utils.Cluster``), and only processes of this script
are killed. Every run is compared with one of a single process: the files ``tokens/`` and ``sequences/`` byte by byte,
``alternatives.parquet``, and measurement.json without times. A worker's memory runs out because its address space is
limited; its rows are compared with a tolerance.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import write_result

from kleash.store import RunFolder
from kleash.store.tables import read_columns

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
OPTIONS = ("--limit", "40", "--max-new-tokens", "24", "--batch-tokens", "16")
LARGE_BATCHES = ("--batch-tokens", "16384", "--window", "256")
"""Text in windows of 256 tokens: the activations of a batch are most of what a shard takes."""
MEMORY_LIMITS = (400, 280, 200)
"""MB that a worker may take beside what it has after loading the models, until memory runs out."""
TIMES = ("seconds", "finished")
PATCHED_DRIVER = """
import os, resource, sys
from dataclasses import replace
from kleash.cli import main
from kleash.engines import LocalEngine
from kleash.measuring import workers

def poisoned(job, folder):
    class Engine(LocalEngine):
        def run(self, shard):
            if shard.index == 5:
                os._exit(7)
            return super().run(shard)
    engine = LOAD(job, folder)
    return Engine(pair=engine.pair, job=engine.job, top=engine.top)

def limited(job, folder):
    engine = LOAD(job, folder)
    from kleash.engines import Shard
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_MB * 2**20, resource.RLIM_INFINITY))
    return engine

LOAD, LIMIT_MB = workers.worker_engine, int(os.environ.get("LIMIT_MB", "0"))
workers.worker_engine = {"poisoned": poisoned, "limited": limited}[os.environ["PATCH"]]
raise SystemExit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    errors: str
    seconds: float


class Command:
    """``kleash measure`` as a process of its own."""

    def __init__(
        self,
        out: Path,
        *words: str,
        patch: str | None = None,
        options: tuple[str, ...] = OPTIONS,
        **variables: str,
    ) -> None:
        """Start it."""
        start = ["-m", "kleash"] if patch is None else ["-c", PATCHED_DRIVER]
        environment = {**ENVIRONMENT, **variables, **({} if patch is None else {"PATCH": patch})}
        self.out, self.begin = out, time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *start, "measure", *options, "--quiet", "--out", str(out), *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_shards(self, count: int) -> None:
        """Wait until so many shards are on disk."""
        while len(list((self.out / "sequences").glob("part-*"))) < count:
            if self.process.poll() is not None:
                raise RuntimeError(f"ended with {self.process.returncode}: {self.process.communicate()}")
            time.sleep(0.002)

    def end(self) -> Ended:
        """Wait for its end."""
        printed, errors = self.process.communicate(timeout=600)
        assert not printed, f"standard output of a quiet command: {printed!r}"
        return Ended(self.process.returncode, errors.strip(), time.monotonic() - self.begin)


@dataclass
class Scene:
    """A cluster, a folder, and the run of one process."""

    cluster: Any
    folder: Path
    alone: Path
    extra_nodes: list[Any]

    @property
    def words(self) -> tuple[str, ...]:
        """The options of a run on the cluster."""
        return ("--engine", "ray", "--address", str(self.cluster.address))

    def workers(self) -> list[psutil.Process]:
        """The processes of kleash's workers, all of which descend from this one."""
        children = psutil.Process().children(recursive=True)
        return [child for child in children if "ray::ShardWorker" in " ".join(_command_line(child))]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def differences(out: Path, expected: Path) -> list[str]:
    """The names of what differs between two runs."""
    names = {
        path.relative_to(root).as_posix()
        for root in (out, expected)
        for pattern in ("tokens/*", "sequences/*", "alternatives.parquet")
        for path in root.glob(pattern)
    }
    differing = [
        name
        for name in sorted(names)
        if not ((out / name).exists() and (expected / name).exists())
        or (out / name).read_bytes() != (expected / name).read_bytes()
    ]
    measured = [json.loads((root / "measurement.json").read_text()) for root in (out, expected)]
    fields = [{name: value for name, value in data.items() if name not in TIMES} for data in measured]
    return differing + [name for name in fields[0] if fields[0][name] != fields[1].get(name)]


def require_same(scene: Scene, ended: Ended, out: Path) -> dict[str, Any]:
    """The seconds of a run that must have given the result of one process."""
    assert ended.code == 0, ended
    assert not differences(out, scene.alone), differences(out, scene.alone)
    return {"seconds": round(ended.seconds, 1), "result": "that of one process"}


def worker_is_killed(scene: Scene, out: Path) -> dict[str, Any]:
    """SIGKILL to a worker in mid-shard, twice."""
    command = Command(out, *scene.words, "--workers", "2")
    for count in (2, 12):
        command.wait_for_shards(count)
        os.kill(scene.workers()[0].pid, signal.SIGKILL)
    return require_same(scene, command.end(), out)


def node_is_lost(scene: Scene, out: Path) -> dict[str, Any]:
    """A node with a worker is removed without notice, and another one joins."""
    command = Command(out, *scene.words, "--workers", "3")
    command.wait_for_shards(3)
    scene.cluster.remove_node(scene.extra_nodes.pop(), allow_graceful=False)
    scene.extra_nodes.append(scene.cluster.add_node(num_cpus=1))
    return require_same(scene, command.end(), out)


def driver_is_killed(scene: Scene, out: Path) -> dict[str, Any]:
    """SIGKILL to the driver; resumed on the cluster, killed again, and finished by one process without Ray."""
    for count, words in ((3, ()), (12, ("--resume",))):
        command = Command(out, *scene.words, "--workers", "2", *words)
        command.wait_for_shards(count)
        command.process.kill()
        command.process.communicate()
    earlier_files = {path.name: path.stat().st_mtime_ns for path in (out / "sequences").iterdir()}
    outcome = require_same(scene, Command(out, "--resume").end(), out)
    finished = RunFolder(out).finished_shards()
    again = [
        name
        for name, changed in earlier_files.items()
        if (out / "sequences" / name).stat().st_mtime_ns != changed
    ]
    return {**outcome, "shards": len(finished), "kept": len(earlier_files), "scored again": len(again)}


def two_drivers(scene: Scene, out: Path) -> dict[str, Any]:
    """A second command on the same folder, while the first one runs."""
    command = Command(out, *scene.words, "--workers", "1")
    command.wait_for_shards(1)
    second = Command(out, *scene.words, "--workers", "1", "--resume").end()
    assert second.code == 2 and second.errors.startswith("kleash: another process is writing"), second
    return {**require_same(scene, command.end(), out), "second": second.errors}


def nan_in_a_model(scene: Scene, out: Path) -> dict[str, Any]:
    """The same sentence and exit code as without Ray."""
    from safetensors.torch import load_file, save_file

    from kleash.shipped import shipped_folder

    broken = out.with_name("broken")
    broken.mkdir(parents=True)
    for path in shipped_folder("policy").iterdir():
        if path.is_file():
            (broken / path.name).write_bytes(path.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[name][300:] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    words = ("--policy", str(broken), "--prompts", str(shipped_prompts()))
    ended = [
        Command(out.with_name(f"nan-{n}"), *words, *more).end() for n, more in enumerate(((), scene.words))
    ]
    assert ended[0].code == ended[1].code == 2 and ended[0].errors == ended[1].errors, ended
    return {"sentence": ended[1].errors, "seconds": round(ended[1].seconds, 1)}


def shipped_prompts() -> Path:
    """The prompts of the package."""
    from kleash.shipped import shipped_prompts as path

    return path()


def interrupted(scene: Scene, out: Path) -> dict[str, Any]:
    """SIGINT to the driver; then resumed."""
    command = Command(out, *scene.words, "--workers", "2")
    command.wait_for_shards(3)
    command.process.send_signal(signal.SIGINT)
    ended = command.end()
    assert ended.code == 130 and ended.errors.startswith(
        "kleash: interrupted; finished shards are on disk"
    ), ended
    deadline = time.monotonic() + 30
    while scene.workers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not scene.workers(), "workers of a driver that is gone"
    return require_same(scene, Command(out, *scene.words, "--resume").end(), out)


def poison(scene: Scene, out: Path) -> dict[str, Any]:
    """A shard that ends every worker."""
    ended = Command(out, *scene.words, "--workers", "2", patch="poisoned").end()
    assert ended.code == 2 and "shard 5 (prompt_id " in ended.errors and "ended 3 workers" in ended.errors, (
        ended
    )
    assert len(ended.errors.splitlines()) == 1, ended.errors
    resumed = require_same(scene, Command(out, "--resume").end(), out)
    return {**resumed, "sentence": ended.errors, "seconds of the failure": round(ended.seconds, 1)}


def out_of_memory(scene: Scene, out: Path) -> dict[str, Any]:
    """Workers whose memory is too small for a batch."""
    alone, text = out.with_name("large-batches"), out.with_name("text.txt")
    text.parent.mkdir(parents=True)
    lines = [json.loads(line)["prompt"] for line in shipped_prompts().read_text().splitlines()]
    documents = [" ".join(lines[n % len(lines)] for n in range(start, start + 60)) for start in range(100)]
    text.write_text("\n\n".join(documents))
    options = (*LARGE_BATCHES, "--text", str(text))
    assert Command(alone, options=options).end().code == 0
    words = (*scene.words, "--workers", "2")
    for limit in MEMORY_LIMITS:
        run = out.with_name(f"limit-{limit}")
        ended = Command(run, *words, options=options, patch="limited", LIMIT_MB=str(limit)).end()
        print(f"limit of {limit} MB: {ended.code}, {ended.seconds:.0f} s, {ended.errors[:200]}", flush=True)
        assert ended.code == 0, (limit, ended)
        measured = json.loads((run / "measurement.json").read_text())
        warnings = [text for text in measured["warnings"] if "memory ran out" in text]
        if warnings:
            outcome = {"MB": limit, "warning": warnings[0], "seconds": round(ended.seconds, 1)}
            return {**outcome, "largest difference of a column": largest_difference(run, alone)}
    raise AssertionError("memory never ran out")


def largest_difference(run: Path, alone: Path) -> float:
    """Of two columns of two runs; both must have the same tokens, each once."""
    largest, names = (
        0.0,
        ["prompt_id", "sample_id", "position", "token_id", "kl_policy_reference", "logp_policy"],
    )
    parts = [sorted(path.name for path in (root / "tokens").iterdir()) for root in (run, alone)]
    assert parts[0] == parts[1], parts
    for part in parts[0]:
        first, second = (read_columns(root / "tokens" / part, names) for root in (run, alone))
        for name in names[:4]:
            assert (first[name] == second[name]).all(), (part, name)
        largest = max([largest, *(float(np.abs(first[name] - second[name]).max()) for name in names[4:])])
    assert largest < 1e-4, largest
    return largest


def nobody_answers(scene: Scene, out: Path) -> dict[str, Any]:
    """An address where nothing listens."""
    ended = Command(out, "--engine", "ray", "--address", "127.0.0.1:1").end()
    assert ended.code == 2 and ended.errors.startswith("kleash: no Ray cluster answers at 127.0.0.1:1"), ended
    assert not out.exists()
    return {"sentence": ended.errors, "seconds": round(ended.seconds, 1)}


CASES: dict[str, Callable[[Scene, Path], dict[str, Any]]] = {
    "a worker is killed": worker_is_killed,
    "a node is lost": node_is_lost,
    "the driver is killed": driver_is_killed,
    "two drivers on one folder": two_drivers,
    "NaN in a model": nan_in_a_model,
    "Ctrl-C": interrupted,
    "a shard that ends its workers": poison,
    "a worker runs out of memory": out_of_memory,
    "nobody answers": nobody_answers,
}


@contextmanager
def local_cluster() -> Iterator[tuple[Any, list[Any]]]:
    """A head with one CPU and two nodes with one each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    try:
        yield cluster, nodes
    finally:
        cluster.shutdown()


def main() -> int:
    """Run the cases and write ``results/ray_kills.json``; the exit code is the number of failures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    options = parser.parse_args()
    outcomes: dict[str, Any] = {}
    failures = 0
    with tempfile.TemporaryDirectory() as temporary, local_cluster() as (cluster, nodes):
        alone = Path(temporary) / "alone"
        assert Command(alone).end().code == 0
        scene = Scene(cluster, Path(temporary), alone, nodes)
        for number, name in enumerate(options.cases):
            try:
                outcomes[name] = CASES[name](scene, Path(temporary) / f"{number}" / "run")
            except (AssertionError, RuntimeError, ValueError) as error:
                failures += 1
                outcomes[name] = {"FAILED": str(error)[-2000:]}
            print(name, json.dumps(outcomes[name]), flush=True)
    if not failures and set(outcomes) == set(CASES):
        write_result("ray_kills", outcomes, packages=("torch", "transformers", "ray"))
    return failures


if __name__ == "__main__":
    sys.exit(main())
