"""Completion scripts, run in the shells that they are for."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kleash.cli import main
from kleash.cli.parsing import completion_script

TIMEOUT = 60.0


@pytest.fixture(params=["bash", "zsh", "fish"], scope="module")
def complete(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], list[str]]]:
    """A function from a line to the words that a shell offers for its last word.

    zsh writes the common beginning of the words into the line, so there it is one word.
    """
    shell: str = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    folder = tmp_path_factory.mktemp(shell)
    script = folder / "script"
    script.write_text(completion_script(shell))
    (folder / "runs").mkdir()
    if shell == "zsh":
        with zsh(script) as type_line:
            yield type_line
    else:
        yield lambda line: {"bash": bash, "fish": fish}[shell](script, line)


def run_shell(script: Path, *words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, cwd=script.parent)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def bash(script: Path, line: str) -> list[str]:
    words = line.split(" ")
    code = (
        f'source {script}\nCOMP_WORDS=({line} "")\nCOMP_WORDS=("${{COMP_WORDS[@]:0:{len(words)}}}")\n'
        f'COMP_CWORD={len(words) - 1}\n_shtab_kleash\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    return run_shell(script, "bash", "--norc", "-c", code).split()


def fish(script: Path, line: str) -> list[str]:
    lines = run_shell(script, "fish", "--no-config", "-c", f"source {script}; complete -C '{line}'")
    return [offered.partition("\t")[0].rstrip("/") for offered in lines.splitlines()]


@contextmanager
def zsh(script: Path) -> Iterator[Callable[[str], list[str]]]:
    """A terminal with a zsh in it, whose function empties the line (Ctrl-U), types one and a tab, and then Ctrl-X.

    Ctrl-X writes the line into a file.
    """
    result = script.parent / "result"
    setup = (
        f'eval "$(cat {script})"\n'
        f'report-line() {{ print -r -- "$BUFFER" > {result}.new; mv {result}.new {result} }}\n'
        "zle -N report-line; bindkey '^X' report-line; print ready-$((6*7))\n"
    )
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(script.parent)
        os.environ.update(HOME=str(script.parent), ZDOTDIR=str(script.parent), TERM="dumb")
        os.execvp("zsh", ["zsh", "-f", "-i"])
    shown = ""

    def wait_for(ready: Callable[[], bool]) -> None:
        nonlocal shown
        end = time.monotonic() + TIMEOUT
        while not ready():
            assert time.monotonic() < end, shown
            if select.select([terminal], [], [], 0.05)[0]:
                shown += os.read(terminal, 65536).decode(errors="replace")

    def type_line(line: str) -> list[str]:
        result.unlink(missing_ok=True)
        os.write(terminal, f"\x15{line}\t\x18".encode())
        wait_for(result.exists)
        after = result.read_text().rstrip("\n")
        return [(after if after == line else after.rstrip(" /")).rpartition(" ")[2]]

    try:
        os.write(terminal, setup.encode())
        wait_for(lambda: "ready-42" in shown)
        assert "not found" not in shown and "error" not in shown, shown
        yield type_line
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("kleash mea", "measure"),
        ("kleash --ver", "--version"),
        ("kleash train gr", "grpo"),
        ("kleash measure --unt", "--until-relative-error"),
        ("kleash measure --policy a --max", "--max-new-tokens"),
        ("kleash train ppo --no", "--no-whiten"),
        ("kleash train ppo --reward a --max-g", "--max-gradient-norm"),
        ("kleash measure --out ru", "runs"),
        ("kleash report ru", "runs"),
        ("kleash compare ru", "runs"),
        ("kleash compare runs runs ru", "runs"),
    ],
)
def test_a_beginning_is_completed(complete: Callable[[str], list[str]], line: str, word: str) -> None:
    assert complete(line) == [word]


@pytest.mark.parametrize(
    ("line", "words", "common"),
    [
        ("kleash ", "audit cache compare doctor measure mismatch report sweep train", ""),
        ("kleash train ", "distill dpo grpo ppo rloo", ""),
        ("kleash measure --quiet --rev", "--revision-policy --revision-reference", "--revision-"),
    ],
)
def test_all_words_with_a_beginning_are_offered(
    complete: Callable[[str], list[str]], line: str, words: str, common: str, request: pytest.FixtureRequest
) -> None:
    in_zsh = request.node.callspec.params["complete"] == "zsh"
    assert sorted(complete(line)) == ([common] if in_zsh else words.split())


@pytest.mark.parametrize("words", [["--completion", "fish"], ["--completion=fish"]])
def test_the_script_is_printed(words: list[str], capsys: Any) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out == completion_script("fish")


def test_a_missing_shtab_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--completion", "bash"]) == 2
    assert capsys.readouterr().err == "kleash: shtab is not installed; run: pip install 'kleash[cli]'\n"
