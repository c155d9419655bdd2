"""Does a run that is killed at random times and resumed give the same result as an undisturbed run?

    python benchmarks/kills.py                       # 30 kills of each of measure, cache and train ppo
    python benchmarks/kills.py --kills 10 --kinds measure

Each command runs once undisturbed. Then it is started, killed with SIGKILL after a random time and started again (with
--resume; `kleash cache` needs no option), up to three kills a run, until it ends. Its output is compared with that of
the undisturbed run: measurement.json without times, every Parquet part, every hidden state, head and tokenizer,
steps.jsonl without times, and the tensors of the last checkpoint. Between a kill and the next start `kleash report`
reads the folder: it must end with a page or with an error message, never with a traceback.
"""

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

from harness import parser_of, write_result

import kleash.measuring
import kleash.training.ppo  # noqa: F401 (imported once, before the forks)
from kleash.cli import main as main_of_kleash
from kleash.errors import KleashError
from kleash.reports.folder_report import write_report_of

KILLS_OF_A_RUN = 3
TIMES = ("seconds", "finished")
COMMANDS = {
    "measure": "measure --limit 24 --max-new-tokens 24 --batch-tokens 128 --quiet --resume",
    "cache": "cache --limit 12 --batch-tokens 512 --quiet",
    "train ppo": "train ppo --steps 8 --checkpoint-every 1 --prompts-per-step 4 --limit 8 --max-new-tokens 8 "
    "--learning-rate 1e-3 --device cpu --quiet --resume",
}


def start_command(kind: str, out: Path) -> int:
    """Run the command in a forked process, which has all imports; the process id."""
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        with (out.parent / "errors.txt").open("w") as errors:
            os.dup2(errors.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = main_of_kleash([*COMMANDS[kind].split(), "--out", str(out)])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def require_success(kind: str, out: Path, status: int) -> None:
    """Raise if a command failed without having been killed."""
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        raise RuntimeError(f"{kind} ended with {code}: {(out.parent / 'errors.txt').read_text()}")


def run_to_end(kind: str, out: Path) -> float:
    """Run the command to its end; the seconds it took."""
    began = perf_counter()
    _, status = os.waitpid(start_command(kind, out), 0)
    require_success(kind, out, status)
    return perf_counter() - began


def read_outputs(kind: str, out: Path) -> dict[str, Any]:
    """The output of a command that does not depend on the time at which it ran."""
    if kind == "measure":
        measured = json.loads((out / "measurement.json").read_text())
        untimed: dict[str, Any] = {name: value for name, value in measured.items() if name not in TIMES}
        return {**untimed, **_files(out, "tokens/*", "sequences/*", "alternatives.parquet")}
    if kind == "cache":
        return _files(out, "*.safetensors", "tokenizer/*", "contents.json")
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    numbers = [
        {name: value for name, value in step["metrics"].items() if not name.startswith("time/")}
        for step in steps
    ]
    messages = [(step["step"], step["events"], step["alerts"]) for step in steps]
    return {
        "numbers": json.dumps(numbers),
        "messages": messages,
        **_files(out, "checkpoints/*/model.safetensors", "policy/*", "samples.jsonl"),
    }


def _files(out: Path, *patterns: str) -> dict[str, bytes]:
    paths = (path for pattern in patterns for path in out.glob(pattern))
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in paths}


def report_outcome(kind: str, out: Path) -> str:
    """How `kleash report` ends on the folder: "page", "sentence" (an error message) or "traceback"."""
    if kind == "cache":
        return "sentence"
    try:
        write_report_of(out)
    except KleashError:
        return "sentence"
    except Exception as error:
        print(f"report of a killed {kind}: {error!r}", file=sys.stderr)
        return "traceback"
    return "page"


def kill_at_random(kind: str, out: Path, longest: float, draw: random.Random) -> str:
    """Start the command and kill it after a random time: "killed", or "ended" if it ended before."""
    process = start_command(kind, out)
    until = perf_counter() + draw.uniform(0, longest)
    while perf_counter() < until:
        number, status = os.waitpid(process, os.WNOHANG)
        if number:
            require_success(kind, out, status)
            return "ended"
        sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "killed"


def main() -> int:
    """Kill, resume, compare; write the counts to benchmarks/results/kills.json after every round."""
    parser = parser_of(__doc__, kills=30, seed=0)
    parser.add_argument("--kinds", nargs="+", choices=tuple(COMMANDS), default=tuple(COMMANDS))
    options = parser.parse_args()
    draw = random.Random(options.seed)
    results: dict[str, Counter[str]] = {kind: Counter() for kind in options.kinds}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        undisturbed = {kind: root / f"{kind}-whole" for kind in options.kinds}
        longest = {kind: run_to_end(kind, out) for kind, out in undisturbed.items()}
        while min(counts["kills"] for counts in results.values()) < options.kills:
            for kind, counts in results.items():
                counts["runs"] += 1
                out = root / f"{kind}-{counts['runs']}"
                for _ in range(KILLS_OF_A_RUN):
                    if kill_at_random(kind, out, longest[kind], draw) == "ended":
                        break
                    counts["kills"] += 1
                    if out.exists():
                        counts[f"report: {report_outcome(kind, out)}"] += 1
                run_to_end(kind, out)
                is_same = read_outputs(kind, out) == read_outputs(kind, undisturbed[kind])
                counts["same" if is_same else "different"] += 1
                shutil.rmtree(out)
                print(f"{kind}: {dict(counts)}", flush=True)
            write_result("kills", {"seed": options.seed, "kinds": results})
    bad = sum(counts["different"] + counts["report: traceback"] for counts in results.values())
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
