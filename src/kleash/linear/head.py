"""The head of a language model, which maps a hidden state to logits, as its parts; and where its rows are."""

from dataclasses import dataclass
from math import isfinite
from typing import Any, cast

import torch
import torch.distributed
from jaxtyping import Float
from torch import Tensor

from kleash.arguments import validated
from kleash.errors import CannotRunError, OptionError
from kleash.registry import options_given, require_above

dist: Any = torch.distributed
MESH: Any = getattr(dist, "DeviceMesh", ())


@dataclass(frozen=True, eq=False)
class Head:
    """The head of a model as weight, bias, scale and softcap, which map a hidden state to logits ``z``.

        y = scale (hidden W^T + bias)
        z = softcap tanh(y / softcap), or y without a softcap
        log p = log_softmax(z / temperature); the temperature belongs to the call

    ``weight=None`` means that the hidden states already are ``hidden W^T``; this is slower, for a model whose head
    has no such parts. The rows of a weight may be on several ranks: with ``vocabulary_group`` the ranks have the same
    tokens; a ``DTensor`` without it is stored by ranks that have different tokens (FSDP2), and is not gathered as a
    whole if its one mesh dimension is ``Shard(0)``. Two heads are equal only if they are one object.

    Raises:
        ShapeError: if weight is not a matrix, bias not a vector, the two differ in length, or are not floating-point.
        OptionError: if the scale is not finite or the softcap not positive.
        CannotRunError: if this process is not in the ``vocabulary_group``.

    >>> head = kleash.Head(torch.randn(1000, 64), softcap=30.0)  # 1000 tokens, 64 dimensions
    >>> head.weight.shape
    torch.Size([1000, 64])
    """

    weight: Float[Tensor, "vocab dim"] | None
    """A row for each token of the vocabulary."""
    bias: Float[Tensor, " vocab"] | None = None
    """Added to the product; ``-inf`` forbids a token, but not with a softcap, which bounds it."""
    scale: float = 1.0
    """Factor of product and bias (Cohere's logit scale; the inverse of Granite's logits scaling)."""
    softcap: float | None = None
    """Bound on the absolute value of the logits, applied by tanh (Gemma 2)."""
    vocabulary_group: Any = None
    """The ranks that share the vocabulary of the *same* tokens (vocabulary parallelism): a process group, or a device
    mesh of one dimension. Each rank has consecutive rows of weight and bias, in the order of the ranks; their numbers
    may differ. Each rank passes the same hidden states (or, if weight is None, the logits of its rows), and gets the
    same results and the gradients of its rows; the gradient of the hidden states is the sum over the ranks."""

    def __post_init__(self) -> None:
        """Check shapes, numbers and the group."""
        check_parts(self.weight, self.bias)
        if not isfinite(self.scale):
            raise OptionError(f"a head's scale is a finite number, not {self.scale!r}")
        require_above(0.0, **options_given(softcap=self.softcap))
        if self.vocabulary_group is not None and self.vocabulary_group == dist.GroupMember.NON_GROUP_MEMBER:
            raise CannotRunError(
                "this process is not in the vocabulary_group; make the head where its rows are, with their ranks' "
                "group"
            )

    def vocabulary(self, hidden: Float[Tensor, "*tokens dim"]) -> int:
        """The number of logits that this rank computes for each hidden state."""
        return hidden.shape[-1] if self.weight is None else self.weight.shape[0]

    def logits_of_product(self, product: Float[Tensor, "*tokens vocab"]) -> Float[Tensor, "*tokens vocab"]:
        """The logits ``z`` from ``hidden W^T``, in the dtype and on the device of the product."""
        y = product if self.bias is None else product + self.bias.to(product.device, product.dtype)
        y = self.scale * y
        return y if self.softcap is None else self.softcap * torch.tanh(y / self.softcap)


@validated
def check_parts(weight: Float[Tensor, "rows dim"] | None, bias: Float[Tensor, " rows"] | None) -> None:
    """Raise ShapeError unless these are floating-point tensors, a matrix and a vector of as many rows."""


def process_group(group: Any) -> Any:
    """The process group of a group or device mesh; None for None."""
    return group.get_group() if isinstance(group, MESH) else group


def ranks_of(group: Any) -> list[int]:
    """The global ranks of the group."""
    return list(dist.get_process_group_ranks(group))


def storage_group(tensor: Tensor | None) -> Any:
    """The group over which a DTensor's rows are spread; None for other tensors and for other placements."""
    placements: Any = getattr(tensor, "placements", None)
    if placements is None or len(placements) != 1 or not placements[0].is_shard(0):
        return None
    mesh = cast("Any", tensor).device_mesh
    return mesh.get_group() if mesh.size() > 1 else None


def local_rows(tensor: Tensor, group: Any) -> Tensor:
    """The rows of a DTensor on this rank; any other tensor as it is.

    Raises:
        OptionError: if the DTensor is not sharded by rows over exactly this group.
    """
    placements: Any = getattr(tensor, "placements", None)
    if placements is None:
        return tensor
    sharded = cast("Any", tensor)
    mesh = sharded.device_mesh
    if len(placements) != 1 or not placements[0].is_shard(0) or ranks_of(mesh.get_group()) != ranks_of(group):
        raise OptionError(
            f"a head with placements {tuple(placements)} on ranks {mesh.mesh.flatten().tolist()} is not split by "
            f"rows over the vocabulary_group, ranks {ranks_of(group)}; leave the group out to have it gathered"
        )
    return sharded.to_local()


def full_tensor(tensor: Tensor) -> Tensor:
    """A DTensor's full tensor, whose gradient is the sum over the ranks; any other tensor as it is."""
    if not hasattr(type(tensor), "full_tensor"):  # of the type: torch.compile does not see it else
        return tensor
    sharded: Any = tensor
    if not sharded.requires_grad:
        return sharded.full_tensor()
    from torch.distributed.tensor import Partial

    return sharded.full_tensor(grad_placements=[Partial()] * sharded.device_mesh.ndim)
