"""The address of a Ray cluster, and whether it can be used.

Ray's core ends the process, after minutes, if nothing answers at the address of a cluster. So the address is probed
first: a cluster answers the opening of an HTTP/2 connection, over which gRPC runs, with a frame of settings. Then one
of its calls is made: another server does not have it, and a cluster that requires a token refuses it. Ray itself
would repeat either refusal for many seconds, and give another reason.
"""

import os
import re
import socket
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple

from kleash.engines.ray.compat import address_of_this_machine, token_metadata
from kleash.errors import ClusterError, OptionError

PROBE_S = 4.0
"""Seconds within which an address must accept a connection, and again within which it must answer."""
CLIENT_PORT = 10001
"""The port of ``ray://host``."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The opening of an HTTP/2 connection, with an empty frame of settings."""
SETTINGS_FRAME = 4
ADDRESS = re.compile(r"(?P<client>ray://)?(?P<host>\[[0-9a-fA-F:.]+\]|[^:/\[\]]+)(?::(?P<port>\d{1,5}))?")
CALLS = {"": "/ray.rpc.NodeInfoGcsService/GetClusterId", "ray://": "/ray.rpc.RayletDriver/ClusterInfo"}
"""A call without arguments of a cluster's head, and of its client server, which both require the token."""
FROM_WEB_SERVER = ("Received http2 header with status", "No status received")
"""What gRPC says of an answer over HTTP/2 that is not gRPC's."""
ADVICE = "is the cluster running, and is this its address (ray status says it on a node)?"
FORMS = "host:port, ray://host:port, or auto for the cluster on this machine"


def reachable_address(address: str) -> str:
    """The address at which Ray connects, once something has answered there.

    Args:
        address: host:port, ray://host:port, or auto for the cluster on this machine.

    Raises:
        OptionError: if the address is malformed.
        ClusterError: if nothing answers, or something other than a Ray cluster does, or the cluster requires a token
            that this process does not send.
    """
    if address == "auto":
        running = address_of_this_machine()
        if running is None:
            raise ClusterError(
                "--address auto: no Ray cluster is running on this machine; start one with ray start --head, or leave "
                "--address out"
            )
        _probe(running, *_host_and_port(running))
        _require_call_accepted(running, is_automatic=True)
        return running
    _probe(address, *_host_and_port(address))
    _require_call_accepted(address, is_automatic=False)
    return address


def _host_and_port(address: str) -> tuple[str, int]:
    """The host and port of an address.

    Raises:
        OptionError: if it is malformed.
    """
    match = ADDRESS.fullmatch(address)
    port = None if match is None else match["port"] or (CLIENT_PORT if match["client"] else None)
    if match is None or port is None or not 0 < int(port) < 65536:
        raise OptionError(f"--address takes {FORMS}; it is {address!r}")
    return match["host"].strip("[]"), int(port)


def is_same_address(first: str, second: str) -> bool:
    """Whether two addresses of the form host:port are those of one server.

    Ray names a cluster by the IP address of its head, also where it connected to localhost or to a host's name.

    Raises:
        OptionError: if one is malformed.
    """
    (first_host, first_port), (second_host, second_port) = _host_and_port(first), _host_and_port(second)
    if first_port != second_port:
        return False
    first_ips, second_ips = _ip_addresses(first_host), _ip_addresses(second_host)
    return bool(first_ips & second_ips) or (
        _is_of_this_machine(first_ips) and _is_of_this_machine(second_ips)
    )


def _ip_addresses(host: str) -> frozenset[str]:
    """The IP addresses of a host; its name alone if they are not known."""
    try:
        return frozenset(
            str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        )
    except OSError:
        return frozenset((host,))


def _is_of_this_machine(addresses: frozenset[str]) -> bool:
    """Whether one of some IP addresses is an interface's of this machine, so that a socket can be bound to it."""
    for address in addresses:
        with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as bound:
            bound.bind((address, 0))
            return True
    return False


def _probe(address: str, host: str, port: int) -> None:
    """Raise ClusterError unless a gRPC server answers; with TLS, unless one accepts a connection."""
    try:
        with socket.create_connection((host, port), timeout=PROBE_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "1":
                return
            connection.settimeout(PROBE_S)
            connection.sendall(HTTP2_PREFACE)
            answer = connection.recv(9)
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise ClusterError(f"no Ray cluster answers at {address} ({reason}); {ADVICE}") from error
    if len(answer) < 4 or answer[3] != SETTINGS_FRAME:
        raise ClusterError(f"what answers at {address} is no Ray cluster; {ADVICE}")


def _require_call_accepted(address: str, *, is_automatic: bool) -> None:
    """Raise ClusterError if a server is no Ray cluster, or requires a token that this process has not or does not send.

    ``ray start`` makes clusters with a token where one exists. Ray itself sends it to an address only if RAY_AUTH_MODE
    is "token", and to the cluster that it found on this machine also if that is not set.

    Args:
        address: at which a server answers over HTTP/2.
        is_automatic: whether the address is that of the cluster on this machine.
    """
    if os.environ.get("RAY_USE_TLS", "0") == "1":
        return
    host, port = _host_and_port(address)
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    scheme, other_scheme = ("ray://", "") if address.startswith("ray://") else ("", "ray://")
    metadata, mode = token_metadata(), os.environ.get("RAY_AUTH_MODE")
    sends_token = is_automatic if mode is None else mode.lower() == "token"
    answer = _call(target, CALLS[scheme], ())
    if answer.is_refusal and sends_token and metadata:
        answer = _call(target, CALLS[scheme], metadata)
    if answer.is_refusal:
        state = "has none" if not metadata else "has another one" if sends_token else "does not send one"
        raise ClusterError(
            f"the Ray cluster at {address} requires its token, and this process {state}: set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN to what ray get-auth-token prints on a node of the cluster (or copy its ~/.ray/auth_token)"
        )
    if answer.is_of_ray:
        return
    if _call(target, CALLS[other_scheme], ()).is_of_ray:
        server = "client server" if other_scheme else "head"
        raise ClusterError(
            f"what answers at {address} is the {server} of a Ray cluster: give --address {other_scheme}{target}"
        )
    raise ClusterError(f"what answers at {address} is no Ray cluster; {ADVICE}")


class CallAnswer(NamedTuple):
    """How a server answered a call of Ray's."""

    is_of_ray: bool
    """False if the server does not have the call, or does not speak gRPC."""
    is_refusal: bool
    """Whether it refused the call as that of an unknown sender."""


def _call(target: str, method: str, metadata: tuple[tuple[str, str], ...]) -> CallAnswer:
    """Make a call without arguments; a server that does not answer in time may be a busy cluster."""
    grpc = import_module("grpc")
    with grpc.insecure_channel(target) as channel:
        try:
            channel.unary_unary(method)(b"", timeout=PROBE_S, metadata=metadata)
        except grpc.RpcError as error:
            code, details = error.code(), str(error.details())
            is_of_ray = code is not grpc.StatusCode.UNIMPLEMENTED and not details.startswith(FROM_WEB_SERVER)
            return CallAnswer(is_of_ray, is_of_ray and code is grpc.StatusCode.UNAUTHENTICATED)
    return CallAnswer(is_of_ray=True, is_refusal=False)
