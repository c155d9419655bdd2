"""What is private to Ray 2.60 and used here.

``ray._private.worker.print_to_stdstream`` prints errors of the cluster to standard output, even with
``log_to_driver=False``, where a run may print JSON. If it is gone, these messages are printed.
``ray._private.services.canonicalize_bootstrap_address`` gives the address of the cluster on this machine, which must
be probed before ``ray.init`` connects to it. If it is gone, ``--address auto`` is refused.
``ray._raylet.AuthenticationTokenLoader`` reads the token of a cluster that requires one. If it is gone, such
clusters are refused.
"""

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

PRINT = "print_to_stdstream"


@contextmanager
def without_messages() -> Generator[None]:
    """Context in which Ray does not print the messages that its cluster sends."""
    module = import_module("ray._private.worker")
    original = getattr(module, PRINT, None)
    if original is None:
        yield
        return
    setattr(module, PRINT, _ignore)
    try:
        yield
    finally:
        setattr(module, PRINT, original)


def _ignore(*_: Any, **__: Any) -> None:
    """Do nothing."""


def address_of_this_machine() -> str | None:
    """The address of the Ray cluster that runs on this machine; None if there is none."""
    services = import_module("ray._private.services")
    find_address = getattr(services, "canonicalize_bootstrap_address", None)
    try:
        address = None if find_address is None else find_address("auto")
    except ConnectionError:
        return None
    return None if address is None else str(address)


def token_metadata() -> tuple[tuple[str, str], ...]:
    """The metadata of gRPC with which Ray sends the token of a cluster; empty if this process has none."""
    loader = getattr(import_module("ray._raylet"), "AuthenticationTokenLoader", None)
    headers = {} if loader is None else loader.instance().get_token_for_http_header(ignore_auth_mode=True)
    return tuple((name.lower(), value) for name, value in headers.items())
