"""Addresses that nobody answers, what a worker reserves, and why a worker was lost."""

import socket
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from kleash.engines.ray import cluster, cluster_address, compat
from kleash.engines.ray.cluster import WorkerResources, connected_cluster, worker_resources
from kleash.engines.ray.cluster_address import reachable_address
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


SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
HEADERS_FRAME = 1


@pytest.mark.peers("ray")
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_is_used_only_if_grpc_answers(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_address, "PROBE_S", 0.3)
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


@contextmanager
def grpc_server(answer: Callable[[bytes, Any], bytes], calls: Collection[str]) -> Iterator[str]:
    """The address of a gRPC server that has these calls."""
    import grpc

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: Any) -> Any:
            return (
                grpc.unary_unary_rpc_method_handler(answer) if handler_call_details.method in calls else None
            )

    server = grpc.server(ThreadPoolExecutor(1), handlers=(Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


HEAD, CLIENT_SERVER = "/ray.rpc.NodeInfoGcsService/GetClusterId", "/ray.rpc.RayletDriver/ClusterInfo"


@pytest.fixture(scope="module")
def cluster_with_token() -> Iterator[str]:
    """The address of a gRPC server that answers only to those with the token t."""
    import grpc

    def answer(_: bytes, context: Any) -> bytes:
        if dict(context.invocation_metadata()).get("authorization") != "Bearer t":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or incorrect")
        return b""

    with grpc_server(answer, (HEAD, CLIENT_SERVER)) as address:
        yield address


@pytest.mark.peers("ray")
@pytest.mark.parametrize("code", ["UNAUTHENTICATED", "NOT_FOUND"])
def test_a_server_without_the_call_of_the_address_is_refused(code: str) -> None:
    """A head has one call and the client server the other; neither the answer nor the token matters."""
    import grpc

    def answer(_: bytes, context: Any) -> bytes:
        context.abort(grpc.StatusCode[code], "as of Ray")

    with grpc_server(answer, ()) as address:
        for scheme in ("", "ray://"):
            with pytest.raises(
                ClusterError, match=f"^what answers at {scheme}{address} is no Ray cluster; is"
            ):
                reachable_address(scheme + address)
    with grpc_server(answer, (HEAD,)) as address:
        message = f"^what answers at ray://{address} is the head of a Ray cluster: give --address {address}$"
        with pytest.raises(ClusterError, match=message):
            reachable_address("ray://" + address)
    with grpc_server(answer, (CLIENT_SERVER,)) as address:
        message = f"is the client server of a Ray cluster: give --address ray://{address}$"
        with pytest.raises(ClusterError, match=message):
            reachable_address(address)


@contextmanager
def web_server(status: int) -> Iterator[str]:
    """The address of an HTTP/2 server that answers with a status, as the byte of HPACK's table, and no content."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection = server.accept()[0]
                connections.append(connection)
                with suppress(OSError):
                    connection.sendall(SETTINGS)
                    frames = connection.makefile("rb")
                    frames.read(24)
                    while header := frames.read(9):
                        frames.read(int.from_bytes(header[:3], "big"))
                        if header[3] == HEADERS_FRAME:
                            connection.sendall(bytes((0, 0, 1, 1, 5)) + header[5:] + bytes((status,)))

    connections = list[socket.socket]()
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in connections:
            connection.close()


@pytest.mark.peers("ray")
@pytest.mark.parametrize("status", [0x88, 0x8C, 0x8E])  # 200, 400 and 500
def test_a_web_server_is_no_ray_cluster(status: int) -> None:
    with (
        web_server(status) as address,
        pytest.raises(ClusterError, match="is no Ray cluster; is the cluster"),
    ):
        reachable_address(address)


@pytest.mark.peers("ray")
@pytest.mark.parametrize("address", ["", "ray://", "auto"])
@pytest.mark.parametrize("mode", [None, "token", "disabled"])
@pytest.mark.parametrize("token", ["t", "of another cluster", None])
def test_the_token_of_a_cluster_is_sent_as_ray_sends_it(
    cluster_with_token: str,
    address: str,
    mode: str | None,
    token: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray sends it if RAY_AUTH_MODE is token, or if that is not set and the cluster is that of this machine."""
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    monkeypatch.setattr(cluster_address, "token_metadata", lambda: metadata)
    monkeypatch.setattr(cluster_address, "address_of_this_machine", lambda: cluster_with_token)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    target = address if address == "auto" else address + cluster_with_token
    is_sent = mode == "token" or (mode is None and address == "auto")
    if is_sent and token == "t":
        assert reachable_address(target).endswith(cluster_with_token)
        return
    state = "has none" if token is None else "has another one" if is_sent else "does not send one"
    with pytest.raises(
        ClusterError, match=f"requires its token, and this process {state}: set RAY_AUTH_MODE=token"
    ):
        reachable_address(target)


@pytest.mark.peers("ray")
def test_the_token_of_this_process_is_that_which_ray_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._raylet import AuthenticationTokenLoader

    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 32)
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        assert compat.token_metadata() == (("authorization", "Bearer " + "a" * 32),)
    finally:
        AuthenticationTokenLoader.instance().reset_cache()


class StandInRay(SimpleNamespace):
    """Ray's module as far as connecting calls it; keeps the address that it is given."""

    exceptions = SimpleNamespace(RayError=KeyError)

    def is_initialized(self) -> bool:
        return False

    def init(self, **settings: Any) -> None:
        self.address = settings["address"]
        if self.error is not None:
            raise self.error

    def shutdown(self) -> None:
        pass


@pytest.mark.peers("ray")
@pytest.mark.parametrize("address", ["auto", "host:1"])
def test_ray_is_told_whether_it_found_the_cluster_itself(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray sends its token to the cluster of this machine only if the address that it is given is auto."""
    ray = StandInRay(error=None)
    monkeypatch.setattr(cluster, "import_extra", lambda *_: ray)
    monkeypatch.setattr(cluster, "reachable_address", lambda _: "host:1")
    with connected_cluster(address):
        assert ray.address == address
    ray.error = KeyError("Token authentication is enabled but no authentication token was found")
    message = r"^the Ray cluster at host:1 cannot be used: .*no authentication token"
    with pytest.raises(ClusterError, match=message), connected_cluster(address):
        pass


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
        ("cpu=1.5,A100=1.5", False, {"CPU": 1.5, "A100": 1.5}),
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


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "cpu=1e-9",
            "Ray takes at least 0.0001 of a resource, and whole GPUs from 1 on; it is 'cpu=1e-9'",
        ),
        ("gpu=1.5", "Ray takes at least 0.0001 of a resource, and whole GPUs from 1 on; it is 'gpu=1.5'"),
        ("object_store_memory=1e9", "Ray has no object_store_memory for a worker; leave it out"),
        ("gpu=1,GPU=2", "takes amounts such as gpu=1"),
    ],
)
def test_amounts_that_ray_cannot_reserve_are_refused(option: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MeasureJob(engine="ray", resources_per_worker=option)


def test_a_machine_runs_only_so_many_workers_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(cluster, "import_extra", lambda *_: StandInRay(error=AssertionError))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    message = r"^--workers is 17, each with both models, and this machine has 2 cores; give at most 16, or the --addr"
    with pytest.raises(OptionError, match=message), connected_cluster(None, workers=17):
        pass
    with pytest.raises(AssertionError), connected_cluster(None, workers=16):
        pass


@pytest.mark.parametrize(
    ("address", "connected", "is_same"),
    [
        ("127.0.0.1:6379", "192.0.2.7:6379", True),  # as Ray connects to localhost
        ("localhost:6379", "192.0.2.7:6379", True),
        ("head:6379", "192.0.2.7:6379", True),
        ("head:6379", "head:6379", True),
        ("127.0.0.1:6379", "192.0.2.7:6380", False),
        ("127.0.0.1:6379", "192.0.2.8:6379", False),
        ("head:6379", "192.0.2.8:6379", False),
        ("unknown:6379", "192.0.2.7:6379", False),
        ("unknown:6379", "unknown:6379", True),
    ],
)
def test_a_connected_cluster_is_used_by_any_of_its_addresses(
    address: str, connected: str, is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine is 192.0.2.7, and called head."""
    known = {"localhost": "127.0.0.1", "head": "192.0.2.7"}

    class Socket(socket.socket):
        def bind(self, target: Any) -> None:
            if target[0] not in ("127.0.0.1", "192.0.2.7"):
                raise OSError("Cannot assign requested address")

    def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host == "unknown":
            raise socket.gaierror("Name or service not known")
        return [(0, 0, 0, "", (known.get(host, host), 0))]

    monkeypatch.setattr(cluster_address, "socket", SimpleNamespace(**vars(socket)))
    monkeypatch.setattr(cluster_address.socket, "socket", Socket)
    monkeypatch.setattr(cluster_address.socket, "getaddrinfo", resolve)
    context = SimpleNamespace(gcs_address=connected)
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setattr(cluster, "import_extra", lambda *_: ray)
    monkeypatch.setattr(cluster, "without_messages", nullcontext)
    if is_same:
        with connected_cluster(address) as module:
            assert module is ray
        return
    message = (
        f"^--address is {address}, and this process is connected to the Ray cluster at {connected}; leave"
    )
    with pytest.raises(OptionError, match=message), connected_cluster(address):
        pass


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
