"""Heads whose rows are spread over the ranks of a group: whose rows they are, and whether all ask for the same."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed
from torch import Tensor

from kleash.errors import CannotRunError, KleashError, OptionError, VocabularyMismatchError
from kleash.linear.impl.vocab_shards import ShardedVocab

dist: Any = torch.distributed
MESH: Any = getattr(dist, "DeviceMesh", ())
FACTS = "refusals", "rows of p", "rows of q", "tokens", "bytes a logit", "tensors that require a gradient"
"""What each rank tells the others before anything is computed, as whole numbers."""
WHOLE = -1
"""The rows of a head that is not split."""


def check_group(group: Any) -> None:
    """Refuse what is no group of ranks.

    Raises:
        OptionError: if it is something else, or a device mesh of several dimensions.
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
    """The process group that was given, or that a device mesh is of; None for none."""
    return group.get_group() if isinstance(group, MESH) else group


def name_of(group: Any) -> str:
    """The name under which torch.distributed knows a group; empty for none."""
    return "" if group is None else process_group(group).group_name


def named_group(name: str) -> Any:
    """The group of that name."""
    return dist.distributed_c10d._resolve_process_group(name) if name else None


def ranks_of(group: Any) -> list[int]:
    """The ranks in the group.

    Raises:
        CannotRunError: if torch.distributed does not know it, or not any more.
    """
    try:
        return list(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        raise CannotRunError(
            "torch.distributed does not know the vocabulary_group (any more); make the head after "
            "init_process_group, and use it before destroy_process_group"
        ) from None


def common_group(first: Any, second: Any) -> Any:
    """The process group that p's head or q's is split over, or both; None if neither is.

    Raises:
        OptionError: if the two are split over different ranks.
    """
    one, other = process_group(first), process_group(second)
    if one is None or other is None or one is other:
        return other if one is None else one
    ours, theirs = ranks_of(one), ranks_of(other)
    if ours != theirs:
        raise OptionError(
            f"p's head is split over ranks {ours} and q's over {theirs}; split both over the same ranks, or leave "
            "a frozen one whole"
        )
    return one


def local_rows(tensor: Tensor | None, group: Any) -> Tensor | None:
    """The rows of a DTensor that this rank has; any other tensor as it is.

    Raises:
        OptionError: if its first dimension is not what is spread over the group, or not only that.
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


def exchange_specs(
    group: Any, device: torch.device, facts: Sequence[int], problem: KleashError | None
) -> ShardedVocab:
    """Where this rank stands among the others, once all have told each other what they were given.

    A rank that refuses what it was given says so, lest the others wait for it.

    Args:
        group: the ranks.
        device: where they exchange numbers.
        facts: the numbers of ``FACTS`` but the first.
        problem: what is wrong with what this rank was given.

    Raises:
        KleashError: the problem, if there is one.
        CannotRunError: if another rank has one, or is asked for something else.
        VocabularyMismatchError: if a rank has no rows, or not as many of both heads.
    """
    ranks = ranks_of(group)
    own = torch.tensor([int(problem is not None), *facts], device=device)
    told = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(told, own, group=group)
    table = cast("list[list[int]]", cast("Any", torch.stack(told).T).tolist())
    if problem is not None:
        raise problem
    refusing = [rank for rank, refused in zip(ranks, table[0], strict=True) if refused]
    if refusing:
        raise CannotRunError(
            f"rank {refusing[0]} of the vocabulary_group refuses what it was given, and its own message says why"
        )
    for what, numbers in zip(FACTS[3:], table[3:], strict=True):
        if len(set(numbers)) > 1:
            raise CannotRunError(
                f"the ranks of the vocabulary_group disagree on the {what}: {numbers}; give all of them the same"
            )
    return ShardedVocab(group, counted(table[1], table[2]), dist.get_rank(group), device)


def counted(rows_p: list[int], rows_q: list[int]) -> list[int]:
    """How many words each rank has, if p and q are split alike.

    Raises:
        VocabularyMismatchError: if they are not, or a rank has none.
        OptionError: if a head is split on some ranks only.
    """
    split = [rows for rows in (rows_p, rows_q) if set(rows) != {WHOLE}]
    if any(WHOLE in rows for rows in split):
        raise OptionError(
            f"the ranks of the vocabulary_group hold {rows_p} rows of p's head and {rows_q} of q's, where {WHOLE} is "
            "a head without the group; give it to a head on all of them or on none"
        )
    if len(split) == 2 and rows_p != rows_q:
        raise VocabularyMismatchError(
            f"the ranks of the vocabulary_group hold {rows_p} rows of p's head and {rows_q} of q's; split both "
            "after the same tokens"
        )
    if 0 in split[0]:
        raise VocabularyMismatchError(
            f"the ranks of the vocabulary_group hold {split[0]} rows; leave one that has none out of the group"
        )
    return split[0]
