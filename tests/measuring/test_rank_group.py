"""Ranks exchange values; the failure or the silence of one ends the others with a sentence."""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier, Event, Timer
from typing import Any

import pytest

from kleash.errors import CannotRunError, Interrupted, ModelError, RankError
from kleash.measuring import RankGroup, rank_group
from kleash.measuring.rank_group import LocalStore


def in_threads(world_size: int, work: Callable[[RankGroup], Any]) -> list[Future[Any]]:
    """The results of ``work`` on the ranks of a group, each a thread."""
    store = LocalStore()

    def run(rank: int) -> Any:
        with RankGroup(rank, world_size, store, node=f"node-{rank % 2}").running() as group:
            return work(group)

    with ThreadPoolExecutor(world_size) as threads:
        return [threads.submit(run, rank) for rank in range(world_size)]


def errors_of(futures: list[Future[Any]]) -> list[str]:
    return [str(future.exception()) for future in futures]


def is_printed(future: Future[Any]) -> bool:
    error = future.exception()
    return not (isinstance(error, RankError | Interrupted) and error.is_reported)


def test_values_are_gathered_broadcast_and_counted() -> None:
    def work(group: RankGroup) -> Any:
        gathered = group.gather("squares", group.rank**2)
        first = group.broadcast("first", {"rank": group.rank} if group.is_first else None)
        tickets = [group.add("ticket") for _ in range(100)]
        return gathered, first, tickets, group.ranks_on_node

    results = [future.result() for future in in_threads(4, work)]
    assert all(result[:2] == ([0, 1, 4, 9], {"rank": 0}) for result in results)
    assert sorted(ticket for result in results for ticket in result[2]) == list(range(1, 401))
    assert [result[3] for result in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_a_process_alone_needs_nobody() -> None:
    with RankGroup().running() as group:
        assert group.gather("x", 5) == [5] and group.broadcast("y", 6) == 6
        assert group.peek("z") is None and group.take("y") == 6 and group.peek("y") is None
        group.check()


@pytest.mark.parametrize(
    ("error", "sentence", "printing"),
    [
        (ModelError("there is no folder x"), "rank 2 stopped: there is no folder x", [0, 2]),
        (
            ZeroDivisionError("division by zero"),
            "rank 2 stopped: ZeroDivisionError: division by zero",
            [0, 2],
        ),
        (MemoryError(), "rank 2 stopped: MemoryError", [0, 2]),
        (Interrupted("interrupted; resume"), "rank 2 stopped: interrupted; resume", [2]),
        (KeyboardInterrupt("terminated by SIGTERM"), "rank 2 stopped: terminated by SIGTERM", [2]),
        (KeyboardInterrupt(), "rank 2 stopped: interrupted", [2]),
    ],
)
def test_the_failure_of_a_rank_ends_those_that_wait(
    error: BaseException, sentence: str, printing: list[int]
) -> None:
    def work(group: RankGroup) -> None:
        if group.rank == 2:
            raise error
        group.gather("never", 0)

    futures = in_threads(4, work)
    raised = futures[2].exception()
    assert raised is error or (isinstance(raised, Interrupted) and raised.__cause__ is error)
    assert isinstance(raised, ZeroDivisionError | MemoryError) or f"rank 2 stopped: {raised}" == sentence
    assert [message for rank, message in enumerate(errors_of(futures)) if rank != 2] == [sentence] * 3
    assert [rank for rank, future in enumerate(futures) if is_printed(future)] == printing


@pytest.mark.parametrize("kind", [CannotRunError, Interrupted])
def test_one_failure_of_all_ranks_is_reported_once(kind: Callable[[str], BaseException]) -> None:
    together = Barrier(4)

    def work(group: RankGroup) -> None:
        together.wait()
        raise kind("there is no cuda here")

    for _ in range(5):
        futures = in_threads(4, work)
        assert {message.split(": ")[-1] for message in errors_of(futures)} == {"there is no cuda here"}
        assert all(type(future.exception()).__name__ in (kind.__name__, "RankError") for future in futures)
        assert sum(map(is_printed, futures)) == 1


def test_a_rank_that_torchrun_ends_after_a_failure_names_the_failure() -> None:
    """torchrun sends SIGTERM to the others when one has failed, wherever they are."""
    failed = Event()

    def work(group: RankGroup) -> None:
        if group.rank == 1:
            raise ModelError("there is no folder x")
        while group.peek("failure") is None:
            failed.wait(0.01)
        raise KeyboardInterrupt("terminated by SIGTERM")

    futures = in_threads(3, work)
    consequence = "rank 1 stopped: there is no folder x"
    assert errors_of(futures) == [consequence, "there is no folder x", consequence]
    assert isinstance(futures[0].exception(), Interrupted)
    assert [is_printed(future) for future in futures] == [True, True, False]


def test_a_rank_that_fails_second_waits_for_the_sentence_of_the_first() -> None:
    """The first has counted its failure, and tells it a little later."""
    store = LocalStore()
    store.add("failures", 1)
    store.set("node/1", '"node"')
    failure = {"rank": 1, "sentence": "there is no cuda here", "is_interruption": False}
    timer = Timer(0.2, lambda: store.set("failure", json.dumps(failure)))
    with pytest.raises(RankError) as caught, RankGroup(0, 2, store).running():
        timer.start()
        raise CannotRunError("there is no cuda here")
    assert caught.value.is_reported


def test_a_failure_that_is_not_said_ends_the_others_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank was killed between counting its failure and telling it."""
    monkeypatch.setattr(rank_group, "POST_S", 0.1)
    store = LocalStore()
    store.add("failures", 1)
    store.set("node/1", '"node"')
    error = CannotRunError("there is no cuda here")
    with pytest.raises(CannotRunError) as caught, RankGroup(0, 2, store).running():
        raise error
    assert caught.value is error


def test_a_rank_that_does_not_join_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "SILENCE_S", 0.3)
    with (
        pytest.raises(
            RankError, match=r"rank 1 of 2 has not joined within 0 s; start all ranks, or unset RANK"
        ),
        RankGroup(0, 2, LocalStore()).running(),
    ):
        pass


def test_a_rank_that_falls_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "SILENCE_S", 1.0)
    store = LocalStore()
    store.set("node/1", '"node"')
    store.add("beat/1", 7)  # it was there, and was killed
    start = time.monotonic()
    with (
        pytest.raises(RankError, match=r"rank 1 of 2 has given no sign of life .* again with --resume"),
        RankGroup(0, 2, store).running() as group,
    ):
        group.gather("header", 1)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("hosts_store", [True, False])
def test_the_rank_that_hosts_the_store_leaves_last(hosts_store: bool) -> None:
    store, order = LocalStore(), list[int]()

    def work(rank: int) -> None:
        with RankGroup(rank, 2, store, hosts_store=hosts_store and rank == 0).running() as group:
            group.gather("header", rank)
            time.sleep(0.3 * rank)
            if rank == 1:
                order.append(rank)
        if rank == 0:
            order.append(rank)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))
    assert order == ([1, 0] if hosts_store else [0, 1])


def test_a_rank_that_scores_for_long_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "SILENCE_S", 1.0)

    def work(group: RankGroup) -> list[int]:
        if group.rank == 1:
            time.sleep(1.6)
        return group.gather("after", group.rank)

    assert [future.result() for future in in_threads(2, work)] == [[0, 1], [0, 1]]


def test_a_store_that_is_gone_is_a_sentence() -> None:
    class GoneStore(LocalStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\nException raised from recvBytes")

    with pytest.raises(
        RankError, match=r"cannot be reached \(Connection reset by peer\): the first process or"
    ):
        RankGroup(1, 2, GoneStore()).peek("x")
