"""Options, timing, peak memory, and result files with date, machine, versions and commit; shared by the benchmarks.

The files are written to benchmarks/results, or to the folder that the environment variable RESULTS names.
"""

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_size_t, c_void_p
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch

Name = TypeVar("Name")

HERE = Path(__file__).resolve().parent
RESULTS = Path(os.environ.get("RESULTS", HERE / "results"))


def parser_of(text: str | None, **numbers: float) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of a benchmark, with an option for each of these numbers, its default."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=f"{default} if not given")
    return parser


def write_result(
    name: str, figures: dict[str, Any], folder: Path = RESULTS, packages: Iterable[str] = ()
) -> Path:
    """Write ``name.json`` into the folder of results, or another, and return its path."""
    path = folder / f"{name}.json"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps({"figures": figures, **provenance(packages)}, indent=2) + "\n")
    return path


def markdown_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def interleaved(
    jobs: dict[Name, Callable[[], Any]], rounds: int, clock: Callable[[], float] = perf_counter
) -> tuple[dict[Name, list[float]], list[float]]:
    """Seconds of each job in each round, and the load average before each round; warm the jobs up before the call."""
    times: dict[Name, list[float]] = {name: [] for name in jobs}
    loads: list[float] = []
    for _ in range(rounds):
        loads.append(os.getloadavg()[0])
        for name, job in jobs.items():
            start = clock()
            job()
            times[name].append(clock() - start)
    return times, loads


def ratio(seconds: list[float], reference_seconds: list[float]) -> float:
    """The median over rounds of ``seconds / reference_seconds``, rounded to three digits."""
    return round(median(a / b for a, b in zip(seconds, reference_seconds, strict=True)), 3)


def resident(what: str) -> float:
    """Resident memory of this process, in MB of a million bytes: VmRSS (now) or VmHWM (the peak so far); Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024 / 1e6


def peak_of(job: Callable[[], Any]) -> float:
    """The peak of resident memory during the job, less the resident memory before it, in MB."""
    with files_stay_resident():
        resident_before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        job()
        return round(resident("VmHWM") - resident_before, 1)


@contextmanager
def files_stay_resident() -> Iterator[None]:
    """Lock the resident pages of mapped files in memory, if the process may: the kernel would drop them for others."""
    libc = ctypes.CDLL(None, use_errno=True)
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = [line.split()[0].split("-") for line in lines if line.split()[4] != "0"]
    spans = [(int(begin, 16), int(end, 16) - int(begin, 16)) for begin, end in files]
    on_fault = 1
    for begin, size in spans:
        libc.mlock2(c_void_p(begin), c_size_t(size), on_fault)
    try:
        yield
    finally:
        for begin, size in spans:
            libc.munlock(c_void_p(begin), c_size_t(size))


def provenance(packages: Iterable[str] = ()) -> dict[str, Any]:
    """Command, date, commit, machine, and the versions of Python, torch and these packages."""
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _output_of(["git", "rev-parse", "--short", "HEAD"]),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.system(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: version(name) for name in packages},
        },
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _output_of(command: list[str]) -> str:
    completed = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    return completed.stdout.strip()
