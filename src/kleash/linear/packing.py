"""Packs the arguments of a public function into the flat list that a custom operation takes, and unpacks it.

A custom operation of torch takes tensors, numbers and names only. Only this module and
``base.per_tensor`` depend on the order.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from kleash.autodiff import refuse_transforms, refuse_transforms_compiled
from kleash.divergences import DIVERGENCES, Divergence
from kleash.errors import CannotRunError
from kleash.linear.checks import ALTERNATIVE, checked_pair, common_dtype
from kleash.linear.head import Head, gathered
from kleash.linear.impl.base import KL, Backend, Gradients, Request, gradient_dtype
from kleash.linear.impl.choice import prepare
from kleash.linear.options import LinearOptions
from kleash.linear.sharding import name_of, named_group

Packed: TypeAlias = tuple[Any, ...]
"""The arguments that all operations have in common, in the order of ``SCHEMA``."""
SCHEMA = (
    "Tensor hidden_p, Tensor? weight_p, Tensor? bias_p, Tensor hidden_q, Tensor? weight_q, Tensor? bias_q, "
    "Tensor? temperatures, float[] numbers, bool[] shared, str impl, int buffer_bytes, str compile, str[] groups"
)
COUNT = 13
"""The number of arguments in ``SCHEMA``."""
TENSORS = 6
"""The first arguments: the tensors that may require a gradient."""
SHARED = 8
"""The index of ``shared``: whether hidden states, weight and bias are the same tensor for both models."""
DEFAULT = LinearOptions()
UNSET_BUFFER_BYTES = 0
"""Stands for ``buffer_bytes=None``: the memory is chosen when the operation runs, not when it is traced."""


def pack(
    p: tuple[Tensor, Head], q: tuple[Tensor, Head], temperature: float | Tensor, options: LinearOptions | None
) -> Packed:
    """The arguments of a public function as tensors, numbers and names.

    Raises:
        CannotRunError: inside a transform of ``torch.func``, which would take the operation's result for a constant.
    """
    refuse_transforms_compiled("a compiled linear function", ALTERNATIVE)
    options = DEFAULT if options is None else options
    (hidden_p, head_p), (hidden_q, head_q) = p, q
    shared = [hidden_p is hidden_q, head_p.weight is head_q.weight, head_p.bias is head_q.bias]
    head_p, head_q = gathered(head_p, head_q)
    number = 1.0 if isinstance(temperature, Tensor) else float(temperature)
    return (
        *(hidden_p, head_p.weight, head_p.bias, hidden_q, head_q.weight, head_q.bias),
        temperature if isinstance(temperature, Tensor) else None,
        [number, head_p.scale, head_p.softcap or 0.0, head_q.scale, head_q.softcap or 0.0],
        shared,
        *(options.impl, options.buffer_bytes or UNSET_BUFFER_BYTES, str(options.compile)),
        [name_of(head_p.vocabulary_group), name_of(head_q.vocabulary_group)],
    )


def unpack(packed: Packed, divergence: Divergence = KL) -> tuple[Backend, Request]:
    """The backend and the call that packed arguments stand for."""
    hp, wp, bp, hq, wq, bq, temperatures, numbers, shared, impl, buffer_bytes, compile, groups = packed
    number, scale_p, softcap_p, scale_q, softcap_q = numbers
    group_p, group_q = (named_group(name) for name in groups)
    head_p = Head(wp, bp, scale=scale_p, softcap=softcap_p or None, vocabulary_group=group_p)
    wq, bq = wp if shared[1] else wq, bp if shared[2] else bq
    head_q = Head(wq, bq, scale=scale_q, softcap=softcap_q or None, vocabulary_group=group_q)
    options = LinearOptions(impl=impl, buffer_bytes=buffer_bytes or None, compile=compile)
    temperature = number if temperatures is None else temperatures
    pair = checked_pair((hp, head_p), (hp if shared[0] else hq, head_q), temperature)
    return prepare(pair, options, divergence)


@contextmanager
def without_autograd_dispatch(packed: Packed) -> Generator[None, None, None]:
    """Lets a backend use autograd inside a custom operation, where torch disables it; gradients stay off by default.

    Raises:
        CannotRunError: if a tensor carries a forward-mode tangent, which the operation would drop.
    """
    device = packed[0].device.type
    core = cast("Any", torch)._C
    guard = core._SetExcludeDispatchKeyGuard(core.DispatchKey.AutogradFunctionality, False)
    with guard, torch.no_grad(), torch.autocast(device, enabled=False):
        tensors = (x for x in packed if isinstance(x, Tensor))
        refuse_transforms("a compiled linear function", ALTERNATIVE, *tensors)
        yield


def divergence_name(divergence: str | Divergence) -> str:
    """The name of a divergence.

    Raises:
        CannotRunError: if it has none, since a record cannot be an argument of a compiled graph.
    """
    if isinstance(divergence, str):
        return divergence
    for name, record in DIVERGENCES.items():
        if record is divergence:
            return name
    raise CannotRunError(
        "inside torch.compile a divergence is given by a name of DIVERGENCES, not as a record"
    )


def requires_grad_flags(packed: Packed) -> list[bool]:
    """Which of the tensors require a gradient."""
    return [torch.is_grad_enabled() and x is not None and x.requires_grad for x in packed[:TENSORS]]


def has_own_gradient(needed: Sequence[bool], shared: Sequence[bool]) -> list[bool]:
    """Which gradients an operation returns: the gradient of a tensor of both models is returned once, for p."""
    flags = list(needed)
    for place, same in enumerate(shared):
        flags[place + 3] = needed[place + 3] and not (same and needed[place])
    return flags


def pack_gradients(gradients: Gradients, packed: Packed, needed: Sequence[bool]) -> list[Tensor]:
    """The gradients as an operation returns them, each in its tensor's shape; an empty tensor stands for None."""
    flat, returned = list(gradients), has_own_gradient(needed, packed[SHARED])
    for place in range(3):
        if needed[place + 3] and not returned[place + 3]:
            parts = [x for x in (flat[place], flat[place + 3]) if x is not None]
            flat[place] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return [
        gradient.reshape(tensor.shape) if flag and gradient is not None else packed[0].new_empty(0)
        for gradient, tensor, flag in zip(flat, packed[:TENSORS], returned, strict=True)
    ]


def unpack_gradients(
    gradients: Sequence[Tensor], needed: Sequence[bool], shared: Sequence[bool]
) -> list[Tensor | None]:
    """The tensors of ``pack_gradients`` in the order of the arguments, for autograd.

    None replaces an empty tensor: where no gradient is needed, and for q's place of a tensor of both models, whose
    whole gradient is in p's place.
    """
    flags = has_own_gradient(needed, shared)
    return [gradient if flag else None for gradient, flag in zip(gradients, flags, strict=True)]


def empty_gradients(needed: Sequence[bool], packed: Packed) -> list[Tensor]:
    """Uninitialised tensors like those of ``pack_gradients``, for tracing."""
    flags = has_own_gradient(needed, packed[SHARED])
    return [
        torch.empty_like(x, dtype=gradient_dtype(x)) if flag else packed[0].new_empty(0)
        for x, flag in zip(packed[:TENSORS], flags, strict=True)
    ]


def empty_per_token(packed: Packed) -> Tensor:
    """An uninitialised number for each token, for tracing."""
    return packed[0].new_empty(packed[0].shape[:-1], dtype=common_dtype(packed[:TENSORS]))
