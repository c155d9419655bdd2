"""Time, processor time and peak memory of a command at two commits: whole processes in turn, and the ratio's interval.

    python tools/compare_speed.py main HEAD -- -m kleash measure --limit 4 --quiet --out {out}
    python tools/compare_speed.py v0.1 HEAD --rounds 30 -- benchmarks/losses_speed.py
    python tools/compare_speed.py HEAD HEAD -- -c "import kleash.linear"        what the noise of the machine is

Each commit is checked out into a temporary worktree. What stands after ``--`` are arguments of this Python interpreter,
which runs in the worktree with the worktree's package; ``{out}`` becomes a path that does not exist yet. In every round
both commits run once, and the rounds alternate in which is first. After a warm-up round of each, which is not counted
(it compiles what is compiled on first use), the ratio AFTER / BEFORE is the geometric mean over rounds, with Student's
95 % interval of the mean of its logarithms, paired by round.

With ``--limit 1.02`` the exit code is 1 if the interval of any of the three lies above 1.02. Let nothing else run
meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from kleash.uncertainty import student_t_quantile

ROOT = Path(__file__).resolve().parents[1]
LEVEL = 0.95
SHOWN_CHARACTERS = 2000
"""Of the output of a command that failed."""


class Cost(NamedTuple):
    """What one process took."""

    wall_seconds: float
    processor_seconds: float
    """User and system time, of its finished children too."""
    peak_mib: float
    """Largest resident memory of the process, or of one of its finished children."""


class CommandError(Exception):
    """The comparison cannot be made; one sentence."""


def ratio_interval(after: Sequence[float], before: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of ``after / before`` and the ends of its 95 % interval, paired by position.

    Raises:
        CommandError: if there are fewer than two pairs.
    """
    if len(after) < 2:
        raise CommandError(f"{len(after)} rounds have no interval; take at least 2")
    logs = np.log(np.asarray(after, np.float64) / np.asarray(before, np.float64))
    margin = student_t_quantile((1 + LEVEL) / 2, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5
    mean = logs.mean()
    return float(np.exp(mean)), float(np.exp(mean - margin)), float(np.exp(mean + margin))


@contextmanager
def worktree(repository: Path, revision: str, folder: Path) -> Iterator[Path]:
    """The files of a commit in ``folder``, which is removed afterwards.

    Raises:
        CommandError: if git does not know the revision.
    """
    git = ["git", "-C", str(repository), "worktree"]
    added = subprocess.run([*git, "add", "--detach", str(folder), revision], capture_output=True, text=True)
    if added.returncode:
        raise CommandError(f"git cannot check out {revision}: {added.stderr.strip().splitlines()[-1]}")
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], capture_output=True, check=False)
        subprocess.run([*git, "prune"], capture_output=True, check=False)


def environment_of(tree: Path) -> dict[str, str]:
    """The environment in which Python imports the package of a worktree."""
    return {**os.environ, "PYTHONPATH": str(tree / "src")}


def check_origin(tree: Path) -> None:
    """Check that Python imports the worktree's package there, and not an installed one.

    Raises:
        CommandError: if it imports another one.
    """
    command = [sys.executable, "-c", "import kleash; print(kleash.__file__)"]
    done = subprocess.run(command, cwd=tree, env=environment_of(tree), capture_output=True, text=True)
    path = done.stdout.strip()
    if not path or tree.resolve() not in Path(path).resolve().parents:
        raise CommandError(f"Python imports kleash from {path or 'nowhere'} and not from {tree / 'src'}")


RUNNER = """
import json, os, sys, time
start = time.perf_counter()
process = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(process, 0)
seconds = time.perf_counter() - start
with open(sys.argv[1], "w") as file:
    json.dump([seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024], file)
sys.exit(abs(os.waitstatus_to_exitcode(status)))
"""
"""Starts the command and waits for it. On Linux a process begins with the peak memory of the one that started it, so
that one has to be small."""


def run_once(arguments: Sequence[str], tree: Path) -> Cost:
    """Run Python with these arguments in a worktree, and wait for its end.

    Raises:
        CommandError: if it does not exit with 0; with the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [argument.replace("{out}", str(Path(folder) / "out")) for argument in arguments]
        result = Path(folder) / "cost.json"
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", RUNNER, str(result), sys.executable, *command],
            cwd=tree,
            env=environment_of(tree),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            shown = done.stdout.decode(errors="replace")[-SHOWN_CHARACTERS:]
            raise CommandError(f"the command exited with {done.returncode} in {tree}:\n{shown}")
        return Cost(*json.loads(result.read_text()))


def measure_rounds(
    arguments: Sequence[str], trees: tuple[Path, Path], rounds: int
) -> list[tuple[Cost, Cost]]:
    """The costs of both commits in each round, the first of ``trees`` first; a warm-up of each is not counted."""
    costs: list[tuple[Cost, Cost]] = []
    for number in range(rounds + 1):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        by_tree = {index: run_once(arguments, trees[index]) for index in order}
        if number:
            costs.append((by_tree[0], by_tree[1]))
    return costs


def table_of(costs: Sequence[tuple[Cost, Cost]]) -> list[str]:
    """A line for each field of ``Cost``: medians of both commits, and the ratio with its interval."""
    lines = [f"{'':18} {'before':>10} {'after':>10}   ratio (95 % interval), {len(costs)} rounds"]
    for index, name in enumerate(Cost._fields):
        before, after = ([pair[side][index] for pair in costs] for side in (0, 1))
        ratio, low, high = ratio_interval(after, before)
        lines.append(
            f"{name:18} {median(before):10.3f} {median(after):10.3f}   {ratio:.4f} ({low:.4f} to {high:.4f})"
        )
    return lines


def exceeds(costs: Sequence[tuple[Cost, Cost]], limit: float) -> list[str]:
    """The fields of ``Cost`` whose whole interval lies above the limit."""
    return [
        name
        for index, name in enumerate(Cost._fields)
        if ratio_interval([after[index] for _, after in costs], [before[index] for before, _ in costs])[1]
        > limit
    ]


def main(arguments: Sequence[str] | None = None, repository: Path = ROOT) -> int:
    """Compare, print the table; 1 above the limit, 2 if the comparison cannot be made."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [--rounds N] [--limit RATIO] BEFORE AFTER -- ARGUMENT ...",
    )
    parser.add_argument("before", help="a commit, branch or tag")
    parser.add_argument("after", help="another one, or the same")
    parser.add_argument("--rounds", type=int, default=15, help="counted runs of each")
    parser.add_argument("--limit", type=float, help="exit with 1 if an interval lies above this ratio")
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    options, command = parser.parse_args(words[:split]), words[split + 1 :]
    try:
        if not command:
            raise CommandError("there is no command; give arguments of Python after --")
        if options.rounds < 2:
            raise CommandError(f"{options.rounds} rounds have no interval; take at least 2")
        with (
            tempfile.TemporaryDirectory(prefix="kleash-speed-") as folder,
            worktree(repository, options.before, Path(folder) / "before") as before,
            worktree(repository, options.after, Path(folder) / "after") as after,
        ):
            for tree in (before, after):
                check_origin(tree)
            costs = measure_rounds(command, (before, after), options.rounds)
    except CommandError as error:
        print(f"compare_speed: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare_speed: interrupted; the worktrees are removed", file=sys.stderr)
        return 130
    print("\n".join(table_of(costs)))
    slower = [] if options.limit is None else exceeds(costs, options.limit)
    if slower:
        print(f"above {options.limit:g}: {', '.join(slower)}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
