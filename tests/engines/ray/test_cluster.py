"""Addresses that nobody answers, what a worker reserves, and why a worker was lost."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from kleash.engines.ray import cluster
from kleash.engines.ray.cluster import WorkerResources, reachable_address, worker_resources
from kleash.errors import ClusterError, OptionError
from kleash.records import MeasureJob


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """The address of a server that answers every connection with these bytes; None to never answer."""
    ended, connections = threading.Event(), list[socket.socket]()

    def serve() -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                connections.append(server.accept()[0])
                if answer is not None:
                    connections[-1].recv(64)
                    connections[-1].sendall(answer)
                    connections.pop().close()

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(0.05)
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        ended.set()
        thread.join()
        for connection in connections:
            connection.close()


SETTINGS = bytes((0, 0, 6, 4, 0, 0, 0, 0, 0))


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_is_used_only_if_grpc_answers(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PROBE_S", 0.3)
    with listening(SETTINGS) as address:
        assert reachable_address(scheme + address) == scheme + address
    for answer in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b""):
        with listening(answer) as address, pytest.raises(ClusterError) as caught:
            reachable_address(scheme + address)
        assert str(caught.value).startswith(f"what answers at {scheme}{address} is no Ray cluster; ")
    with listening(None) as address, pytest.raises(ClusterError) as caught:
        reachable_address(scheme + address)
    assert str(caught.value).startswith(f"no Ray cluster answers at {scheme}{address} (timed out); is the")
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(ClusterError, match=r" \(Connection refused\); is the cluster running"):
            reachable_address(scheme + address)


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", "host:0", "host:70000", "http://host:8265", "ray://", "ray://a:b", "a b/c:1", ":1"],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(OptionError, match=r"^--address takes host:port, ray://host:port, or auto for"):
        reachable_address(address)


@pytest.mark.parametrize(
    ("option", "has_gpus", "amounts"),
    [
        (None, False, {"CPU": 1}),
        (None, True, {"CPU": 1, "GPU": 1}),
        ("gpu=0.5", True, {"CPU": 1, "GPU": 0.5}),
        ("cpu=0,gpu=1", True, {"GPU": 1}),
        ("CPU=4, memory=64e9", True, {"CPU": 4, "memory": 64e9}),
        ("cpu=2,A100=1", False, {"CPU": 2, "A100": 1}),
    ],
)
def test_what_a_worker_reserves(option: str | None, has_gpus: bool, amounts: dict[str, float]) -> None:
    assert worker_resources(option, has_gpus=has_gpus).amounts == amounts


@pytest.mark.parametrize(
    "option", ["gpu", "gpu=", "gpu=x", "gpu=-1", "gpu=1,gpu=2", "=1", "gpu=nan", "gpu=inf", ""]
)
def test_malformed_resources_are_refused_when_the_job_is_made(option: str) -> None:
    with pytest.raises(
        OptionError, match=r"^--resources-per-worker takes amounts such as gpu=1 or cpu=4,memory=16e9"
    ):
        MeasureJob(engine="ray", resources_per_worker=option)


def test_workers_fit_where_every_resource_does() -> None:
    resources = WorkerResources(cpu=2, gpu=1, memory=10.0)
    assert resources.places_on({"CPU": 16.0, "GPU": 4.0, "memory": 1000.0}) == 4
    assert resources.places_on({"CPU": 3.0, "GPU": 4.0, "memory": 1000.0}) == 1
    assert resources.places_on({"CPU": 16.0, "memory": 1000.0}) == 0
    assert str(resources) == "cpu=2,gpu=1,memory=10"
    named = WorkerResources(custom={"TPU-pod": 1.0})
    assert str(named) == "cpu=1,TPU-pod=1" and worker_resources(str(named), has_gpus=False) == named


@pytest.mark.parametrize("option", [{"workers": 2}, {"address": "a:1"}, {"resources_per_worker": "gpu=1"}])
def test_options_of_workers_need_the_engine(option: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=r"is for --engine ray; add that, or leave"):
        MeasureJob(**option)
    assert MeasureJob(engine="ray", **option).settings() == MeasureJob().settings()


def test_a_server_is_asked_by_one_process() -> None:
    with pytest.raises(OptionError, match=r"^--policy is a server, .* leave --engine ray out$"):
        MeasureJob(policy="http://localhost:1/v1", text="x", engine="ray")
