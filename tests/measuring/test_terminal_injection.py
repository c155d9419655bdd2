"""Text of others never reaches the terminal as a command to it: neither control sequences nor rich's markup."""

import json
import os
import pty
import re
import shutil
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from kleash.cli import main
from kleash.cli.printing import print_summary
from kleash.errors import printable
from kleash.records import Measurement
from kleash.store.checksums import seal_folder

PLANT = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202e\u2066\u200b[red]x[/red]\r"
"""A window's title, a cleared screen, colours in C0 and C1, an overwritten line, a turned one, markup."""
NAME = PLANT.replace("/", "")
"""The same for a file's name."""
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069]")
SHOWN = "\\u001b]0;owned\\u0007\\u001b[2J\\u009b31m\\u007f\\u202e\\u2066\\u200b[red]x["


def test_exactly_the_control_characters_are_escaped():
    assert printable(PLANT) == SHOWN + "/red]\\u000d"
    codes = [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    for code in (*codes, 0x2028, 0xE0041):
        is_printed = chr(code) in "\n\t"
        assert (printable(chr(code)) == chr(code)) is is_printed, hex(code)
        assert json.loads(f'"{printable(chr(code))}"', strict=False) == chr(code)
    readable = "Ünïcödé 🙂 نص עברית 👩\u200d👧 \u00b1 ‖ · \\x1b \ttab\n"
    assert printable(readable) == readable


@pytest.mark.parametrize("case", ["an option", "a line of a source", "an audited function"])
def test_control_characters_in_errors_are_escaped(case, pair, tmp_path, monkeypatch, capsys):
    """All errors are printed at one place: those of the command line, of kleash, and of a function of others."""
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / f"{NAME}.jsonl"
    source.write_text(json.dumps({f"key {PLANT}": 1}))
    raising = f"def planted(token_logp, token_logq):\n    raise ValueError({PLANT!r})\n"
    (tmp_path / "planted_kl.py").write_text(raising)
    words = {
        "an option": ["measure", f"--{PLANT}"],
        "a line of a source": ["measure", *models(pair), "--prompts", str(source), "--out", str(tmp_path)],
        "an audited function": ["audit", "planted_kl:planted", "--convention", "loss"],
    }
    assert main(words[case]) == 2
    captured = capsys.readouterr()
    sys.modules.pop("planted_kl", None)
    both = captured.out + captured.err
    assert not UNSAFE.search(both)
    assert ("\\u001b" in both or "\\x1b" in both) and "[red]x" in both, both


@pytest.fixture(scope="module")
def planted_run(pair, tmp_path_factory):
    """A finished run in a folder, over a file, with warnings and notes, that all hold the plant."""
    folder = tmp_path_factory.mktemp("planted")
    source, out = folder / f"{NAME}.txt", folder / NAME
    source.write_text(f"The sea was calm {NAME}\n\nA road")
    assert main(["measure", *models(pair), "--text", str(source), "--out", str(out), "--quiet"]) == 0
    file = out / "measurement.json"
    content = json.loads(file.read_text())
    content["warnings"].append(PLANT)
    content["models"]["policy"]["path"] = PLANT
    file.write_text(json.dumps(content))
    seal_folder(out)
    return out


def models(pair):
    return ["--policy", str(pair[0]), "--reference", str(pair[1])]


def test_control_characters_in_summaries_and_progress_are_escaped(planted_run, pair, tmp_path, capsys):
    source = planted_run.with_name(f"{NAME}.txt")
    page = str(tmp_path / "c.html")
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["measure", *models(pair), "--text", str(source), "--out", str(tmp_path / NAME)]) == 0
        assert main(["report", str(planted_run)]) == 0
    assert main(["compare", str(planted_run), str(planted_run), "--out", page]) == 0
    captured = capsys.readouterr()
    assert not UNSAFE.search(captured.out + captured.err)
    assert captured.out.count(SHOWN) >= 5
    assert main(["compare", str(planted_run), str(planted_run), "--out", page, "--json"]) == 0
    captured = capsys.readouterr().out
    assert not UNSAFE.search(captured) and PLANT in json.loads(captured)["runs"][0]["warnings"]


def test_a_name_with_a_line_break_makes_no_line_of_its_own(planted_run, tmp_path, capsys):
    """It could pass for a number or a verdict of kleash."""
    run = tmp_path / "run"
    shutil.copytree(planted_run, run)
    forged = "KL(policy ‖ reference) per token: 0 nats"
    content = json.loads((run / "measurement.json").read_text())
    content["models"]["policy"]["path"] = content["warnings"][0] = f"model\n{forged}"
    content["estimand"] += f"\n{forged}"
    (run / "measurement.json").write_text(json.dumps(content))
    seal_folder(run)
    print_summary(Measurement.read(run))
    captured = capsys.readouterr().out
    assert not any(line.startswith("KL(policy ‖ reference) per token: 0 ") for line in captured.splitlines())
    assert captured.count(f"\\u000a{forged}") >= 2
    assert main(["compare", str(run), str(run), "--out", str(tmp_path / "c.html")]) == 0
    captured = capsys.readouterr().out
    assert not any(line.startswith(forged) for line in captured.splitlines())


def test_a_terminal_gets_only_kleash_s_own_colours(planted_run, tmp_path, monkeypatch):
    """On a pseudo-terminal, where rich writes control sequences of its own."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    ours, theirs = pty.openpty()

    def read():
        try:
            while piece := os.read(ours, 65536):
                yield piece
        except OSError:  # Linux's way to say that nobody writes any more
            return

    with ThreadPoolExecutor(1) as threads:
        with os.fdopen(theirs, "w") as terminal:
            pieces = threads.submit(lambda: b"".join(read()))
            monkeypatch.setattr(sys, "stdout", terminal)
            monkeypatch.setattr(sys, "stderr", terminal)
            code = main(["compare", str(planted_run), str(planted_run), "--out", str(tmp_path / "c.html")])
        text = pieces.result().decode()
    os.close(ours)
    assert code == 0
    assert "\x1b[33mwarning:\x1b[0m" in text and SHOWN in text
    assert not UNSAFE.search(re.sub("\x1b\\[[0-9;]*m|\r\n", "", text))
