"""The processes (ranks) that measure one run: what they exchange, and how the failure of one reaches the others.

They talk through the key-value store of torch.distributed, which the launcher sets up, and not through collectives:
a rank that is scoring takes part in nothing, a rank that waits sees the failure or the silence of any other, and no
wait is without an end.
"""

import json
import platform
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from typing import Any, Protocol, runtime_checkable

from kleash.errors import Interrupted, KleashError, RankError

POLL_S = 0.05
"""Seconds from one look at the store to the next, while waiting."""
HEARTBEAT_S = 5.0
"""Seconds from one heartbeat of a rank to the next."""
SILENCE_S = 300.0
"""Seconds without a heartbeat after which a rank counts as lost."""
POST_S = 2.0
"""Seconds for which a rank that fails waits for the sentence of one that has failed before."""
LEAVE_S = 10.0
"""Seconds for which the rank that hosts the store waits for the others at the end."""


@runtime_checkable
class KeyValueStore(Protocol):
    """The methods of a store of torch.distributed that are used."""

    def set(self, key: str, value: str, /) -> Any:
        """Set a key."""
        ...

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, atomically, and return its new value."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""
        ...


class LocalStore:
    """The store of a single process, or of the threads of one."""

    def __init__(self) -> None:
        """Begin empty."""
        self._values: dict[str, bytes] = {}
        self._lock = Lock()

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return self._values.pop(key, None) is not None


class RankGroup:
    """The ranks of a run and their exchange of small values; without arguments, a process alone.

    Values are what JSON can hold. A name is used once, except by ``add``.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        store: KeyValueStore | None = None,
        *,
        node: str | None = None,
        hosts_store: bool = False,
        start: str = "",
        launcher_store: KeyValueStore | None = None,
    ) -> None:
        """Describe this process.

        Args:
            rank: its number.
            world_size: the number of all.
            store: shared by all.
            node: name of its machine; None for the host's name.
            hosts_store: whether the store ends with this process.
            start: names this start of the processes; their launcher may repeat it after a failure.
            launcher_store: what all starts share; None if there is one start.
        """
        self.rank, self.world_size = rank, world_size
        self.store: KeyValueStore = store if store is not None else LocalStore()
        self._node = node if node is not None else platform.node()
        self._hosts_store = hosts_store
        self._start, self._launcher_store = (
            start,
            launcher_store if launcher_store is not None else LocalStore(),
        )
        self._heartbeats: dict[int, tuple[int, float]] = {}
        """Rank -> the count of its heartbeats, and the time at which that was first seen."""
        self._last_heartbeat_check = 0.0
        self.nodes: list[str] = [self._node] * world_size
        """The machine of each rank; known once ``running`` has begun."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes the result and prints."""
        return self.rank == 0

    @property
    def ranks_on_node(self) -> list[int]:
        """The ranks on this machine, in rising order."""
        return [rank for rank, node in enumerate(self.nodes) if node == self._node]

    @contextmanager
    def running(self) -> Generator["RankGroup"]:
        """Context in which this rank sends heartbeats; an exception in it stops the other ranks as well.

        Raises:
            RankError: if another rank does not join.
        """
        if self.world_size == 1:
            yield self
            return
        ended = Event()
        heartbeats = Thread(target=self._send_heartbeats, args=(ended,), daemon=True)
        heartbeats.start()
        try:
            self.nodes = self.gather("node", self._node)
            yield self
        except BaseException as error:
            replacement = None
            with suppress(RankError):
                replacement = self._post_failure(error)
            if replacement is None:
                raise
            raise replacement from error
        finally:
            with suppress(RankError):
                self._leave()
            ended.set()
            heartbeats.join()

    def gather(self, name: str, value: Any) -> list[Any]:
        """The values of all ranks, in the order of the ranks. All call it."""
        self.post(f"{name}/{self.rank}", value)
        names = [f"{name}/{rank}" for rank in range(self.world_size)]
        self.wait_for(lambda: self._call(lambda: self.store.check(names)))
        return [self.peek(key) for key in names]

    def broadcast(self, name: str, value: Any = None) -> Any:
        """The value of the first rank. All call it."""
        if self.is_first:
            self.post(name, value)
            return value
        self.wait_for(lambda: self._call(lambda: self.store.check([name])))
        return self.peek(name)

    def post(self, name: str, value: Any) -> None:
        """Let the others read a value."""
        self._call(lambda: self.store.set(name, json.dumps(value)))

    def peek(self, name: str) -> Any:
        """A value that was posted; None if there is none yet."""
        if not self._call(lambda: self.store.check([name])):
            return None
        return json.loads(self._call(lambda: self.store.get(name)))

    def take(self, name: str) -> Any:
        """A value that was posted, which is then gone; None if there is none yet."""
        value = self.peek(name)
        if value is not None:
            self._call(lambda: self.store.delete_key(name))
        return value

    def record_begun(self, folder: str) -> None:
        """Let later starts of these processes know that this one has begun the run in a folder."""
        self._call(lambda: self._launcher_store.set(f"begun/{folder}", self._start))

    def has_begun_before(self, folder: str) -> bool:
        """Whether an earlier start of these processes began the run in a folder, so that this one goes on with it."""
        name = f"begun/{folder}"
        if not self._call(lambda: self._launcher_store.check([name])):
            return False
        return self._call(lambda: self._launcher_store.get(name)) != self._start.encode()

    def add(self, name: str, amount: int = 1) -> int:
        """Add to a counter of all ranks and return its new value."""
        return self._call(lambda: self.store.add(name, amount))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds.

        Raises:
            RankError: if another rank fails meanwhile, or gives no sign of life.
        """
        while not condition():
            self.check()
            self._check_heartbeats()
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raise an error if another rank has failed.

        Raises:
            RankError: with that rank's error.
        """
        if self.world_size == 1:
            return
        failure = self.peek("failure")
        if failure is not None and failure["rank"] != self.rank:
            raise RankError(_stopped(failure), is_reported=self._is_printed(failure))

    def _check_heartbeats(self) -> None:
        """Raise RankError if the count of a rank's heartbeats has not risen for ``SILENCE_S``."""
        now = time.monotonic()
        if now - self._last_heartbeat_check < min(HEARTBEAT_S, SILENCE_S / 4):
            return
        self._last_heartbeat_check = now
        for rank in range(self.world_size):
            if rank == self.rank:
                continue
            heartbeats = self.add(f"beat/{rank}", 0)
            last_seen, since = self._heartbeats.get(rank, (-1, now))
            self._heartbeats[rank] = (heartbeats, since if heartbeats == last_seen else now)
            if now - self._heartbeats[rank][1] < SILENCE_S:
                continue
            if heartbeats == 0:
                raise RankError(
                    f"rank {rank} of {self.world_size} has not joined within {SILENCE_S:.0f} s; start all ranks, or "
                    "unset RANK and WORLD_SIZE to run one process alone"
                )
            raise RankError(
                f"rank {rank} of {self.world_size} has given no sign of life for {SILENCE_S:.0f} s; start the run "
                "again with --resume"
            )

    def _send_heartbeats(self, ended: Event) -> None:
        """Count up this rank's heartbeats until the event is set."""
        while True:
            with suppress(RankError):
                self.add(f"beat/{self.rank}")
            if ended.wait(min(HEARTBEAT_S, SILENCE_S / 4)):
                return

    def _post_failure(self, error: BaseException) -> BaseException | None:
        """Tell the others why this rank stops.

        Returns:
            The error to raise instead, if another rank failed before with the same sentence, or if this one was
            interrupted, as by torchrun after a failure; None otherwise.
        """
        is_interruption = isinstance(error, KeyboardInterrupt)
        sentence = str(error) or "interrupted"
        if self.add("failures") == 1:
            if not isinstance(error, KleashError | KeyboardInterrupt):
                sentence = ": ".join(filter(None, (type(error).__name__, str(error))))
            failure = {"rank": self.rank, "sentence": sentence, "is_interruption": is_interruption}
            self.post("failure", failure)
            return Interrupted(sentence) if is_interruption else None
        deadline = time.monotonic() + POST_S
        while (failure := self.peek("failure")) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if failure is not None and is_interruption:
            return Interrupted(_stopped(failure), is_reported=self._is_printed(failure))
        if failure is not None and isinstance(error, KleashError) and sentence == failure["sentence"]:
            return RankError(sentence, is_reported=True)
        return None

    def _is_printed(self, failure: dict[str, Any]) -> bool:
        """Whether this rank need not print the failure of another: rank 0 does, and of Ctrl-C one rank is enough."""
        return not self.is_first or failure["is_interruption"]

    def _leave(self) -> None:
        """Count this rank as gone; the host of the store waits until all are."""
        self.add("left")
        deadline = time.monotonic() + LEAVE_S
        while self._hosts_store and self.add("left", 0) < self.world_size and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _call(self, operation: Callable[[], Any]) -> Any:
        """The result of an operation on the store.

        Raises:
            RankError: if the store cannot be reached.
        """
        try:
            return operation()
        except (RuntimeError, OSError) as error:  # torch.distributed.DistError is a RuntimeError
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise RankError(
                f"the store that the ranks share cannot be reached ({reason}): the first process or the launcher is "
                "gone; start the run again with --resume"
            ) from error


def _stopped(failure: dict[str, Any]) -> str:
    """The sentence about the failure of another rank."""
    return f"rank {failure['rank']} stopped: {failure['sentence']}"
