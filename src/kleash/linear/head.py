"""The head of a language model, which maps a hidden state to logits, as its parts."""

from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.errors import OptionError, ShapeError
from kleash.linear.sharding import check_group, local_rows


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
        ShapeError: if weight is not a matrix, bias not a vector, or the two differ in length.
        OptionError: if the scale is not finite or the softcap not positive.
        OptionError, CannotRunError: if ``vocabulary_group`` is not a process group, or this process is not in it.
    """

    weight: Float[Tensor, "vocab dim"] | None
    """A row for each token of the vocabulary."""
    bias: Float[Tensor, " vocab"] | None = None
    """Added to the product; ``-inf`` forbids a token."""
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
        for what, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is None or hasattr(tensor, "full_tensor"):
                continue
            if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ShapeError(
                    f"a head's {what} is a torch.Tensor; this one is a {type(tensor).__qualname__}"
                )
            if tensor.layout != torch.strided:
                raise ShapeError(f"a head's {what} is of layout {tensor.layout}; give a dense one")
        if self.weight is not None and self.weight.dim() != 2:
            raise ShapeError(f"a head's weight is [vocab, dim]; this one is {tuple(self.weight.shape)}")
        if self.bias is not None and self.bias.dim() != 1:
            raise ShapeError(f"a head's bias is [vocab]; this one is {tuple(self.bias.shape)}")
        if self.weight is not None and self.bias is not None and len(self.weight) != len(self.bias):
            raise ShapeError(f"the head's weight has {len(self.weight)} rows and its bias {len(self.bias)}")
        if not is_finite_number(self.scale):
            raise OptionError(f"a head's scale is a finite number, not {self.scale!r}")
        if self.softcap is not None and not (is_finite_number(self.softcap) and self.softcap > 0):
            raise OptionError(f"a softcap is a positive number, not {self.softcap!r}; leave it out for none")
        if self.vocabulary_group is not None and not torch.compiler.is_compiling():
            check_group(self.vocabulary_group)

    def vocabulary(self, hidden: Float[Tensor, "*tokens dim"]) -> int:
        """The number of logits that this rank computes for each hidden state."""
        return hidden.shape[-1] if self.weight is None else self.weight.shape[0]

    def logits_of_product(self, product: Float[Tensor, "*tokens vocab"]) -> Float[Tensor, "*tokens vocab"]:
        """The logits ``z`` from ``hidden W^T``, in the dtype and on the device of the product."""
        y = product if self.bias is None else product + self.bias.to(product.device, product.dtype)
        y = self.scale * y
        return y if self.softcap is None else self.softcap * torch.tanh(y / self.softcap)


def is_finite_number(value: Any) -> bool:
    """Whether a value is a single finite number."""
    try:
        return isfinite(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def gathered(first: Head, second: Head) -> tuple[Head, Head]:
    """Both heads with DTensors gathered, or with the local rows of sharded ones; a shared tensor stays shared."""
    alike = (first.vocabulary_group is None) == (second.vocabulary_group is None)
    weight, bias = (_plain(x, first.vocabulary_group) for x in (first.weight, first.bias))
    weight_2, bias_2 = (
        plain if alike and tensor is original else _plain(tensor, second.vocabulary_group)
        for plain, original, tensor in (
            (weight, first.weight, second.weight),
            (bias, first.bias, second.bias),
        )
    )
    return _with_tensors(first, weight, bias), _with_tensors(second, weight_2, bias_2)


def _with_tensors(head: Head, weight: Tensor | None, bias: Tensor | None) -> Head:
    same = weight is head.weight and bias is head.bias
    return head if same else replace(head, weight=weight, bias=bias)


def _plain(tensor: Tensor | None, group: Any) -> Tensor | None:
    return _full(tensor) if group is None else local_rows(tensor, group)


def _full(tensor: Tensor | None) -> Tensor | None:
    """A DTensor's full tensor, whose gradient is the sum over the ranks; any other tensor as it is."""
    if tensor is None or not hasattr(
        type(tensor), "full_tensor"
    ):  # of the type: torch.compile does not see it else
        return tensor
    sharded: Any = tensor
    if not sharded.requires_grad:
        return sharded.full_tensor()
    from torch.distributed.tensor import Partial

    return sharded.full_tensor(grad_placements=[Partial()] * sharded.device_mesh.ndim)
