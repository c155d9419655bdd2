"""A file that another program truncates while it is read: an error message and exit code 2, no signal of the kernel."""

import os
import sys
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
import safetensors.torch
import transformers.modeling_utils
from packed_checkpoints import pack_gptq, save_packed
from tiny_models import tiny_adapter

from kleash.cli import main

LINES = [f"Boat {n} went out {n * n} times before the sun had come up" for n in range(12)]


def truncate(path):
    os.truncate(path, path.stat().st_size // 10)


def truncate_when_opened(path, opening):
    """Truncate a safetensors file right after it is opened, by whichever library, for that time."""
    opened, counts = safetensors.safe_open, [0]

    def open_and_truncate(name, *arguments, **options):
        file = opened(name, *arguments, **options)
        if Path(name).resolve() == path:
            counts[0] += 1
            if counts[0] == opening:
                truncate(path)
        return file

    for module in (safetensors, safetensors.torch, transformers.modeling_utils):
        module.safe_open = open_and_truncate


def truncate_arrow_when_opened(path):
    opened = pa.ipc.open_stream

    def open_and_truncate(source):
        stream = opened(source)
        truncate(path)
        return stream

    pa.ipc.open_stream = open_and_truncate


def exit_code_and_errors(words, prepare, folder):
    """How a command ends in a fork of this process; a negative code is that of a signal."""
    errors = folder / "errors.txt"
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
            sys.stderr = os.fdopen(2, "w")
            prepare()
            code = main(words)
            sys.stderr.flush()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), errors.read_text()


@pytest.fixture
def measured(models, tmp_path):
    """Options of a measurement of several shards on copies of the pair."""
    (tmp_path / "text.txt").write_text("\n\n".join(LINES))
    models = {f"--{role}": tmp_path / role for role in ("policy", "reference")}
    return {**models, "--text": tmp_path / "text.txt", "--batch-tokens": 20, "--out": tmp_path / "run"}


def words_of(command, options):
    return [command, *(str(word) for option in options.items() for word in option), "--quiet"]


def require_refusal(options, prepare, file, folder):
    code, errors = exit_code_and_errors(words_of("measure", options), prepare, folder)
    assert code == 2 and file in errors, f"{code}: {errors}"
    assert "Traceback" not in errors and not (folder / "run" / "measurement.json").exists()


@pytest.mark.parametrize("opening", [1, 2], ids=["after its header was read", "while transformers reads it"])
def test_weights(measured, tmp_path, opening):
    file = tmp_path / "policy" / "model.safetensors"
    require_refusal(measured, lambda: truncate_when_opened(file, opening), str(file), tmp_path)


def test_an_adapter(measured, tmp_path):
    adapter = tiny_adapter(tmp_path / "adapter", tmp_path / "reference", r=32)
    file = adapter / "adapter_model.safetensors"
    options = measured | {"--policy": adapter}
    require_refusal(options, lambda: truncate_when_opened(file, 2), str(file), tmp_path)


def test_packed_weights(measured, tmp_path):
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
    pack = pack_gptq(4, 16, act_order=False, version=1)
    packed = save_packed(tmp_path / "reference", tmp_path / "packed", pack, settings)
    file = packed / "model.safetensors"
    options = measured | {"--policy": packed}
    require_refusal(options, lambda: truncate_when_opened(file, 1), str(file), tmp_path)


def test_a_stored_reference(measured, tmp_path):
    cache = tmp_path / "cache"
    options = {name: value for name, value in measured.items() if name != "--policy"} | {"--out": cache}
    assert main(words_of("cache", options)) == 0
    part = max(cache.glob("part-*"), key=lambda path: path.stat().st_size)
    truncated = partial(truncate_when_opened, part, 2)
    require_refusal(measured | {"--reference-cache": cache}, truncated, part.name, tmp_path)


def test_an_arrow_file(measured, tmp_path):
    source = tmp_path / "text.arrow"
    table = pa.table({"more": [bytes(20_000)] * len(LINES), "text": LINES})  # a batch is of several pages
    with pa.OSFile(str(source), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    options = measured | {"--text": source}
    require_refusal(options, lambda: truncate_arrow_when_opened(source), str(source), tmp_path)
