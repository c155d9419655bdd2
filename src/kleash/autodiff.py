"""Values with a given slope; detecting and refusing forward mode, ``torch.func`` transforms and double backward."""

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

TRANSFORMS_UNSUPPORTED = (
    "has no forward-mode derivative and cannot run inside torch.func (grad, vjp, jvp, vmap, hessian)"
)


def forward_mode_active() -> bool:
    """Whether forward-mode differentiation may be active: ``forward_ad.dual_level``, or ``jvp`` of ``torch.func``.

    While torch.compile traces, true inside any transform of ``torch.func``: it has no rule for ``vmap`` of an autograd
    function.
    """
    if torch.compiler.is_compiling():
        return torch._C._are_functorch_transforms_active()
    return dual_level_active()


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor has a forward-mode tangent, or is a wrapper inside a transform of ``torch.func``."""
    return _functorch.is_functorch_wrapped_tensor(tensor) or (
        dual_level_active() and cast("Any", forward_ad).unpack_dual(tensor).tangent is not None
    )


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor is a batch inside ``torch.func.vmap``, whose values cannot be read."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def refuse_transforms(name: str, instead: str, *tensors: Tensor | None, inside: bool = True) -> None:
    """Raise an error if a tensor is differentiated by forward mode or ``torch.func`` in a function without support.

    Also if, inside a transform of ``torch.func``, a tensor requires a gradient outside of it.

    Args:
        name: of the function, for the error.
        instead: what to do.
        tensors: its arguments.
        inside: whether the function supports constants inside a transform.

    Raises:
        CannotRunError: it names the function and says what to do instead.
    """
    arguments = [x for x in tensors if x is not None]
    active = torch._C._are_functorch_transforms_active()
    trained = active and torch.is_grad_enabled() and any(x.requires_grad for x in arguments)
    if trained or (active and not inside) or any(map(is_transformed, arguments)):
        raise CannotRunError(f"{name} {TRANSFORMS_UNSUPPORTED}; {instead}")


def uncompiled_in_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: run ``function`` uncompiled inside forward mode or a transform of ``torch.func``.

    If a function raises while torch.compile traces it, torch runs it uncompiled but compiles the functions it calls.
    Tangents are not visible in those, so ``refuse_transforms`` would not raise. With ``fullgraph=True`` torch reports
    the error itself. Without ``torch._dynamo``, which takes seconds to import, nothing is compiled.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            if dual_level_active():
                raise CannotRunError(f"a compiled {function.__name__} has no forward-mode derivative")
        elif "torch._dynamo" in sys.modules and (
            dual_level_active() or torch._C._are_functorch_transforms_active()
        ):
            return cast("Any", torch).compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: torch.compile breaks its graph at ``function`` and runs it uncompiled."""
    without_compiler: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # The compiler takes seconds to import; tracing, it would read and guard all of sys.modules.
        if not torch.compiler.is_compiling() and "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not without_compiler:
            without_compiler.append(cast("Any", torch).compiler.disable(function))
        return without_compiler[0](*args, **kwargs)

    return call


def dual_level_active() -> bool:
    """Whether ``forward_ad.dual_level`` or ``torch.func.jvp`` is active; True if torch does not expose it."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """The result of an autograd function, whose ``apply`` torch leaves without types."""
    if torch.compiler.is_compiling():  # which refuses a tensor that is there twice
        arguments = tuple(
            x.view_as(x) if isinstance(x, Tensor) and any(x is each for each in arguments[:place]) else x
            for place, x in enumerate(arguments)
        )
    return cast("Callable[..., Any]", function.apply)(*arguments)


def first_derivative_only(gradient: Tensor, variable: Tensor | None, message: str) -> Tensor:
    """Return ``gradient``, with respect to ``variable``, such that differentiating it again raises an error.

    For a backward pass whose result autograd would treat as a constant, or which lacks terms of the second derivative.

    Raises:
        CannotRunError: with ``message``, when the result is differentiated.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or variable is None:
        return gradient
    return apply(_FirstDerivative, gradient, variable, message)


class _FirstDerivative(torch.autograd.Function):
    """The identity function; its derivatives raise an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, variable: Tensor, message: str) -> Tensor:  # pyrefly: ignore[bad-override]
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
        ctx.message = inputs[2]

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        raise CannotRunError(ctx.message)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise CannotRunError(ctx.message)


def with_slope(value: Tensor, u: Tensor, slope: Tensor) -> Tensor:
    """``value`` with the gradient ``slope`` in ``u``, which counts nothing where it is multiplied by 0.

    A token that a caller masks *after* the value was computed gets the gradient 0 also if its slope is infinite or NaN;
    a finite slope is multiplied as always, so that second derivatives are those of ``slope``.

    Args:
        value: one number per token, without a gradient.
        u: what the gradient flows to, in the dtype of ``value``.
        slope: the derivative of ``value`` in ``u``.
    """
    return apply(_WithSlope, u, value, slope)


class _WithSlope(torch.autograd.Function):
    """The identity on ``value``, with a given derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, value: Tensor, slope: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]
        (slope,) = ctx.saved_tensors
        return times_slope(weight, slope), None, None


def times_slope(weight: Tensor, slope: Tensor) -> Tensor:
    """The product of an incoming gradient and a slope: 0 where the gradient is, even if the slope is not finite."""
    return weight * torch.where((weight == 0) & ~slope.isfinite(), 0.0, slope)
