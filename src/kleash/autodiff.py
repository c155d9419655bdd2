"""Which of torch's derivatives are being taken around a call: forward mode, and the transforms of ``torch.func``."""

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kleash.errors import CannotRunError

P = ParamSpec("P")
R = TypeVar("R")

_functorch = cast("Any", torch)._C._functorch

NO_TRANSFORMS = (
    "has no forward-mode derivative and cannot run inside torch.func (grad, vjp, jvp, vmap, hessian)"
)


def forward_mode_active() -> bool:
    """Whether a forward-mode derivative may be under way: ``forward_ad.dual_level``, or ``jvp`` of ``torch.func``.

    Inside torch.compile, which has no rule for ``vmap`` over an autograd function, any transform of ``torch.func``.
    """
    if torch.compiler.is_compiling():
        return bool(torch._C._are_functorch_transforms_active())  # pyright: ignore
    return _level() >= 0


def is_transformed(tensor: Tensor | None) -> bool:
    """Whether a tensor carries a forward-mode tangent, or stands for others inside a transform of ``torch.func``."""
    if tensor is None:
        return False
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return True
    return _level() >= 0 and cast("Any", forward_ad).unpack_dual(tensor).tangent is not None


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for a batch inside ``torch.func.vmap``, so that its numbers cannot be looked at."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def refuse_transforms(name: str, instead: str, *tensors: Tensor | None, inside: bool = True) -> None:
    """Raise if a function without such derivatives is given a tensor of forward mode or of ``torch.func``.

    Or, inside a transform of ``torch.func``, one that requires a gradient outside of it. ``inside``: whether the
    function can run there at all, on constants.

    Raises:
        CannotRunError: then; it names the function and says what to do instead.
    """
    active = bool(torch._C._are_functorch_transforms_active())  # pyright: ignore
    trained = active and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if trained or (active and not inside) or any(is_transformed(x) for x in tensors):
        raise CannotRunError(f"{name} {NO_TRANSFORMS}; {instead}")


def refuse_transforms_compiled(name: str, instead: str) -> None:
    """The same while torch.compile traces the caller, where tensors do not tell: refuse any transform around it.

    Raises:
        CannotRunError: inside a transform of ``torch.func`` or ``forward_ad.dual_level``.
    """
    if torch._C._are_functorch_transforms_active() or dual_level_active():  # pyright: ignore
        raise CannotRunError(f"{name} {NO_TRANSFORMS}; {instead}")


def uncompiled_in_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, no part of which is compiled by torch inside forward mode or a transform of ``torch.func``.

    A function that raises while torch.compile traces it is run uncompiled, but the functions that it calls are compiled
    one by one. To those, a tangent does not exist: ``refuse_transforms`` would see none. With ``fullgraph=True``, torch
    reports the error itself.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            if dual_level_active():
                raise CannotRunError(f"a compiled {function.__name__} has no forward-mode derivative")
            return function(*args, **kwargs)
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not (dual_level_active() or torch._C._are_functorch_transforms_active()):  # pyright: ignore
            return function(*args, **kwargs)
        return cast("Any", torch).compiler.disable(function)(*args, **kwargs)

    return call


def dual_level_active() -> bool:
    """Whether the call is inside ``forward_ad.dual_level`` or ``torch.func.jvp``; True where torch does not say."""
    return _level() >= 0


def first_derivative_only(gradient: Tensor, of: Tensor | None, refusal: str) -> Tensor:
    """``gradient``, with respect to ``of``, which raises when it is differentiated again.

    For a backward pass whose result autograd would take for a constant, or for a part of the true derivative.

    Raises:
        CannotRunError: when it is differentiated, saying ``refusal``.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or of is None:
        return gradient
    apply = cast("Callable[..., Tensor]", _FirstOnly.apply)  # pyright: ignore[reportUnknownMemberType]
    return apply(gradient, of, refusal)


class _FirstOnly(torch.autograd.Function):
    """The identity, without a derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, of: Tensor, refusal: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
        ctx.refusal = inputs[2]

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise CannotRunError(ctx.refusal)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise CannotRunError(ctx.refusal)


def _level() -> int:
    """The nesting of ``forward_ad.dual_level``, -1 outside; 0, which may be inside, where torch does not say."""
    return getattr(forward_ad, "_current_level", 0)
