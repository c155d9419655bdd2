"""``kleash sweep --engine ray``, with a stand-in for Ray that runs the real workers in this process."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import save_tiny

from kleash.engines.ray.cluster import WorkerResources
from kleash.errors import ClusterError, OptionError
from kleash.jobs import SweepJob
from kleash.measuring import sweep, workers

DOCUMENTS = [f"Boat {n} went out {n * n} times before the sun had come up." for n in range(34)]


class StandInRay:
    """Ray's functions that a pool of workers calls; an actor's method runs when its result is waited for."""

    exceptions = SimpleNamespace(
        RayError=type("RayError", (Exception,), {}), RayTaskError=type("RayTaskError", (Exception,), {})
    )

    def __init__(self) -> None:
        self.pending: deque[tuple[int, partial[Any]]] = deque()
        self.answers: dict[int, Any] = {}
        self.scored: list[int] = []
        self.connections = self.killed = self._calls = 0

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=partial(self._actor, kind)))

    def _actor(self, kind: type, number: int) -> Any:
        worker = kind(number)
        methods = ("versions", "load", "score", "noise_floor_columns", "float32_gap")
        calls = {
            name: SimpleNamespace(remote=partial(self._send, number, getattr(worker, name)))
            for name in methods
        }
        return SimpleNamespace(**calls)

    def _send(self, number: int, method: Any, *arguments: Any) -> int:
        self._calls += 1
        if method.__name__ == "score":
            self.scored.append(number)
        self.pending.append((self._calls, partial(method, *arguments)))
        return self._calls

    def wait(self, calls: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        if self.pending and timeout:
            call, run = self.pending.popleft()
            self.answers[call] = run()
        ready = [call for call in calls if call in self.answers]
        return ready, [call for call in calls if call not in self.answers]

    def get(self, call: int) -> Any:
        while call not in self.answers:
            self.wait([], 1, 1.0)
        return self.answers.pop(call)

    def kill(self, actor: Any) -> None:
        self.killed += 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> StandInRay:
    stand_in = StandInRay()

    @contextmanager
    def connected(*_: object, **__: object) -> Iterator[StandInRay]:
        stand_in.connections += 1
        yield stand_in

    monkeypatch.setattr(workers, "connected_cluster", connected)
    monkeypatch.setattr(workers, "requested_workers", lambda *_: (2, 2, WorkerResources()))
    return stand_in


def test_workers_measure_the_candidates_as_one_process_does(tmp_path: Path, ray: StandInRay) -> None:
    save_tiny(tmp_path / "base")
    names = ("near", "far")
    for name, apart in zip(names, (0.02, 0.3), strict=True):
        save_tiny(tmp_path / name, apart=apart)
    (tmp_path / "text.txt").write_text("\n\n".join(DOCUMENTS))
    options: dict[str, Any] = {
        "candidates": (*(str(tmp_path / name) for name in names), str(tmp_path / "missing")),
        "reference": str(tmp_path / "base"),
        "text": str(tmp_path / "text.txt"),
        "window": 64,
        "batch_tokens": 128,
    }
    alone = sweep(SweepJob(**options, out=str(tmp_path / "alone")))
    shared = sweep(SweepJob(**options, out=str(tmp_path / "shared"), engine="ray", workers=2))
    assert [candidate.numbers for candidate in shared.candidates] == [
        candidate.numbers for candidate in alone.candidates
    ]
    assert shared.pairs == alone.pairs and len(shared.failed) == 1
    assert set(ray.scored) == {0, 1}
    assert ray.connections == 1 + len(names) and ray.killed == 2 * len(names)


@pytest.mark.peers("ray")
def test_a_cluster_that_cannot_be_reached_ends_the_sweep_before_the_reference_is_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"candidates": ("shipped:policy",), "out": str(tmp_path / "out")}
    for _ in range(2):  # the lock that the first leaves behind is no other file
        with pytest.raises(ClusterError, match=r"no Ray cluster answers at 127\.0\.0\.1:9"):
            sweep(SweepJob(**options, engine="ray", address="127.0.0.1:9"))
    assert not (tmp_path / "out" / "reference-cache").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "ray", "attribute": ("layers",)}, "--attribute swaps weights in this process"),
        ({"workers": 2}, "--workers is for --engine ray"),
        ({"engine": "dask"}, "--engine must be one of local, ray"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SweepJob(candidates=("shipped:policy",), **options)
