"""What goes wrong is one clear sentence and exit code 2; what was finished is kept."""

import errno
import re
import shutil

import pytest

import kleash.store.atomic
from kleash.cli import main
from kleash.errors import OptionError
from kleash.measuring import compare


@pytest.fixture
def failing(pair, tmp_path, refused):
    """Runs a measurement that cannot be; returns the one line that it prints."""

    def run(*words, policy=None, reference=None):
        models = ["--policy", policy or pair[0], "--reference", reference or pair[1]]
        return refused("measure", *models, "--out", tmp_path / "run", "--max-new-tokens", 4, *words)

    return run


FORMATS = {
    "--prompts": "JSONL, a JSON array, CSV, Parquet or plain text",
    "--text": "JSONL, a JSON array, CSV, Parquet or plain text",
    "--responses": "JSONL, a JSON array, CSV or Parquet",
}


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("option", ["--prompts", "--text", "--responses"])
def test_missing_empty_and_blank_source_files_raise(option, failing, tmp_path):
    assert failing(option, tmp_path / "none.jsonl") == f"there is no file {tmp_path / 'none.jsonl'}"
    assert failing(option, "A boat").startswith("there is no file A boat; texts themselves stand in a file")
    empty = written(tmp_path / "empty.jsonl", "")
    assert failing(option, empty).startswith(f"{empty} is empty; give a file of {FORMATS[option]}")
    assert "holds no" in failing(option, written(tmp_path / "blank.jsonl", "\n \n"))
    (folder := tmp_path / "folder").mkdir()
    assert failing(option, folder).startswith(f"{folder} is a folder; give a file of {FORMATS[option]}")
    assert "names no column" in failing(option, written(tmp_path / "a.csv", "a,b\nc,d\n"), policy=folder)


@pytest.mark.parametrize(
    ("option", "line", "message"),
    [
        ("--prompts", b'{"prompt": "a"', "expected a JSON object"),
        ("--text", b'{"body": "a"}', "expected a field 'text' and found 'body'"),
        ("--responses", b'{"prompt": "a", "response": ""}', "the response has no tokens"),
        ("--prompts", b"caf\xe9", "expected UTF-8 and found byte 0xe9"),
        ("--prompts", b"sea " * 400, r"the prompt is \d+ tokens long and the models read at most 128"),
    ],
)
def test_a_malformed_line_is_reported_with_its_number(option, line, message, failing, tmp_path):
    good = b'{"prompt": "The sea", "response": " was calm", "text": "The sea was calm"}'
    source = written(tmp_path / ("a.jsonl" if line.startswith(b"{") else "a.txt"), good + b"\n" + line)
    assert re.search(f"{source}, line 2: {message}", failing(option, source))


def test_nan_logits_are_reported_with_model_and_prompt(failing, broken, tmp_path):
    source = written(tmp_path / "p.jsonl", '{"text": "A long road"}\n{"text": "The sea was calm"}\n')
    message = failing("--text", source, reference=broken)
    assert message.startswith(
        f"the reference gives NaN or infinite hidden states for prompt 1, sample 0 ({source}, line 2)"
    )


def test_a_full_disk_keeps_the_finished_shards(failing, tmp_path, monkeypatch, pair):
    source = written(tmp_path / "p.txt", "\n".join(f"The sea {n}" for n in range(8)))
    sync = kleash.store.atomic.os.fsync

    def full(descriptor):
        if (tmp_path / "run" / "sequences" / "part-00001.parquet").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(kleash.store.atomic.os, "fsync", full)
    message = failing("--prompts", source, "--batch-tokens", 8)
    assert message.startswith("no space is left to write") and "what was finished is kept" in message
    finished = sorted(path.name for path in (tmp_path / "run" / "sequences").iterdir())
    assert finished == ["part-00000.parquet", "part-00001.parquet"]
    monkeypatch.undo()
    words = ["--policy", pair[0], "--reference", pair[1], "--prompts", source, "--out", tmp_path / "run"]
    more = ["--max-new-tokens", 4, "--quiet", "--batch-tokens", 8, "--resume"]
    assert main(["measure", *map(str, [*words, *more])]) == 0
    assert (tmp_path / "run" / "report.html").exists()


def test_a_run_with_a_missing_part_raises(pair, tmp_path, capsys):
    source = written(tmp_path / "p.txt", "\n\n".join(f"The sea {n} was calm" for n in range(8)))
    words = ["measure", "--policy", pair[0], "--reference", pair[1], "--text", source, "--quiet"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert main([*map(str, [*words, "--batch-tokens", 8, "--out", whole])]) == 0
    shutil.copytree(whole, part)
    (part / "tokens" / "part-00001.parquet").unlink()
    missing = f"kleash: {part / 'tokens' / 'part-00001.parquet'} is missing or has no checksum"
    for asked in (["report", part], ["compare", whole, part, "--out", tmp_path / "c.html"]):
        assert main([*map(str, asked)]) == 2
        assert capsys.readouterr().err.startswith(missing)


def test_unusable_output_folders_raise(refused, pair, tmp_path, capsys):
    source, long = written(tmp_path / "t.txt", "The sea was calm"), tmp_path / ("x" * 300)
    assert "xxx cannot be written: File name too long" in refused(
        "measure", "--policy", pair[0], "--text", source, "--out", long
    )
    for words, expected in (
        (["report", long], "cannot be read: File name too long"),
        (["report", source], "has no measurement.json; is it a run folder?"),
        (["cache", "--quiet", "--text", source, "--out", long], "File name too long"),
        (["measure", "--quiet", f"--policy={long}.gguf", f"--text={source}"], "xxx.gguf; give a GGUF file"),
        (["audit", "kleash:sampled_k1", "--quiet", "--out", "au"], "must be a file that ends in .html"),
    ):
        assert main([*map(str, words)]) == 2
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1, error


def test_a_tilde_is_expanded_in_every_path_option(pair, tmp_path, monkeypatch):
    """As it does in ``--out=~/run``, and as everybody does from Python."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pair[0], tmp_path / "policy")
    written(tmp_path / "t.txt", "The sea was calm")
    words = ["--policy=~/policy", f"--reference={pair[1]}", "--text=~/t.txt", "--quiet", "--out=~/run"]
    assert main(["measure", *words]) == 0
    assert main(["report", "~/run"]) == 0
    assert main(["compare", "~/run", "~/run", "--out=~/compared.html", "--json"]) == 0
    assert main(["audit", "kleash:sampled_k1", "--quiet", "--out=~/audit.html"]) == 0
    entries = {path.name for path in tmp_path.iterdir()}
    assert entries == {"policy", "t.txt", "run", "compared.html", "audit.html"}


def test_report_and_compare_without_runs_raise(tmp_path, capsys):
    message = "compare takes a list of two or more run folders; 1 was given"
    for one in (str(tmp_path), tmp_path, iter([tmp_path])):
        with pytest.raises(OptionError, match=message):
            compare(one)
    assert main(["compare", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"kleash: {message}\n"
