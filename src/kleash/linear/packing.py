"""What the operations of ``ops.py`` are given: a public function's arguments as tensors, numbers and names."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from kleash.autodiff import refuse_transforms, refuse_transforms_compiled
from kleash.divergences import DIVERGENCES, Divergence
from kleash.errors import CannotRunError
from kleash.linear.checks import INSTEAD, checked_pair
from kleash.linear.head import Head, gathered
from kleash.linear.impl.buffer import with_buffer
from kleash.linear.impl.choice import implementation
from kleash.linear.impl.pair import HeadPair
from kleash.linear.options import LinearOptions
from kleash.linear.sharding import name_of, named_group

Given: TypeAlias = tuple[Any, ...]
"""The arguments that all operations begin with."""
COMMON = (
    "Tensor hidden_p, Tensor? weight_p, Tensor? bias_p, Tensor hidden_q, Tensor? weight_q, Tensor? bias_q, "
    "Tensor? temperatures, float[] numbers, bool[] shared, str impl, int buffer_bytes, str compile, float skip_below, "
    "str[] groups"
)
COUNT = 14
SHARED = 8
"""Where among them it says which of hidden states, weight and bias are the same for both models."""
DEFAULT = LinearOptions()
BY_DEVICE = 0
"""Stands for a ``buffer_bytes`` of None, which is chosen when the operation runs and not when it is traced."""


def given(
    p: tuple[Tensor, Head], q: tuple[Tensor, Head], temperature: float | Tensor, options: LinearOptions | None
) -> Given:
    """Two models and the options, taken apart.

    Raises:
        CannotRunError: if they have a function in them, which no compiled graph could call, or a transform of
            ``torch.func`` is around the call, to which the operations would be constants.
    """
    refuse_transforms_compiled("a compiled linear function", INSTEAD)
    options = DEFAULT if options is None else options
    if options.report is not None:
        raise CannotRunError("inside torch.compile nothing can be reported; leave report out of the options")
    (hidden_p, head_p), (hidden_q, head_q) = p, q
    shared = [hidden_p is hidden_q, head_p.weight is head_q.weight, head_p.bias is head_q.bias]
    head_p, head_q = gathered(head_p, head_q)
    number = 1.0 if isinstance(temperature, Tensor) else float(temperature)
    return (
        *(hidden_p, head_p.weight, head_p.bias, hidden_q, head_q.weight, head_q.bias),
        temperature if isinstance(temperature, Tensor) else None,
        [number, head_p.scale, head_p.softcap or 0.0, head_q.scale, head_q.softcap or 0.0],
        shared,
        *(options.impl, options.buffer_bytes or BY_DEVICE, str(options.compile), options.skip_below),
        [name_of(head_p.vocabulary_group), name_of(head_q.vocabulary_group)],
    )


def together(given: Given, record: Divergence | None = None) -> tuple[HeadPair, LinearOptions, Any]:
    """The two models, the options, and the implementation."""
    hp, wp, bp, hq, wq, bq, temperatures, numbers, shared, impl, buffer_bytes, compile, skip_below, groups = (
        given
    )
    number, scale_p, softcap_p, scale_q, softcap_q = numbers
    group_p, group_q = (named_group(name) for name in groups)
    head_p = Head(wp, bp, scale=scale_p, softcap=softcap_p or None, vocabulary_group=group_p)
    wq, bq = wp if shared[1] else wq, bp if shared[2] else bq
    head_q = Head(wq, bq, scale=scale_q, softcap=softcap_q or None, vocabulary_group=group_q)
    options = LinearOptions(
        impl=impl, buffer_bytes=buffer_bytes or None, compile=compile, skip_below=skip_below
    )
    temperature = number if temperatures is None else temperatures
    pair = checked_pair((hp, head_p), (hp if shared[0] else hq, head_q), temperature)
    options = with_buffer(options, pair)
    return pair, options, implementation(options, pair, record)


@contextmanager
def as_usual(given: Given) -> Generator[None, None, None]:
    """Inside an operation torch takes no derivatives at all; the implementations want one in a few places.

    Raises:
        CannotRunError: if a tensor that the operation was given carries a tangent, which would be taken for 0.
    """
    device = given[0].device.type
    core = cast("Any", torch)._C
    guard = core._SetExcludeDispatchKeyGuard(core.DispatchKey.AutogradFunctionality, False)
    with guard, torch.no_grad(), torch.autocast(device, enabled=False):
        tensors = (x for x in given if isinstance(x, Tensor))
        refuse_transforms("a compiled linear function", INSTEAD, *tensors)
        yield


def needed(given: Sequence[Any]) -> list[bool]:
    """Which of the six tensors require a gradient."""
    return [torch.is_grad_enabled() and x is not None and x.requires_grad for x in given[:6]]


def named(divergence: str | Divergence) -> str:
    """The name of a divergence.

    Raises:
        CannotRunError: if it has none: a record cannot be handed through a compiled graph.
    """
    if isinstance(divergence, str):
        return divergence
    for name, record in DIVERGENCES.items():
        if record is divergence:
            return name
    raise CannotRunError(
        "inside torch.compile a divergence is given by a name of DIVERGENCES, not as a record"
    )
