"""The Ray cluster of a job: connecting to it, and the actors that it has room for."""

import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from types import ModuleType
from typing import Any

from kleash.errors import ClusterError, summarise_error
from kleash.extras import import_extra
from kleash.jobs.option_groups import WorkerOptions, parse_resources

PROBE_S = 4.0
"""Seconds within which the address of a cluster must accept a connection."""
CLIENT_PORT = 10001
"""The port of ``ray://host``."""


def kept_cluster(job: WorkerOptions) -> Any:
    """Context in which this process stays connected to the Ray cluster of a job, if it has one, over several runs."""
    return connected_cluster(job) if job.engine == "ray" else nullcontext()


@contextmanager
def connected_cluster(job: WorkerOptions) -> Generator[ModuleType]:
    """Context in which this process is connected to the Ray cluster of a job; yields the module ``ray``.

    A cluster that this process is connected to already is used, and stays connected. Without an address, and without
    the environment variable RAY_ADDRESS, a cluster of this machine alone is started, which ends with the context.

    Raises:
        MissingExtraError: if ray is not installed.
        ClusterError: if the cluster cannot be reached or started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = import_extra("ray", "ray")
    if ray.is_initialized():
        yield ray
        return
    address = job.address or os.environ.get("RAY_ADDRESS") or "local"
    settings: dict[str, Any] = {}
    if address == "local":
        cpus = (job.workers or 0) * reserved(job, has_gpus=False).get("CPU", 0.0)
        settings = {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, math.ceil(cpus))}
    with redirect_stdout(sys.stderr):  # Ray prints what its cluster reports, and a run may print JSON
        try:
            _require_answer(address)
            with _keeping_handler(signal.SIGTERM):
                ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, **settings)
        except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
            raise ClusterError(
                f"the Ray cluster {address} cannot be used: {summarise_error(error)}"
            ) from error
        try:
            yield ray
        finally:
            with suppress(Exception):  # of a lost cluster, which would hide the first error
                ray.shutdown()


def _require_answer(address: str) -> None:
    """See that something answers at ``host:port`` or ``ray://host:port``: Ray itself ends the process after minutes.

    Raises:
        OSError: if nothing does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit() or address.startswith("ray://"):
        place = (host, int(port)) if port.isdigit() else (port, CLIENT_PORT)
        socket.create_connection(place, timeout=PROBE_S).close()


@contextmanager
def _keeping_handler(number: int) -> Generator[None]:
    """Context after which a signal has the handler that it had before, if that was set from Python."""
    handler = signal.getsignal(number)
    yield
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)


def reserved(job: WorkerOptions, *, has_gpus: bool) -> dict[str, float]:
    """What a worker reserves on its node, by Ray's names: as asked for, or else a CPU, and a GPU if there are any."""
    amounts = parse_resources(job.resources_per_worker) if job.resources_per_worker is not None else {}
    cpu = amounts.pop("cpu", 1.0)
    gpu = amounts.pop("gpu", float(has_gpus and job.resources_per_worker is None))
    return {name: x for name, x in {"CPU": cpu, "GPU": gpu, **amounts}.items() if x > 0}


def start_actors(
    ray: ModuleType, job: WorkerOptions, actor: Any, arguments: tuple[Any, ...], note: Callable[[str], None]
) -> list[Any]:
    """Ask the cluster for the workers of a job; those without room for now join when there is some.

    Args:
        ray: the connected module.
        job: the options of the workers.
        actor: their class, with Ray's options of restarts.
        arguments: of the class.
        note: called with a sentence if there is room for fewer than are asked for.

    Raises:
        ClusterError: if no node has room for a worker.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    amounts = reserved(job, has_gpus=any(node.get("GPU", 0) for node in nodes))
    places = sum(_places_on(node, amounts) for node in nodes)
    if not places:
        requested_amounts = ",".join(f"{name}={amount:g}" for name, amount in amounts.items())
        raise ClusterError(
            f"no node of the Ray cluster has {requested_amounts} for a worker; change --resources-per-worker, or add "
            "a node"
        )
    count = job.workers or places
    if count > places:
        note(f"the Ray cluster has room for {places} of {count} workers; the others join when there is more")
    custom_resources = {name: x for name, x in amounts.items() if name not in ("CPU", "GPU", "memory")}
    options: dict[str, Any] = {
        "num_cpus": amounts.get("CPU", 0),
        "num_gpus": amounts.get("GPU", 0),
        "resources": custom_resources,
    }
    if "memory" in amounts:
        options["memory"] = int(amounts["memory"])
    return [actor.options(**options).remote(*arguments) for _ in range(count)]


def _places_on(node: Mapping[str, float], amounts: Mapping[str, float]) -> int:
    """The number of workers that fit on a node with these resources."""
    return min((int(node.get(name, 0.0) / amount) for name, amount in amounts.items()), default=1)
