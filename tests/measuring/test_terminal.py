"""What stands on the terminal: a narrow one, one that lacks characters, and one that has been closed."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_words import words

from kleash.cli import main
from kleash.records import Measurement


@pytest.fixture(scope="session")
def run(tmp_path_factory, pair):
    """A finished run in a folder whose name not every terminal can show."""
    out = tmp_path_factory.mktemp("terminal") / "Ünïcödé 🙂"
    assert main([*measuring(pair, out), "--quiet"]) == 0
    return out


def measuring(pair, out):
    source = out.parent / "text.txt"
    source.write_text("The sea was calm.\n\nA long road.\n\nIt is said that she counted the birds.")
    return words("measure", policy=pair[0], reference=pair[1], text=source, out=out)


def started(*words, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "kleash", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )


def test_a_narrow_terminal_truncates_no_number(pair, run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    capsys.readouterr()
    assert main(measuring(pair, tmp_path / "narrow")) == 0
    output = capsys.readouterr().out
    low, high = Measurement.read(run).per_token["kl_policy_reference"].ci95
    (line,) = [line for line in output.splitlines() if line.startswith("KL(policy ‖ reference)   ")]
    shown = line.split()
    assert [float(shown[4]), float(shown[6])] == pytest.approx([low, high], abs=0.01), line
    assert "…" not in output
    assert main(["compare", str(run), str(tmp_path / "narrow"), "--out", str(tmp_path / "c.html")]) == 0
    output = capsys.readouterr().out
    assert "±" in output and "…" not in output
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)  # in a terminal names are folded
    assert main([*measuring(pair, tmp_path / "narrow"), "--resume"]) == 0
    assert all(len(line) < 80 for line in capsys.readouterr().out.splitlines() if line.endswith("  nats"))


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_unencodable_characters_are_escaped(run, tmp_path, option):
    process = started("compare", run, run, *option, "--out", tmp_path / "c.html", PYTHONIOENCODING="ascii")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, b"")
    if option:
        assert json.loads(out.decode("ascii"))["runs"][0]["folder"] == str(run)
    else:
        assert "\\u00b1" in out.decode("ascii")


def test_a_closed_pipe_ends_with_141(run, tmp_path):
    """As in ``kleash … | head``."""
    process = started("compare", run, run, "--json", "--out", tmp_path / "c.html")
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=300), err) == (141, b"")


@pytest.mark.parametrize(
    ("words", "output", "reason"),
    [(["--help"], ">&-", "it is closed"), (["report"], "> /dev/full", "No space left on device")],
)
def test_unwritable_standard_output_is_one_error_line(words, output, reason, run):
    more = [str(run)] if words == ["report"] else []
    command = shlex.join([sys.executable, "-m", "kleash", *words, *more])
    process = subprocess.run(["sh", "-c", f"{command} {output}"], capture_output=True, text=True, timeout=300)
    assert process.returncode == 2 and process.stderr.count("\n") == 1
    assert process.stderr.startswith(f"kleash: standard output cannot be written ({reason}")


def test_a_run_whose_summary_cannot_be_printed_is_complete(pair, tmp_path, monkeypatch, capsys):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(measuring(pair, tmp_path / "run")) == 2
        monkeypatch.undo()
    assert "standard output cannot be written (No space left" in capsys.readouterr().err
    assert Measurement.read(tmp_path / "run").counts.prompts == 3
    assert (tmp_path / "run" / "report.html").exists()


def test_a_run_continues_if_its_progress_cannot_be_shown(run, tmp_path):
    words = [sys.executable, "-m", "kleash", "compare", str(run), str(tmp_path / "none")]
    command = f"{shlex.join(words)} 2> /dev/full"
    process = subprocess.run(["sh", "-c", command], capture_output=True, timeout=300)
    assert (process.returncode, process.stdout, process.stderr) == (2, b"", b"")
