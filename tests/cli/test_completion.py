"""Completion scripts, run in the shells that they are for."""

import shutil
import subprocess
import sys

import pytest

from kleash.cli import main
from kleash.cli.parsing import completion_script


@pytest.fixture(params=["bash", "fish"], scope="module")
def complete(request, tmp_path_factory):
    """A function from a line to the words that a shell offers for its last word."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    folder = tmp_path_factory.mktemp(shell)
    script = folder / "script"
    script.write_text(completion_script(shell))
    (folder / "runs").mkdir()
    return lambda line: {"bash": bash, "fish": fish}[shell](script, line)


def run_shell(script, *words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=60.0, cwd=script.parent)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def bash(script, line):
    words = line.split(" ")
    code = (
        f'source {script}\nCOMP_WORDS=({line} "")\nCOMP_WORDS=("${{COMP_WORDS[@]:0:{len(words)}}}")\n'
        f'COMP_CWORD={len(words) - 1}\n_shtab_kleash\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    return run_shell(script, "bash", "--norc", "-c", code).split()


def fish(script, line):
    lines = run_shell(script, "fish", "--no-config", "-c", f"source {script}; complete -C '{line}'")
    return [offered.partition("\t")[0].rstrip("/") for offered in lines.splitlines()]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kleash mea", "measure"),
        ("kleash --ver", "--version"),
        ("kleash train gr", "grpo"),
        ("kleash measure --policy a --max", "--max-new-tokens"),
        ("kleash train ppo --no", "--no-whiten"),
        ("kleash train ppo --reward a --max-g", "--max-gradient-norm"),
        ("kleash measure --out ru", "runs"),
        ("kleash report ru", "runs"),
        ("kleash compare runs runs ru", "runs"),
        ("kleash ", "audit cache compare doctor env measure mismatch report sweep train"),
        ("kleash train ", "distill dpo grpo ppo rloo"),
        ("kleash measure --quiet --rev", "--revision-policy --revision-reference"),
    ],
)
def test_all_words_with_a_beginning_are_offered(complete, line, words):
    assert sorted(complete(line)) == words.split()


@pytest.mark.parametrize("words", [["--completion", "fish"], ["--completion=fish"]])
def test_the_script_is_printed(words, capsys):
    assert main(words) == 0
    assert capsys.readouterr().out == completion_script("fish")
    assert "compinit" in completion_script("zsh")


def test_a_missing_shtab_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--completion", "bash"]) == 2
    assert capsys.readouterr().err == "kleash: shtab is not installed; run: pip install 'kleash[cli]'\n"
