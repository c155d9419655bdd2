"""Which of torch's derivatives are being taken around a call: forward mode, and the transforms of ``torch.func``."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kleash.errors import CannotRunError

_functorch = cast("Any", torch)._C._functorch


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
    return _level() >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def refuse_transforms(name: str, instead: str, *tensors: Tensor | None) -> None:
    """Raise if a function without such derivatives is given a tensor of forward mode or of ``torch.func``.

    Raises:
        CannotRunError: then; it names the function and says what to do instead.
    """
    if any(is_transformed(x) for x in tensors):
        raise CannotRunError(
            f"{name} has no forward-mode derivative and cannot run inside torch.func (grad, vjp, jvp, vmap, hessian); "
            f"{instead}"
        )


def first_derivative_only(gradient: Tensor, name: str) -> Tensor:
    """``gradient``, which raises when it is differentiated again.

    For a backward pass whose result is a constant to autograd although the true gradient is none.
    """
    if not torch.is_grad_enabled():
        return gradient
    apply = cast("Callable[..., Tensor]", _FirstOnly.apply)  # pyright: ignore[reportUnknownMemberType]
    return apply(gradient, name)


class _FirstOnly(torch.autograd.Function):
    """The identity, without a derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, name: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.name = inputs[1]

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise CannotRunError(f"{ctx.name} can be differentiated once, and a second derivative was asked for")


def _level() -> int:
    """The nesting of ``forward_ad.dual_level``, -1 outside; 0, which may be inside, where torch does not say."""
    return getattr(forward_ad, "_current_level", 0)
