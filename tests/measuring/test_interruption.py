"""A run that is killed and goes on comes to the result of one that was left alone."""

import os
import platform
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from command_words import words
from run_files import require_same_files

from kleash.cli import entry, main
from kleash.measuring.run import resumable
from kleash.store.locks import claim, wait_for_parts


def words_of(job, **more):
    names = ("policy", "reference", "prompts", "limit", "max_new_tokens", "batch_tokens")
    return words("measure", **{name: getattr(job, name) for name in names}, quiet=True, **more)


def wait_for(path, process):
    for _ in range(24_000):
        if path.exists():
            return
        assert process.poll() is None, "the run ended before it could be interrupted"
        time.sleep(0.005)
    raise AssertionError(f"{path} did not appear")


def test_a_run_killed_twice_resumes_to_the_same_result(job, alone, command_forks, tmp_path):
    out, shards = tmp_path / "run", alone.counts.shards
    for at, kind in ((1, "tokens"), (shards // 2, "sequences")):
        process = command_forks.start(words_of(job, out=out, resume=True))
        wait_for(out / kind / f"part-{at:05d}.parquet", process)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not (out / "measurement.json").exists()
    times = {path: path.stat().st_mtime_ns for path in (out / "sequences").iterdir()}
    assert main(words_of(job, out=out, resume=True)) == 0
    are_kept = [path.stat().st_mtime_ns == changed for path, changed in times.items()]
    assert are_kept and all(are_kept), "a kept shard was done again"
    require_same_files(out, Path(str(job.out)))


def test_sigterm_prints_the_options_that_resume(job, command_forks, tmp_path):
    """As Ctrl-C does, whose handler is tested below."""
    out = tmp_path / "run"
    # it must not be done before the signal arrives
    process = command_forks.start(words_of(job, out=out, samples_per_prompt=40))
    wait_for(out / "sequences" / "part-00000.parquet", process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    told = "kleash: terminated by SIGTERM; what is finished is on disk: resume with --resume"
    assert error.strip() == f"{told} --out {out}"


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated by SIGTERM")]
)
@pytest.mark.parametrize("out", [None, "a b"])
def test_an_interruption_whose_message_a_library_drops_is_described(number, cause, out, monkeypatch, capsys):
    """As Ray does while it waits for workers: it raises a KeyboardInterrupt without a message."""

    def interrupted(_):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        with ExitStack() as stack:
            for folder in () if out is None else (out, f"{out}/candidates/01-a"):  # as a sweep's
                stack.enter_context(resumable(folder))
            raise KeyboardInterrupt

    monkeypatch.setattr(entry, "_run", interrupted)
    # Ray, in an earlier test of this process, may have set its own
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert entry.main(["measure"]) == 128 + number
    finally:
        signal.signal(number, before)
    expected = (
        cause if out is None else "interrupted; what is finished is on disk: resume with --resume --out 'a b'"
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
