"""Does a run that is killed at random moments come to the result of one that was left alone?

    python benchmarks/kills.py                       # 30 kills of each of measure, cache and train ppo
    python benchmarks/kills.py --kills 10 --kinds measure

Each command runs once undisturbed. Then it is started, killed with SIGKILL after a random time and started again (with
--resume; `kleash cache` needs no option), up to three kills a run, until it ends. What it then has written is compared
with what the undisturbed one wrote: measurement.json but for times, every Parquet part, every hidden state, head and
tokenizer, steps.jsonl but for times, and the tensors of the last checkpoint. Between a kill and the next start
`kleash report` reads the folder: it must end with a page or with a sentence, never a traceback.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

from harness import write_result

import kleash.measuring
import kleash.training.ppo  # noqa: F401 (imported once, before the forks)
from kleash.cli import main as main_of_kleash

KILLS_OF_A_RUN = 3
TIMES = ("seconds", "finished")
COMMANDS = {
    "measure": (
        *(
            "measure",
            "--limit",
            "24",
            "--max-new-tokens",
            "24",
            "--batch-tokens",
            "128",
            "--quiet",
            "--resume",
        ),
    ),
    "cache": ("cache", "--limit", "12", "--batch-tokens", "512", "--quiet"),
    "train ppo": (
        *(
            "train",
            "ppo",
            "--steps",
            "8",
            "--checkpoint-every",
            "1",
            "--prompts-per-step",
            "4",
            "--limit",
            "8",
        ),
        *("--max-new-tokens", "8", "--learning-rate", "1e-3", "--device", "cpu", "--quiet", "--resume"),
    ),
}


def started(kind: str, out: Path) -> int:
    """The number of a process that runs the command, writing to ``out``: a fork, which has imported everything."""
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        with (out.parent / "errors.txt").open("w") as errors:
            os.dup2(errors.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = main_of_kleash([*COMMANDS[kind], "--out", str(out)])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(process: int) -> int | None:
    """The exit status of a process; None while it runs."""
    number, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if number else None


def require_success(kind: str, out: Path, status: int) -> None:
    """Stop where a command failed that nobody killed."""
    if status != 0:
        raise RuntimeError(f"{kind} ended with {status}: {(out.parent / 'errors.txt').read_text()}")


def finished(kind: str, out: Path) -> float:
    """Run the command to its end; the seconds it took."""
    began = perf_counter()
    _, status = os.waitpid(started(kind, out), 0)
    require_success(kind, out, os.waitstatus_to_exitcode(status))
    return perf_counter() - began


def result(kind: str, out: Path) -> dict[str, Any]:
    """All that a command wrote and that does not depend on when it ran."""
    if kind == "measure":
        measured = json.loads((out / "measurement.json").read_text())
        kept: dict[str, Any] = {name: value for name, value in measured.items() if name not in TIMES}
        return {**kept, **_files(out, "tokens/*", "sequences/*", "alternatives.parquet")}
    if kind == "cache":
        return _files(out, "*.safetensors", "tokenizer/*", "contents.json")
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    numbers = [
        {name: value for name, value in step["metrics"].items() if not name.startswith("time/")}
        for step in steps
    ]
    said = [(step["step"], step["events"], step["alerts"]) for step in steps]
    return {
        "numbers": json.dumps(numbers),
        "said": said,
        **_files(out, "checkpoints/*/state.safetensors", "policy/*", "samples.jsonl"),
    }


def _files(out: Path, *patterns: str) -> dict[str, bytes]:
    paths = (path for pattern in patterns for path in out.glob(pattern))
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in paths}


def reported(kind: str, out: Path) -> str:
    """How `kleash report` ends on a folder in whatever state it is: "page", "sentence" or "traceback"."""
    if kind == "cache":
        return "sentence"
    from kleash.errors import KleashError
    from kleash.reports import write_report_of

    try:
        write_report_of(out)
    except KleashError:
        return "sentence"
    except Exception as error:
        print(f"report of a killed {kind}: {error!r}", file=sys.stderr)
        return "traceback"
    return "page"


def killed(kind: str, out: Path, longest: float, draw: random.Random) -> str:
    """Start the command and kill it after a random time; what was there then, or "ended" if it was done before."""
    process = started(kind, out)
    until = perf_counter() + draw.uniform(0, longest)
    while perf_counter() < until:
        status = ended(process)
        if status is not None:
            require_success(kind, out, status)
            return "ended"
        sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "killed"


def main() -> int:
    """Kill, go on, compare; write the counts to benchmarks/results/kills.json after every run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--kinds", nargs="+", choices=tuple(COMMANDS), default=tuple(COMMANDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="kills")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    results: dict[str, Counter[str]] = {kind: Counter() for kind in given.kinds}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        whole = {kind: root / f"{kind}-whole" for kind in given.kinds}
        longest = {kind: finished(kind, out) for kind, out in whole.items()}
        while min(counts["kills"] for counts in results.values()) < given.kills:
            for kind, counts in results.items():
                counts["runs"] += 1
                out = root / f"{kind}-{counts['runs']}"
                for _ in range(KILLS_OF_A_RUN):
                    if killed(kind, out, longest[kind], draw) == "ended":
                        break
                    counts["kills"] += 1
                    if out.exists():
                        counts[f"report: {reported(kind, out)}"] += 1
                finished(kind, out)
                counts["same" if result(kind, out) == result(kind, whole[kind]) else "different"] += 1
                shutil.rmtree(out)
                print(f"{kind}: {dict(counts)}", flush=True)
            write_result(given.out, {"seed": given.seed, "kinds": results})
    bad = sum(counts["different"] + counts["report: traceback"] for counts in results.values())
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
