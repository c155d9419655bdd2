"""What stands on the terminal: a narrow one, one that lacks characters, and one that has been closed."""

import json
import os
import shlex
import subprocess
import sys
from io import BytesIO, TextIOWrapper
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


def test_a_narrow_terminal_truncates_no_number(pair, run, tmp_path, monkeypatch, capsys):
    narrow = tmp_path / (4 * "narrow")
    monkeypatch.setenv("COLUMNS", "40")
    capsys.readouterr()
    assert main(measuring(pair, narrow)) == 0
    output = capsys.readouterr().out
    low, high = Measurement.read(run).per_token["kl_policy_reference"].ci95
    (line,) = [line for line in output.splitlines() if line.startswith("KL(policy ‖ reference)   ")]
    shown = line.split()
    assert [float(shown[4]), float(shown[6])] == pytest.approx([low, high], abs=0.01), line
    assert "…" not in output
    assert main(["compare", str(run), str(narrow), "--out", str(tmp_path / "c.html")]) == 0
    output = capsys.readouterr().out
    assert "±" in output and "…" not in output
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)  # in a terminal names are folded
    assert main([*measuring(pair, narrow), "--resume"]) == 0
    assert all(len(line) < 80 for line in capsys.readouterr().out.splitlines() if line.endswith("  nats"))
    monkeypatch.setenv("COLUMNS", "60")  # and tables are parted
    assert main(["compare", str(run), str(narrow), "--out", str(tmp_path / "c.html")]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("narrow")]
    assert len(rows) > 3 and max(map(len, rows)) <= 60 and "nats" in rows[0] and "…" not in "".join(rows)


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_unencodable_characters_are_escaped(run, tmp_path, monkeypatch, capsys, option):
    stream = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["compare", str(run), str(run), *option, "--out", str(tmp_path / "c.html")]) == 0
    out = stream.buffer.getvalue().decode("ascii")
    if option:
        assert json.loads(out)["runs"][0]["folder"] == str(run)
    else:
        assert "\\u00b1" in out
    assert capsys.readouterr().err == ""


def test_a_closed_pipe_ends_with_141(run, tmp_path, monkeypatch, capsys):
    """As in ``kleash … | head``."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["compare", str(run), str(run), "--json", "--out", str(tmp_path / "c.html")]) == 141
    assert capsys.readouterr().err == ""


FULL = "No space left on device"


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("--help >&-", 2, "it is closed"),
        ("--help > /dev/full", 2, FULL),
        ("--none 2> /dev/full", 2, ""),
        ("--help | :", 141, ""),
    ],
)
def test_a_process_ends_with_its_own_error_and_not_with_python_s(line, code, error):
    """Python flushes its streams once more at its end."""
    command = f"set -o pipefail; {shlex.join([sys.executable, '-m', 'kleash'])} {line}"
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    start = f"kleash: standard output cannot be written ({error}" if error else ""
    assert (process.returncode, process.stderr.count("\n")) == (code, bool(error)), process.stderr
    assert process.stderr.startswith(start) and process.stdout == ""


PROCESS = """
import atexit, sys, threading
from kleash.cli import entry
kept = type("Kept", (), {"__del__": lambda self: print("freed")})()
entry.main = lambda: [threading.Timer(0.1, print, ["thread"]).start(), atexit.register(print, "atexit"), 3][-1]
sys.exit(entry.run_process())
"""


def test_a_process_awaits_its_threads_and_frees_nothing():
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (3, "thread\natexit\n"), done.stderr


def test_a_run_whose_summary_cannot_be_printed_is_complete(pair, tmp_path, monkeypatch, capsys):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(measuring(pair, tmp_path / "run")) == 2
        monkeypatch.undo()
    assert "standard output cannot be written (No space left" in capsys.readouterr().err
    assert Measurement.read(tmp_path / "run").counts.prompts == 3
    assert (tmp_path / "run" / "report.html").exists()


def test_a_run_continues_if_its_progress_cannot_be_shown(pair, tmp_path, monkeypatch):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert main(measuring(pair, tmp_path / "run")) == 0
        assert main(["compare", str(tmp_path / "run"), str(tmp_path / "none")]) == 2
