"""The ranks that a launcher started find each other, also when it starts them again."""

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer

import pytest

from kleash.errors import RankError, RunFolderError
from kleash.launch_environment import launched_rank
from kleash.measuring import MeasureJob, RankGroup, launched_ranks, measure, rendezvous
from kleash.measuring.rank_group import LocalStore
from kleash.measuring.rendezvous import agreed_start


def starts_of(store: LocalStore, world_size: int) -> set[str]:
    """The names of a start of the processes on all ranks, the first of which comes last."""
    with ThreadPoolExecutor(world_size) as threads:
        others = [threads.submit(agreed_start, store, rank, world_size) for rank in range(1, world_size)]
        time.sleep(0.1)
        return {agreed_start(store, 0, world_size), *(other.result() for other in others)}


def test_ranks_that_are_started_again_do_not_take_what_the_start_before_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = LocalStore()
    first, second = starts_of(store, 3), starts_of(store, 3)
    monkeypatch.setattr(rendezvous, "SILENCE_S", 0.2)
    with pytest.raises(RankError, match="rank 1 of 3 has not joined within"):  # killed before the others came
        agreed_start(store, 0, 3)
    with pytest.raises(RankError, match="rank 0 of 3 has not joined within"):
        agreed_start(store, 2, 3)
    monkeypatch.undo()
    third, larger = starts_of(store, 3), starts_of(store, 4)
    assert [len(names) for names in (first, second, third, larger)] == [1, 1, 1, 1]
    assert len(first | second | third | larger) == 4


def test_processes_that_are_started_again_go_on_with_the_run_that_they_have_begun(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    launcher_store = LocalStore()

    def ranks(start: str) -> RankGroup:
        return RankGroup(start=start, launcher_store=launcher_store)

    policy, reference = map(str, pair)
    job = MeasureJob(
        policy=policy, reference=reference, prompts=str(prompts), limit=2, max_new_tokens=3, out=str(tmp_path)
    )
    measurement = measure(job, ranks=ranks("first"))
    for group in (ranks("first"), RankGroup()):  # a second call of one start, and another launcher
        with pytest.raises(RunFolderError, match="go on with it with --resume"):
            measure(job, ranks=group)
    assert measure(job, ranks=ranks("second")).per_token == measurement.per_token


def test_a_launcher_that_cannot_be_reached_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RankError, match="WORLD_SIZE is 2, and the other ranks cannot be reached"):
        launched_ranks()
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(RankError, match="RANK is 5 and WORLD_SIZE is 2, whose ranks are 0 to 1"):
        launched_ranks()


def test_a_rank_that_waits_for_the_others_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(rendezvous, "SILENCE_S", 30.0)
    start = time.monotonic()
    interruption = Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    # A shell starts its background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interruption.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            launched_ranks()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 20.0


def test_a_rank_without_a_world_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for world_size in (None, "1"):
        if world_size is None:
            monkeypatch.delenv("WORLD_SIZE", raising=False)
        else:
            monkeypatch.setenv("WORLD_SIZE", world_size)
        assert launched_rank() == 0
        assert launched_ranks().is_first
