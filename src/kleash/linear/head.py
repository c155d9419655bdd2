"""The last layer of a language model: from a hidden state to the logits."""

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
    """How a model turns a hidden state into logits ``z``, taken apart so that they need not be kept.

        y = scale (hidden W^T + bias)
        z = softcap tanh(y / softcap), or y without a softcap
        log p = log_softmax(z / temperature); the temperature belongs to the call

    ``weight=None`` means that the hidden states already are ``hidden W^T``: the slower way, for a
    model whose head cannot be taken apart. A weight that is sharded over ranks (a ``DTensor``) is
    gathered when it is used, unless a ``vocabulary_group`` says that its rows stay where they are.
    Two heads are equal only if they are the same object.

    Raises:
        ShapeError: if weight is not a matrix, bias not a vector, or the two differ in length.
        OptionError: if the scale is not finite or the softcap not positive.
        OptionError, CannotRunError: if the ``vocabulary_group`` is none, or this process is not in it.
    """

    weight: Float[Tensor, "vocab dim"] | None
    """A row for each token of the vocabulary."""
    bias: Float[Tensor, " vocab"] | None = None
    """Added to the product; ``-inf`` forbids a token."""
    scale: float = 1.0
    """What product and bias are multiplied by (Cohere's logit scale, Granite's inverse logits scaling)."""
    softcap: float | None = None
    """The size that no logit exceeds (Gemma 2)."""
    vocabulary_group: Any = None
    """The ranks that each hold some rows of weight and bias for the *same* tokens: their process group, or a
    device mesh of one dimension. Ranks hold runs of the vocabulary, in the order of the ranks, as many rows each as
    they like. Each gives the same hidden states (or, if weight is None, its own words' logits), gets the same
    results, and its own rows' gradients; hidden states get the sum over the ranks."""

    def __post_init__(self) -> None:
        """Refuse what is no head."""
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
        """How many tokens these hidden states give a logit to, of those that this rank has."""
        return hidden.shape[-1] if self.weight is None else self.weight.shape[0]


def is_finite_number(value: Any) -> bool:
    """Whether a value is one number, and finite."""
    try:
        return isfinite(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def gathered(first: Head, second: Head) -> tuple[Head, Head]:
    """Both heads' tensors as plain ones, whole or a rank's own rows; what the two share is gathered once."""
    alike = (first.vocabulary_group is None) == (second.vocabulary_group is None)
    weight, bias = (_plain(x, first.vocabulary_group) for x in (first.weight, first.bias))
    weight_2, bias_2 = (
        mine if alike and its is other else _plain(its, second.vocabulary_group)
        for mine, its, other in ((weight, second.weight, first.weight), (bias, second.bias, first.bias))
    )
    return _with(first, weight, bias), _with(second, weight_2, bias_2)


def _with(head: Head, weight: Tensor | None, bias: Tensor | None) -> Head:
    same = weight is head.weight and bias is head.bias
    return head if same else replace(head, weight=weight, bias=bias)


def _plain(tensor: Tensor | None, group: Any) -> Tensor | None:
    return _whole(tensor) if group is None else local_rows(tensor, group)


def _whole(tensor: Tensor | None) -> Tensor | None:
    """A DTensor's full tensor, whose gradient is the sum of those that the ranks' own tokens give it."""
    full_tensor: Any = getattr(tensor, "full_tensor", None)
    if full_tensor is None or tensor is None:
        return tensor
    if not getattr(tensor, "requires_grad", False):
        return full_tensor()
    from torch.distributed.tensor import Partial

    mesh: Any = getattr(tensor, "device_mesh", None)
    return full_tensor(grad_placements=[Partial()] * mesh.ndim)
