"""Process groups of sharded heads: checks of the group, the rows of each rank, and the agreement between ranks."""

import struct
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed
from torch import Tensor

from kleash.errors import CannotRunError, KleashError, OptionError, ShapeError, VocabularyMismatchError
from kleash.linear.head_storage import STORING_RANKS, HeadStorage, all_gather_numbers, raise_together
from kleash.linear.vocab_shards import ShardedVocab

dist: Any = torch.distributed
MESH: Any = getattr(dist, "DeviceMesh", ())
SPECS = "tokens", "bytes a logit", "tensors that require a gradient"
"""What ranks that share a vocabulary agree on before a call."""
TEMPERATURE = "temperature"
STORAGE_SPECS = "bytes a number of the hidden states", *SPECS[1:], TEMPERATURE
"""The same for ranks that store a head between them and have different tokens."""
UNSHARDED = -1
"""The number of rows that stands for a head that is not sharded."""


def check_group(group: Any) -> None:
    """Check that a value is a process group or a device mesh of one dimension.

    Raises:
        OptionError: if it is not.
        CannotRunError: if this process is not in it.
    """
    if isinstance(group, MESH):
        if group.ndim != 1:
            raise OptionError(
                f"a vocabulary_group is a device mesh of one dimension and this one has {group.ndim}; take the "
                "dimension that the rows are spread over, mesh['tp'] say"
            )
        return
    if not dist.is_available():
        raise CannotRunError("a vocabulary_group needs torch.distributed, which this torch was built without")
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise CannotRunError(
            "this process is not in the vocabulary_group; make the head where its rows are, with their ranks' group"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise OptionError(
            "a vocabulary_group is a process group of torch.distributed or a device mesh of one dimension, not "
            f"{type(group).__name__}"
        )


def process_group(group: Any) -> Any:
    """The process group of a group or device mesh; None for None."""
    return group.get_group() if isinstance(group, MESH) else group


def ranks_of(group: Any) -> list[int]:
    """The global ranks of the group.

    Raises:
        CannotRunError: if torch.distributed does not know the group (any more).
    """
    try:
        return list(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        raise CannotRunError(
            "torch.distributed does not know the group that the head is split over (any more); make the head after "
            "init_process_group, and use it before destroy_process_group"
        ) from None


def common_group(first: Any, second: Any) -> Any:
    """The process group of two heads, either of which may have none; None if neither has one.

    Raises:
        OptionError: if the two are split over different ranks.
    """
    group_p, group_q = process_group(first), process_group(second)
    if group_p is None or group_q is None or group_p is group_q:
        return group_q if group_p is None else group_p
    ranks_p, ranks_q = ranks_of(group_p), ranks_of(group_q)
    if ranks_p != ranks_q:
        raise OptionError(
            f"p's head is split over ranks {ranks_p} and q's over {ranks_q}; split both over the same ranks, or leave "
            "a frozen one whole"
        )
    return group_p


def local_rows(tensor: Tensor | None, group: Any) -> Tensor | None:
    """The rows of a DTensor on this rank; any other tensor as it is.

    Raises:
        OptionError: if the DTensor is not sharded by rows over exactly this group.
    """
    placements: Any = getattr(tensor, "placements", None)
    if tensor is None or placements is None:
        return tensor
    sharded = cast("Any", tensor)
    mesh, group = sharded.device_mesh, process_group(group)
    if len(placements) != 1 or not placements[0].is_shard(0) or ranks_of(mesh.get_group()) != ranks_of(group):
        raise OptionError(
            f"a head with placements {tuple(placements)} on ranks {mesh.mesh.flatten().tolist()} is not split by "
            f"rows over the vocabulary_group, ranks {ranks_of(group)}; leave the group out to have it gathered"
        )
    return sharded.to_local()


def storage_group(tensor: Tensor | None) -> Any:
    """The group over which a DTensor's rows are spread; None for other tensors and for other placements."""
    placements: Any = getattr(tensor, "placements", None)
    if placements is None or len(placements) != 1 or not placements[0].is_shard(0):
        return None
    mesh = cast("Any", tensor).device_mesh
    return mesh.get_group() if mesh.size() > 1 else None


def temperature_bits(temperature: float | Tensor) -> int:
    """A temperature as an integer that ranks can exchange and compare; -1 for one of each token."""
    if isinstance(temperature, Tensor):
        return UNSHARDED
    return int.from_bytes(struct.pack("<d", temperature), "little", signed=True)


def temperature_of_bits(bits: int) -> float | str:
    """The temperature of an exchanged integer."""
    if bits == UNSHARDED:
        return "one for each token"
    return struct.unpack("<d", bits.to_bytes(8, "little", signed=True))[0]


def agreed_specs(
    group: Any,
    device: torch.device,
    names: Sequence[str],
    specs: Sequence[int],
    error: KleashError | None,
    members: str,
) -> list[list[int]]:
    """The numbers of all ranks, once it is known that no rank has an error and that all agree after the rows.

    A rank with an error takes part too, so that the others do not wait for it.

    Args:
        group: the ranks.
        device: the device of the exchange.
        names: what the numbers are, after "errors" and the rows of both heads.
        specs: this rank's rows of p and of q, then a number for each name.
        error: the error in this rank's arguments.
        members: what errors call these ranks, such as "the ranks of the vocabulary_group".

    Returns:
        For the rows of p and of q, their numbers on all ranks.

    Raises:
        KleashError: ``error``, if there is one.
        CannotRunError: if another rank has an error, or other arguments.
    """
    ranks = ranks_of(group)
    errors, *table = all_gather_numbers(group, device, [int(error is not None), *specs])
    raise_together(errors, error, ranks, members)
    for name, numbers in zip(names, table[2:], strict=True):
        if len(set(numbers)) > 1:
            shown = [temperature_of_bits(bits) for bits in numbers] if name == TEMPERATURE else numbers
            raise CannotRunError(f"{members} disagree on the {name}: {shown}; give all of them the same")
    return table[:2]


def exchange_storage(
    group: Any, device: torch.device, specs: Sequence[int], error: KleashError | None
) -> HeadStorage:
    """The ranks that store the rows of a head, once the arguments of all ranks have been found to agree.

    Arguments as of ``agreed_specs``, with ``STORAGE_SPECS``.

    Raises:
        KleashError: ``error``, if there is one.
        CannotRunError: if another rank has an error, or other arguments.
        VocabularyMismatchError: if the ranks store different numbers of rows of the two heads.
        ShapeError: if no rank stores any row.
    """
    rows = agreed_specs(group, device, STORAGE_SPECS, specs, error, STORING_RANKS)
    stored = [counts for counts in rows if UNSHARDED not in counts]
    if len(stored) == 2 and stored[0] != stored[1]:
        raise VocabularyMismatchError(
            f"the ranks store {stored[0]} rows of p's head and {stored[1]} of q's; shard both alike, over one "
            "vocabulary"
        )
    if not any(stored[0]):
        raise ShapeError("the ranks store no row of the head, which covers no token at all")
    return HeadStorage(group, stored[0], device)


def exchange_specs(
    group: Any, device: torch.device, specs: Sequence[int], error: KleashError | None
) -> ShardedVocab:
    """The sharded vocabulary, once the arguments of all ranks have been found to agree.

    Arguments as of ``agreed_specs``, with ``SPECS``.

    Raises:
        KleashError: ``error``, if there is one.
        CannotRunError: if another rank has an error, or other arguments.
        VocabularyMismatchError: if a rank has no rows, or different numbers of rows of the two heads.
    """
    rows_p, rows_q = agreed_specs(group, device, SPECS, specs, error, "the ranks of the vocabulary_group")
    return ShardedVocab(group, rows_by_rank(rows_p, rows_q), dist.get_rank(group), device)


def rows_by_rank(rows_p: list[int], rows_q: list[int]) -> list[int]:
    """The number of vocabulary rows of each rank.

    Raises:
        VocabularyMismatchError: if the two heads are sharded differently, or a rank has no rows.
        OptionError: if a head is sharded on some ranks only.
    """
    sharded = [rows for rows in (rows_p, rows_q) if set(rows) != {UNSHARDED}]
    if any(UNSHARDED in rows for rows in sharded):
        raise OptionError(
            f"the ranks of the vocabulary_group hold {rows_p} rows of p's head and {rows_q} of q's, where "
            f"{UNSHARDED} is a head without the group; give it to a head on all of them or on none"
        )
    if len(sharded) == 2 and rows_p != rows_q:
        raise VocabularyMismatchError(
            f"the ranks of the vocabulary_group hold {rows_p} rows of p's head and {rows_q} of q's; split both "
            "after the same tokens"
        )
    if 0 in sharded[0]:
        raise VocabularyMismatchError(
            f"the ranks of the vocabulary_group hold {sharded[0]} rows; leave one that has none out of the group"
        )
    return sharded[0]
