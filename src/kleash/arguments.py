"""Checks of the arguments of public functions: tensors, their kinds of numbers, and the device that they share."""

import functools
import inspect
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from kleash.errors import CannotRunError, OptionError, ShapeError

P = ParamSpec("P")
R = TypeVar("R")


class Expected(NamedTuple):
    """What an annotation allows."""

    tensor: bool
    """Whether a tensor."""
    number: bool
    """Whether a Python number."""
    none: bool
    """Whether None."""
    floating: bool
    """Whether floating-point numbers."""
    integer: bool
    """Whether integers."""
    boolean: bool
    """Whether truth values."""
    vocabulary: bool
    """Whether the last axis is a vocabulary, which has at least one token."""
    classes: tuple[type, ...]
    """Classes of kleash's own, and str beside them; nothing else then."""


def validated(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which raises an error of kleash's own for arguments that are not what its annotations say.

    Checked are what is annotated as a tensor of jaxtyping's, as a ``float`` or as a class of kleash: the type, the
    kind of numbers, the memory layout, that a vocabulary is not empty, and that all tensors are on one device. Not
    checked are values, nor any other type.

    Raises:
        ShapeError: for what is not a tensor, or one of the wrong kind.
        OptionError: for what is not a number where one is annotated.
        CannotRunError: for tensors on several devices.
    """
    return checking(function, numbers=True)


def validated_types(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with the checks of ``validated`` but those of numbers and devices, which it makes itself."""
    return checking(function, numbers=False)


def checking(function: Callable[P, R], *, numbers: bool) -> Callable[P, R]:
    """``function`` behind its checks."""
    parameters = inspect.signature(function).parameters
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(name for name, parameter in parameters.items() if parameter.kind in by_place)
    expected = {name: found for name in parameters if (found := expectation(parameters[name])) is not None}

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_arguments(expected, names, args, kwargs, numbers=numbers)
        return function(*args, **kwargs)

    return checked


def expectation(parameter: inspect.Parameter) -> Expected | None:
    """What a parameter's annotation allows; None if nothing is checked of it."""
    annotation = parameter.annotation
    options = get_args(annotation) or (annotation,)
    arrays = [x for x in options if getattr(x, "array_type", None) is Tensor]
    number = float in options or int in options
    classes = tuple(x for x in options if isinstance(x, type) and x.__module__.startswith("kleash."))
    classes += (str,) if classes and str in options else ()
    others = [x for x in options if x not in (*arrays, *classes, float, int, type(None))]
    if others or not (arrays or classes or options == (float,)):
        return None
    kinds = {kind for x in arrays for kind in getattr(x, "dtypes", ())}
    return Expected(
        tensor=bool(arrays),
        number=number,
        none=type(None) in options,
        floating=any("float" in kind for kind in kinds),
        integer=any("int" in kind for kind in kinds),
        boolean="bool" in kinds,
        vocabulary=any(str(getattr(x, "dim_str", "")).split()[-1:] in VOCABULARY for x in arrays),
        classes=classes,
    )


VOCABULARY = (["vocab"], ["vocab_p"], ["vocab_q"])
"""Names of a last axis that is a whole vocabulary."""


def check_arguments(
    expected: Mapping[str, Expected],
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    numbers: bool,
) -> None:
    """Raise for the first argument that is not what was expected."""
    first, first_name = None, ""
    for name, value in (*zip(names, args), *kwargs.items()):  # noqa: B905 (defaults are not given)
        allowed = expected.get(name)
        if allowed is None or (value is None and allowed.none):
            continue
        if allowed.classes:
            check_class(name, value, allowed.classes)
        elif not isinstance(value, Tensor):
            check_number(name, value, allowed)
        elif allowed.tensor:
            check_layout(name, value)
            if not numbers:
                continue
            check_tensor(name, value, allowed)
            if first is None:
                first, first_name = value, name
            elif value.device != first.device and value.ndim and first.ndim:
                raise CannotRunError(
                    f"{first_name} is on {first.device} and {name} on {value.device}; move one of them"
                )


def kind_of(value: object) -> str:
    """The type of an argument, in words."""
    if value is None:
        return "None"
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")


def check_class(name: str, value: object, classes: tuple[type, ...]) -> None:
    """Raise for what is none of these."""
    if not isinstance(value, classes):
        wanted = " or ".join("a name" if x is str else f"a {x.__name__}" for x in classes)
        raise OptionError(f"{name} is {kind_of(value)}; give {wanted}")


def check_number(name: str, value: object, allowed: Expected) -> None:
    """Raise for what is neither a number nor, as far as can be seen, of a type that is used as one."""
    kind = kind_of(value)
    if allowed.number:
        if value is None or isinstance(value, str | bytes | list | tuple | dict | set | complex):
            raise OptionError(f"{name} is {value!r}; give a number")
        if getattr(value, "ndim", 0):
            raise OptionError(f"{name} is {kind} of several numbers; give one number")
        return
    raise ShapeError(
        f"{name} is {kind} and not a torch.Tensor; make one of it, with torch.as_tensor for instance"
    )


def check_layout(name: str, value: Tensor) -> None:
    """Raise for a tensor that is not dense."""
    if value.layout != torch.strided:
        raise ShapeError(
            f"{name} is a tensor of layout {value.layout}; give a dense one, by to_dense() for instance"
        )


def check_tensor(name: str, value: Tensor, allowed: Expected) -> None:
    """Raise for a tensor of the wrong kind."""
    what = f"{name} is {value.dtype} of shape {tuple(value.shape)}"
    if value.is_complex() or (value.is_quantized and allowed.floating):
        raise ShapeError(f"{what}; give real numbers")
    if (
        allowed.vocabulary
        and allowed.floating
        and not (value.is_floating_point() and value.ndim and value.shape[-1])
    ):
        raise ShapeError(
            f"{what}; give floating-point numbers with the vocabulary on the last axis, at least one token"
        )
    if allowed.floating and not allowed.integer and not value.is_floating_point():
        raise ShapeError(f"{what}; give floating-point numbers")
    if value.is_floating_point() and allowed.integer and not (allowed.floating or allowed.boolean):
        raise ShapeError(f"{what}; give integers")
    if value.dtype != torch.bool and allowed.boolean and not allowed.integer:
        raise ShapeError(f"{what}; give truth values")
    if value.dtype == torch.bool and allowed.integer and not allowed.boolean:
        raise ShapeError(f"{what}; give integers")


def check_reward_order(name: str, returned: object) -> None:
    """Raise for what a reward function returned if its numbers are in no order of the responses, or if it is text.

    Raises:
        CannotRunError: for a mapping, a set or text.
    """
    kind = type(returned).__name__
    if isinstance(returned, Mapping | Set | str | bytes | bytearray):
        raise CannotRunError(
            f"the reward {name} returned a {kind}; it must return a sequence of numbers, one for "
            "each response in the order of the responses"
        )
