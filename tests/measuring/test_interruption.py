"""A run that is killed and goes on comes to the result of one that was left alone."""

import os
import platform
import signal
import time
from contextlib import ExitStack, nullcontext, suppress

import pytest
from run_files import require_same_files

from kleash.cli import entry
from kleash.measuring.run import resumable
from kleash.store.locks import claim, wait_for_parts

OPTIONS = ["--max-new-tokens", "3", "--batch-tokens", "8", "--quiet"]


def words(pair, prompts, out):
    policy, reference = pair
    return [
        *("measure", "--policy", str(policy), "--reference", str(reference), "--prompts", str(prompts)),
        *("--out", str(out), *OPTIONS),
    ]


def wait_for(path, process):
    for _ in range(24_000):
        if path.exists():
            return
        assert process.poll() is None, "the run ended before it could be interrupted"
        time.sleep(0.005)
    raise AssertionError(f"{path} did not appear")


@pytest.fixture(scope="module")
def undisturbed(pair, prompts, kleash, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    kleash(*words(pair, prompts, out))
    return out


def test_a_run_killed_twice_resumes_to_the_same_result(
    pair, prompts, kleash, command_forks, undisturbed, tmp_path
):
    out = tmp_path / "run"
    shards = len(list((undisturbed / "sequences").iterdir()))
    assert shards >= 8
    for at, kind in ((1, "tokens"), (shards // 2, "sequences")):
        process = command_forks.start([*words(pair, prompts, out), "--resume"])
        wait_for(out / kind / f"part-{at:05d}.parquet", process)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not (out / "measurement.json").exists()
    times = {path: path.stat().st_mtime_ns for path in (out / "sequences").iterdir()}
    assert times
    kleash(*words(pair, prompts, out), "--resume")
    assert all(path.stat().st_mtime_ns == changed for path, changed in times.items()), (
        "a kept shard was done again"
    )
    require_same_files(out, undisturbed)


def test_sigterm_prints_the_options_that_resume(pair, prompts, command_forks, tmp_path):
    """As Ctrl-C does, whose handler is tested below."""
    out = tmp_path / "run"
    long = ["--samples-per-prompt", "40"]  # it must not be done before the signal arrives
    process = command_forks.start([*words(pair, prompts, out), *long])
    wait_for(out / "sequences" / "part-00000.parquet", process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert error.strip() == (
        f"kleash: terminated by SIGTERM; finished shards are on disk: resume with --resume --out {out}"
    )


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated by SIGTERM")]
)
@pytest.mark.parametrize("out", [None, "run"])
def test_an_interruption_whose_message_a_library_drops_is_described(number, cause, out, monkeypatch, capsys):
    """As Ray does while it waits for workers: it raises a KeyboardInterrupt without a message."""

    def interrupted(_):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        with nullcontext() if out is None else resumable(out):
            raise KeyboardInterrupt

    monkeypatch.setattr(entry, "_run", interrupted)
    before = signal.signal(
        number, signal.SIG_DFL
    )  # Ray, in an earlier test of this process, may have set its own
    try:
        assert entry.main(["measure"]) == 128 + number
    finally:
        signal.signal(number, before)
    expected = (
        cause if out is None else "interrupted; finished shards are on disk: resume with --resume --out run"
    )
    assert capsys.readouterr().err == f"kleash: {expected}\n"


def test_a_process_that_hangs_is_waited_for_by_name(tmp_path):
    """Its claim is freed at last, as when it is killed, and the other one does its part."""
    missing, notes = {"shard-00000"}, list[str]()
    with ExitStack() as stack:
        assert stack.enter_context(claim(tmp_path, "shard-00000"))

        def note(sentence):
            notes.append(sentence)
            stack.close()

        assert wait_for_parts(tmp_path, lambda: missing, note, poll_seconds=0.01) is False
    assert notes == [f"waiting for process {os.getpid()} on {platform.node()}"]
