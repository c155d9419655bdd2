import multiprocessing
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from kleash.errors import RunFolderError
from kleash.records import Measurement, RunFolder
from kleash.store.checksums import write_checked
from kleash.store.job_folder import RunHeader
from kleash.store.tables import SEQUENCE_COLUMNS, TOKEN_COLUMNS, read_columns

HEADER = RunHeader(
    kleash="1",
    settings={"seed": 0, "top_p": None},
    source_sha256="a" * 64,
    fingerprints={"policy": "p", "reference": "r"},
)


def tokens(rows=3):
    columns = {name: np.arange(rows) for name in TOKEN_COLUMNS}
    texts = [f"<{row}>" for row in range(rows)]
    return {**columns, "text": texts, "logp_sampled": [None, *[-1.5] * (rows - 1)]}


def sequences(rows=2):
    return {
        name: ["x"] * rows if kind == "string" else np.arange(rows) for name, kind in SEQUENCE_COLUMNS.items()
    }


def test_what_is_written_is_read_back(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.writing(HEADER, resume=False):
        folder.write_shard(0, tokens(3), sequences())
        folder.write_shard(1, tokens(2), sequences())
    parts = list(folder.parts("tokens", ["token_id", "text", "logp_sampled"]))
    assert [part["text"] for part in parts] == [["<0>", "<1>", "<2>"], ["<0>", "<1>"]]
    assert parts[0]["token_id"].dtype == np.int32 and parts[0]["token_id"].tolist() == [0, 1, 2]
    assert parts[0]["logp_sampled"].dtype == np.float32
    assert np.isnan(parts[0]["logp_sampled"][0]) and parts[0]["logp_sampled"][1] == -1.5
    assert folder.header() == HEADER


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"settings": {"seed": 1, "top_p": None}}, "--seed was 0 and is now 1"),
        ({"settings": {"seed": 0, "top_p": 0.5}}, "--top-p was None and is now 0.5"),
        ({"source_sha256": "b" * 64}, "the source's content (sha256) was 'aaaaaaaaaaaaaaaa' and is now"),
        ({"fingerprints": {"policy": "p", "reference": "s"}}, "the fingerprint of the reference was 'r' and"),
        ({"kleash": "2"}, "kleash was '1' and is now '2'"),
        ({"sampler": "b"}, "the sampler was '' and is now 'b'"),
    ],
)
def test_going_on_with_other_settings_is_refused(tmp_path, other, message):
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        folder.write_shard(0, tokens(), sequences())
    changed = replace(HEADER, **other)
    with pytest.raises(RunFolderError) as caught, RunFolder(tmp_path).writing(changed, resume=True):
        pass
    assert f"{tmp_path} holds another run: {message}" in str(caught.value)


def test_a_folder_that_exists_is_left_alone(tmp_path):
    (stranger := tmp_path / "stranger").mkdir()
    (stranger / "thesis.tex").write_text("x")
    with pytest.raises(RunFolderError, match=r"holds thesis.tex and is no run of kleash"):
        RunFolder(stranger).check(resume=True)
    assert [found.name for found in stranger.iterdir()] == ["thesis.tex"]
    with pytest.raises(RunFolderError, match="is a file, and a run is a folder"):
        RunFolder(stranger / "thesis.tex").check(resume=False)


def test_a_run_without_a_shard_leaves_only_what_a_killed_write_left(tmp_path):
    folder, left = RunFolder(tmp_path / "new"), tmp_path / "new" / "tokens" / ".writing-part-00000.parquet"
    with folder.writing(HEADER, resume=True):
        assert folder.finished_shards() == () and folder.header() == HEADER
        left.write_bytes(b"half")
    with folder.writing(HEADER, resume=True):
        assert not left.exists()
    assert not folder.root.exists()
    folder.root.mkdir()
    (folder.root / "source.jsonl").write_text("{}")  # which may be the user's
    with folder.writing(HEADER, resume=True):
        pass
    assert [path.name for path in folder.root.iterdir()] == ["source.jsonl"]


def test_a_run_is_another_ones_until_its_process_is_killed(tmp_path):
    context = multiprocessing.get_context("fork")
    begun = context.Event()

    def hold_folder():
        with RunFolder(tmp_path).writing(HEADER, resume=True):
            begun.set()
            time.sleep(60)

    other = context.Process(target=hold_folder)
    other.start()
    changed = replace(HEADER, settings={"seed": 1})
    try:
        assert begun.wait(30)
        with pytest.raises(RunFolderError, match="holds another run"):
            RunFolder(tmp_path).writing(changed, resume=True).__enter__()
    finally:
        assert other.pid is not None
        os.kill(other.pid, signal.SIGKILL)
        other.join()
    with RunFolder(tmp_path).writing(changed, resume=False) as folder:
        assert folder.finished_shards() == ()


def test_damaged_files_are_named(tmp_path):
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        folder.write_shard(0, tokens(), sequences())
    part = tmp_path / "tokens" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(RunFolderError, match=r"part-00000.parquet cannot be read .*delete it and run again"):
        read_columns(part, ["kl_policy_reference"], lambda path, _: path.read_bytes())
    (tmp_path / "run.json").write_text('{"kleash": ')
    with pytest.raises(RunFolderError, match=r"run.json is damaged"):
        folder.header()


def test_a_folder_without_a_measurement_says_what_to_do(tmp_path):
    with pytest.raises(RunFolderError, match=r"has no measurement\.json; is it a run folder"):
        Measurement.read(tmp_path)
    with RunFolder(tmp_path).writing(HEADER, resume=False):
        (tmp_path / "sequences" / "part-00000.parquet").touch()
    with pytest.raises(RunFolderError, match="has not finished is finished by --resume"):
        Measurement.read(tmp_path)
    write_checked(tmp_path, tmp_path / "measurement.json", '{"schema": 3, "kle')
    with pytest.raises(RunFolderError, match="cannot be read as a measurement"):
        Measurement.read(tmp_path)
