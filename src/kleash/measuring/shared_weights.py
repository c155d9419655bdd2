"""Ranks that have one pair of models between them: ``--device-map fsdp`` or ``tensor``.

Under FSDP each rank scores shards of its own, and the ranks take turns in calls of the models (``models.lockstep``).
Under tensor parallelism all ranks compute the same tokens: the first rank does the work of a single process, and sends
each call of the engine to the others, which make it, too, and drop the result.
"""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed

from kleash.engines import Engine, Shard, ShardResult
from kleash.engines.base import EngineTraits
from kleash.errors import OptionError, RankError
from kleash.jobs import MeasureJob
from kleash.launch_environment import launched_world_size
from kleash.models import TokenSequence
from kleash.models.network_loading import PARALLEL_MAPS
from kleash.models.pair_loading import resolve_device
from kleash.models.scoring import RoundingKind

dist: Any = torch.distributed
END = "end"


def is_mirrored(job: MeasureJob) -> bool:
    """Whether all ranks compute the same tokens."""
    return job.device_map == "tensor"


def is_first_of_weights(job: MeasureJob) -> bool:
    """Whether this process is the first, or only, one of those that have the weights of a job's models."""
    return job.device_map not in PARALLEL_MAPS or dist.get_rank() == 0


def agreed(job: MeasureJob, decide: Callable[[], bool]) -> bool:
    """What the first of the ranks decides that share weights and have tokens of their own; all of them call it."""
    if job.device_map != "fsdp":
        return decide()
    message = [decide() if dist.get_rank() == 0 else False]
    dist.broadcast_object_list(message, src=0)
    return message[0]


@contextmanager
def process_group(job: MeasureJob) -> Generator[None]:
    """Context with the process group over which the models of a job are spread.

    Raises:
        OptionError: if there is one process.
        RankError: if another rank cannot be reached, or is gone.
    """
    if launched_world_size() == 1:
        raise OptionError(
            f"--device-map {job.device_map} spreads a model over several processes, and this is one; start the command "
            "by torchrun --nproc-per-node N -m kleash measure …"
        )
    started_here = not dist.is_initialized()
    if started_here:
        on_cpu = resolve_device("auto", None).type == "cpu"
        try:
            dist.init_process_group("gloo" if on_cpu else None)
        except (RuntimeError, ValueError) as error:
            raise RankError(f"the other ranks cannot be reached: {error}; start all by torchrun") from error
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        reason = re.sub(r"^\[\S*\] ", "", str(error)).partition(". ")[0]  # without gloo's place in its source
        raise RankError(
            f"a rank that has a part of the models is gone ({reason}); start the run again with --resume"
        ) from error
    finally:
        if started_here:
            dist.destroy_process_group()


class MirroredEngine(Engine):
    """The engine of the first rank, whose calls the others make, too (``follow``)."""

    def __init__(self, engine: Engine) -> None:
        """``engine``: this rank's."""
        self.engine, self.pair = engine, engine.pair
        self.is_in_call = False
        """Whether all ranks are in a call, or have failed in one together."""

    @property
    def traits(self) -> EngineTraits:
        """The traits of this rank's engine."""
        return self.engine.traits

    def run(self, shard: Shard) -> ShardResult:
        """Generate and score a shard on all ranks."""
        return self._call("run", shard)

    def rounding_columns(
        self, kind: RoundingKind, sequences: Sequence[TokenSequence]
    ) -> Mapping[str, np.ndarray] | None:
        """Token columns of the reference compared with itself, computed by all ranks."""
        return self._call("rounding_columns", kind, sequences)

    def _call(self, name: str, *arguments: Any) -> Any:
        """The result of one of the engine's methods, which all ranks call.

        If it raises, it does so on all ranks, and ``is_in_call`` stays set, since none waits for another call.
        """
        _send(name, *arguments)
        self.is_in_call = True
        result = getattr(self.engine, name)(*arguments)
        self.is_in_call = False
        return result


@contextmanager
def mirrored(engine: Engine) -> Generator[Engine]:
    """Context with the engine of the first rank; the other ranks follow it until the context ends."""
    mirror = MirroredEngine(engine)
    try:
        yield mirror
    finally:
        if not mirror.is_in_call:
            _send(END)


def follow(engine: Engine) -> None:
    """Repeat the calls of the first rank's engine until its context has ended."""
    while True:
        message: list[Any] = [None, None]
        dist.broadcast_object_list(message, src=0)
        name, arguments = message
        if name == END:
            return
        getattr(engine, name)(*arguments)


def _send(name: str, *arguments: Any) -> None:
    dist.broadcast_object_list([name, arguments], src=0)
