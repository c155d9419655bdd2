"""The comparison of two commits: its interval, its rounds, and its refusals, on a repository with two commits."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import compare_speed
import numpy as np
import pytest
from compare_speed import CommandError, Cost
from scipy import stats

SLEEP = "import kleash, time; time.sleep(kleash.SECONDS)"


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *settings, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose first commit, tagged fast, sleeps less than its second."""
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "-q", "-b", "main")
    module = folder / "src" / "kleash" / "__init__.py"
    module.parent.mkdir(parents=True)
    for name, seconds in (("fast", 0.0), ("slow", 0.4)):
        module.write_text(f"SECONDS = {seconds}\n")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", name)
        git(folder, "tag", name)
    return folder


def test_interval_equals_student_t_of_the_log_ratios() -> None:
    random = np.random.default_rng(0)
    before, after = random.lognormal(size=15), random.lognormal(0.2, size=15)
    ratio, low, high = compare_speed.ratio_interval(list(after), list(before))
    logs = np.log(after / before)
    expected = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose([ratio, low, high], np.exp([logs.mean(), expected.low, expected.high]))


def test_rounds_alternate_and_the_warm_up_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def record(arguments: Sequence[str], tree: Path) -> Cost:
        order.append(tree.name)
        return Cost(float(len(order)), 1.0, 1.0)

    monkeypatch.setattr(compare_speed, "run_once", record)
    costs = compare_speed.measure_rounds(["x"], (Path("a"), Path("b")), 2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [(before.wall_seconds, after.wall_seconds) for before, after in costs] == [(4.0, 3.0), (5.0, 6.0)]


def test_slower_commit_is_above_the_limit(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fast", "slow", "--rounds", "5", "--limit", "1.1", "--", "-c", SLEEP]
    assert compare_speed.main(arguments, repository) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("wall_seconds") and float(lines[1].split()[3]) > 2
    assert lines[-1] == "above 1.1: wall_seconds"
    assert git(repository, "worktree", "list").count("\n") == 1, "the worktrees are removed"


def test_processor_time_and_memory_are_those_of_the_process(tmp_path: Path) -> None:
    small = compare_speed.run_once(["-S", "-c", ""], tmp_path)
    assert small.peak_mib < 40, "and not the memory of the process that started it"
    busy = "import time; x = bytearray(80 * 2**20)\nwhile time.process_time() < 0.3: pass"
    cost = compare_speed.run_once(["-S", "-c", busy], tmp_path)
    assert 0.3 <= cost.processor_seconds <= cost.wall_seconds + 0.1
    assert 80 < cost.peak_mib - small.peak_mib / 2 < 120


def test_each_run_gets_a_fresh_output_path(tmp_path: Path) -> None:
    command = ["-S", "-c", "import os, sys; os.mkdir(sys.argv[1])", "{out}"]
    for _ in range(2):
        compare_speed.run_once(command, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fast", "none", "--", "-c", ""], "git cannot check out none: fatal: invalid reference: none"),
        (["fast", "slow"], "there is no command; give arguments of Python after --"),
        (["fast", "slow", "--rounds", "1", "--", "-c", ""], "1 rounds have no interval; take at least 2"),
        (["fast", "slow", "--", "-S", "-c", "import os; print('why'); os._exit(3)"], "exited with 3 in "),
    ],
)
def test_impossible_comparisons_are_one_error_and_leave_no_worktree(
    repository: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert compare_speed.main(arguments, repository) == 2
    error = capsys.readouterr().err
    assert error.startswith("compare_speed: ") and sentence in error
    assert ("why" in error) is ("exited" in sentence), "the output of a command that failed is shown"
    assert git(repository, "worktree", "list").count("\n") == 1


def test_package_of_another_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    with pytest.raises(CommandError, match="and not from"):
        compare_speed.check_origin(tmp_path)
