"""Connecting to a Ray cluster, and what a worker reserves on it."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from kleash.engines.ray.cluster_address import is_same_address, reachable_address
from kleash.engines.ray.compat import without_messages
from kleash.errors import ClusterError, OptionError
from kleash.extras import import_extra
from kleash.jobs.option_groups import parse_resources

MAX_WORKERS_PER_CORE = 8
"""Workers that a cluster which is started here has for each core of the machine."""


@dataclass(frozen=True, kw_only=True)
class WorkerResources:
    """What one worker reserves on its node."""

    cpu: float = 1.0
    gpu: float = 0.0
    memory: float = 0.0
    """In bytes."""
    custom: Mapping[str, float] = field(default_factory=dict)
    """Resources that the cluster's owner named."""

    @property
    def amounts(self) -> dict[str, float]:
        """The amounts above 0, by Ray's names of resources."""
        amounts = {"CPU": self.cpu, "GPU": self.gpu, "memory": self.memory, **self.custom}
        return {name: amount for name, amount in amounts.items() if amount > 0}

    def actor_options(self) -> dict[str, Any]:
        """The options of Ray's actors that reserve this much."""
        options: dict[str, Any] = {"num_cpus": self.cpu, "num_gpus": self.gpu, "resources": dict(self.custom)}
        return options | ({"memory": int(self.memory)} if self.memory else {})

    def places_on(self, available: Mapping[str, float]) -> int:
        """The number of workers that fit on a node, or on a cluster, with these resources."""
        counts = [int(available.get(name, 0.0) / amount) for name, amount in self.amounts.items()]
        return min(counts, default=1)

    def __str__(self) -> str:
        """As ``--resources-per-worker`` takes it."""
        return ",".join(f"{option_name(name)}={amount:g}" for name, amount in self.amounts.items()) or "cpu=0"


def option_name(resource: str) -> str:
    """A resource as ``--resources-per-worker`` calls it: Ray writes CPU and GPU in capitals."""
    return resource.lower() if resource in ("CPU", "GPU") else resource


def worker_resources(option: str | None, *, has_gpus: bool) -> WorkerResources:
    """What ``--resources-per-worker`` reserves; by default a CPU, and a GPU if there are any.

    Raises:
        OptionError: if the option is malformed.
    """
    amounts = {} if option is None else parse_resources(option)
    return WorkerResources(
        cpu=amounts.pop("cpu", 1.0),
        gpu=amounts.pop("gpu", 1.0 if option is None and has_gpus else 0.0),
        memory=amounts.pop("memory", 0.0),
        custom=amounts,
    )


@contextmanager
def connected_cluster(
    address: str | None, *, workers: int | None = None, resources: str | None = None
) -> Generator[ModuleType]:
    """Context in which this process is connected to a Ray cluster; yields the module ``ray``.

    A cluster that this process is connected to already is used, and stays connected. Without an address, and without
    the environment variable RAY_ADDRESS, a cluster of this machine alone is started, which ends with the context.

    Args:
        address: host:port of the cluster's head, ray://host:port, or "auto" for the cluster on this machine.
        workers: for a cluster that is started here: the number of workers that it must have room for.
        resources: the option ``--resources-per-worker``, likewise.

    Raises:
        MissingExtraError: if ray is not installed.
        OptionError: if the address is malformed, or not that of the cluster to which this process is connected, or
            this machine is to run too many workers.
        ClusterError: if nothing answers, or what answers is no Ray cluster of this version.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = import_extra("ray", "ray")
    if ray.is_initialized():
        _require_connected_to(ray, address)
        with without_messages():
            yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address in (None, "local"):
        settings: dict[str, Any] = {"address": "local", "include_dashboard": False}
        cpus = _local_cpus(workers, resources)
        settings |= {} if cpus is None else {"num_cpus": cpus}
    else:
        settings = {"address": address}
        address = reachable_address(str(address))
    with without_messages():
        try:
            _connect(ray, str(address), settings)
            yield ray
        finally:
            with suppress(
                Exception
            ):  # a lost cluster raises errors of many types, which would hide the first one
                ray.shutdown()


def _connect(ray: ModuleType, address: str, settings: dict[str, Any]) -> None:
    """Call ``ray.init`` without its log.

    Raises:
        ClusterError: if it fails.
    """
    try:
        with _keeping_handler(signal.SIGTERM):
            ray.init(**settings, log_to_driver=False, logging_level=logging.CRITICAL)
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if settings["address"] == "local":
            raise ClusterError(f"no Ray cluster can be started here: {reason}") from error
        raise ClusterError(
            f"the Ray cluster at {address} cannot be used: {reason}; this machine must be one of its nodes, or the "
            "address that of its client server, ray://host:10001"
        ) from error


@contextmanager
def _keeping_handler(number: int) -> Generator[None]:
    """Context after which a signal has the handler that it had before, if that was set from Python."""
    handler = signal.getsignal(number)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    finally:
        signal.signal(number, handler)


def _require_connected_to(ray: ModuleType, address: str | None) -> None:
    """Raise OptionError if an address is given and this process is connected to another cluster."""
    if address in (None, "auto"):
        return
    connected = str(ray.get_runtime_context().gcs_address)
    if str(address).startswith("ray://") or is_same_address(str(address), connected):
        return
    raise OptionError(
        f"--address is {address}, and this process is connected to the Ray cluster at {connected}; leave the address "
        "out"
    )


def _local_cpus(workers: int | None, resources: str | None) -> int | None:
    """The CPUs that a cluster of this machine must claim to have for its workers; None for those it has.

    Raises:
        OptionError: if there are more than ``MAX_WORKERS_PER_CORE`` workers for each core.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = MAX_WORKERS_PER_CORE * cores
    if workers is not None and workers > limit:
        raise OptionError(
            f"--workers is {workers}, each with both models, and this machine has {cores} cores; give at most {limit}, "
            "or the --address of a cluster"
        )
    needed = (workers or 0) * worker_resources(resources, has_gpus=False).cpu
    return max(cores, -int(-needed // 1))


def _subject(nodes: Sequence[Mapping[str, float]]) -> str:
    """The subject of a sentence about what the nodes of a cluster have."""
    return "its node has" if len(nodes) == 1 else f"its {len(nodes)} nodes have"


def requested_workers(
    ray: ModuleType, workers: int | None, option: str | None, note: Callable[[str], None]
) -> tuple[int, int, WorkerResources]:
    """The number of workers of a run, how many have room, and what each reserves, from options and nodes.

    Args:
        ray: the connected module.
        workers: ``--workers``; None for as many as the cluster has room for.
        option: ``--resources-per-worker``.
        note: called with a sentence if there is room for fewer.

    Raises:
        ClusterError: if no node has room for a worker, with what the nodes have.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    resources = worker_resources(option, has_gpus=any(node.get("GPU", 0) for node in nodes))
    places = sum(resources.places_on(node) for node in nodes)
    if not places:
        offers = "; ".join(
            dict.fromkeys(
                ", ".join(f"{option_name(name)}={node.get(name, 0):g}" for name in resources.amounts)
                for node in nodes
            )
        )
        raise ClusterError(
            f"no node of the Ray cluster has {resources} for a worker ({_subject(nodes)} {offers}); change "
            "--resources-per-worker, or add a node"
        )
    if workers is not None and workers > places:
        note(
            f"the Ray cluster has room for {places} of {workers} workers; the others join when there is more"
        )
    count = workers or places
    return count, min(count, places), resources
