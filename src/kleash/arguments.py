"""Validation of the arguments of public functions from their annotations: tensor types, dtypes, shapes and devices."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from types import UnionType
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar, Union, cast, get_args, get_origin

import torch
from torch import Tensor

from kleash.errors import CannotRunError, OptionError, ShapeError, VocabularyMismatchError

P = ParamSpec("P")
R = TypeVar("R")
Axes: TypeAlias = tuple[str, ...]
"""Names of a tensor's axes, as in its annotation; one with a star is any number of axes."""
NamedTensor: TypeAlias = tuple[str, Tensor, Axes]
"""The name of an argument, or of a field of one, with its value and axes."""
KINDS: Mapping[str, str] = {"float": "floating-point numbers", "bool": "truth values", "int": "integers"}
"""Kind of dtype -> what it is called in an error."""
VOCABULARY = "vocab"
"""The name of an axis that is a whole vocabulary."""


class ArgumentSpec(NamedTuple):
    """The values that a parameter's annotation allows."""

    number: bool
    """Whether a Python number is allowed."""
    whole: bool
    """Whether the number must be a whole one."""
    none: bool
    """Whether None is allowed."""
    kinds: tuple[str, ...]
    """The keys of ``KINDS`` that the dtype of a tensor may have; none where no tensor is allowed."""
    axes: Axes | None
    """The axes of a tensor; None for any shape."""
    classes: tuple[type, ...]
    """Classes of kleash, and possibly str; if not empty, nothing else is allowed."""
    fields: Mapping[str, Axes]
    """The axes of the tensors in these classes, by field."""


def validated(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: validate arguments against the annotations of ``function`` and raise errors of kleash.

    It checks parameters annotated as a jaxtyping tensor, as a number or as a class of kleash: the type, the kind of
    dtype, the memory layout, that a vocabulary is not empty, that axes of one name have one size in all tensors (also
    in the fields of a NamedTuple), and that all tensors are on one device. Values and other types are not checked.

    Raises:
        ShapeError: if an argument is not a tensor, a tensor of the wrong kind of dtype, or of another shape.
        VocabularyMismatchError: if the axes called ``vocab`` differ in size.
        OptionError: if an argument is not a number, or not a whole one.
        CannotRunError: if tensors are on different devices.
    """
    parameters = inspect.signature(function).parameters
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(name for name, parameter in parameters.items() if parameter.kind in positional)
    specs = {name: spec for name in parameters if (spec := argument_spec(parameters[name])) is not None}

    @functools.wraps(function)
    def validating(*args: P.args, **kwargs: P.kwargs) -> R:
        check_arguments(specs, names, args, kwargs)
        return function(*args, **kwargs)

    return validating


def with_parameters_of(declared: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorator of a function of any keywords: type checkers, completion and ``help`` see the parameters of another.

    Args:
        declared: a function that is not called; its parameters are those that the decorated one can take.
    """

    def declare(function: Callable[..., R]) -> Callable[P, R]:
        vars(function)["__signature__"] = inspect.signature(declared)
        return function

    return declare


def argument_spec(parameter: inspect.Parameter) -> ArgumentSpec | None:
    """The values that a parameter's annotation allows; None for a parameter that is not checked.

    Checked are tensors, classes of kleash, ``float`` and ``int``, and unions of these and None; beside a class, str is
    allowed as the name of a record.
    """
    annotation = parameter.annotation
    options = get_args(annotation) or (annotation,)
    tensors = [x for x in options if getattr(x, "array_type", None) is Tensor]
    number = get_origin(annotation) in (None, Union, UnionType) and not {float, int}.isdisjoint(options)
    classes: tuple[Any, ...] = tuple(
        x for x in options if isinstance(x, type) and x.__module__.startswith("kleash.")
    )
    classes += (str,) if classes and str in options else ()
    unchecked = [x for x in options if x not in (*tensors, *classes, float, int, type(None))]
    if unchecked or not (tensors or classes or number):
        return None
    dtypes = [dtype for x in tensors for dtype in getattr(x, "dtypes", ())]
    return ArgumentSpec(
        number=number,
        whole=float not in options,
        none=type(None) in options,
        kinds=tuple(kind for kind in KINDS if any(kind in dtype for dtype in dtypes)),
        axes=axes_of(tensors[0]) if tensors else None,
        classes=classes,
        fields={
            name: axes
            for each in classes
            if hasattr(each, "_fields")  # a NamedTuple
            for name, field in inspect.get_annotations(each).items()
            if (axes := axes_of(field)) is not None
        },
    )


def axes_of(annotation: object) -> Axes | None:
    """The axes of a jaxtyping annotation; None for any shape, and for other annotations."""
    axes = tuple(str(getattr(annotation, "dim_str", "...")).split())
    return None if "..." in axes else axes


def check_arguments(
    specs: Mapping[str, ArgumentSpec],
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Raise an error for the first argument that its spec does not allow, or for tensors that do not fit together.

    Args:
        specs: what each parameter allows; parameters without a spec are not checked.
        names: names of the positional parameters.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Raises:
        ShapeError: if an argument is not a tensor, or a tensor of the wrong kind of dtype or of another shape.
        VocabularyMismatchError: if the axes called ``vocab`` differ in size.
        OptionError: if an argument is not a number, or not of the allowed classes.
        CannotRunError: if two tensors of at least one axis are on different devices.
    """
    tensors: list[NamedTensor] = []
    placed: list[tuple[str, Tensor]] = []
    for name, value in (*zip(names, args), *kwargs.items()):  # noqa: B905 (parameters with defaults may be missing)
        spec = specs.get(name)
        if spec is None or (value is None and spec.none):
            continue
        if spec.classes:
            check_class(name, value, spec.classes)
            tensors += [
                (f"{name}.{field}", getattr(value, field), axes) for field, axes in spec.fields.items()
            ]
        elif isinstance(value, Tensor) and spec.kinds:
            check_tensor(name, value, spec)
            if spec.axes is not None:
                tensors.append((name, value, spec.axes))
            if value.ndim:
                placed.append((name, value))
        else:
            check_number(name, value, spec)
    for name, value in placed:
        first_name, first = placed[0]
        if value.device != first.device:
            raise CannotRunError(
                f"{first_name} is on {first.device} and {name} on {value.device}; move one of them"
            )
    check_shapes(tensors)


def check_shapes(tensors: Sequence[NamedTensor]) -> None:
    """Raise an error unless axes of one name have one size in all tensors."""
    sizes: dict[str, object] = {}
    for name, tensor, axes in tensors:
        misfit = first_misfit(axes, tuple(tensor.shape), sizes)
        if misfit == VOCABULARY:
            first = next(each for each, _, its_axes in tensors if VOCABULARY in its_axes)
            raise VocabularyMismatchError(
                f"{first} covers {sizes[VOCABULARY]} tokens and {name} {tensor.shape[-1]}; "
                "pad or project one onto the other's vocabulary first"
            )
        if misfit is not None:
            shapes = ", ".join(f"{each} {tuple(x.shape)}" for each, x, _ in tensors)
            needed = ", ".join(f"{each} [{', '.join(its_axes)}]" for each, _, its_axes in tensors)
            raise ShapeError(f"the shapes do not fit together: {shapes}; give {needed}")


def first_misfit(axes: Axes, shape: tuple[int, ...], sizes: dict[str, object]) -> str | None:
    """The first axis that has another size in ``sizes``, to which new axes are added; None if all fit.

    It is an empty text if there are more or fewer axes.
    """
    groups: list[object] = list(shape)
    for at, axis in enumerate(axes):
        if axis.startswith("*"):
            stop = len(shape) - (len(axes) - at - 1)
            groups[at:stop] = [shape[at:stop]]
    if len(groups) != len(axes):
        return ""
    for axis, size in zip(axes, groups, strict=True):
        if sizes.setdefault(axis, size) != size:
            return axis
    return None


def type_text(value: object) -> str:
    """The type of an argument, as text."""
    if value is None:
        return "None"
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")


def check_class(name: str, value: object, classes: tuple[type, ...]) -> None:
    """Raise an error if ``value`` is not an instance of one of these classes."""
    if not isinstance(value, classes):
        expected = " or ".join("a name" if x is str else f"a {x.__name__}" for x in classes)
        raise OptionError(f"{name} is {type_text(value)}; give {expected}")


def check_number(name: str, value: object, spec: ArgumentSpec) -> None:
    """Raise an error if ``value`` is neither a number nor of a type that can be used as one."""
    if not spec.number:
        raise ShapeError(
            f"{name} is {type_text(value)} and not a torch.Tensor; convert it, with torch.as_tensor for instance"
        )
    or_tensor = " or a torch.Tensor" if spec.kinds else ""
    if value is None or isinstance(value, (str, bytes, list, tuple, dict, set, complex)):
        raise OptionError(f"{name} is {value!r}; give a number{or_tensor}")
    # torch.compile makes symbols of floats that change, which have no attribute it can look for.
    if not isinstance(value, (int, float)) and getattr(value, "ndim", 0):
        raise OptionError(f"{name} is {type_text(value)} of several numbers; give one number{or_tensor}")
    if spec.whole and (isinstance(value, bool) or cast("float", value) % 1 != 0):
        raise OptionError(f"{name} is {value!r}; give a whole number")


def check_tensor(name: str, value: Tensor, spec: ArgumentSpec) -> None:
    """Raise an error if a tensor is not dense, has the wrong kind of dtype, or an empty vocabulary."""
    if value.layout != torch.strided:
        raise ShapeError(
            f"{name} is a tensor of layout {value.layout}; give a dense one, by to_dense() for instance"
        )
    kind = "float" if value.is_floating_point() else "bool" if value.dtype == torch.bool else "int"
    has_vocabulary = spec.axes is not None and spec.axes[-1:] == (VOCABULARY,)
    is_empty = has_vocabulary and not (value.ndim and value.shape[-1])
    if kind not in spec.kinds or value.is_complex() or value.is_quantized or is_empty:
        where = " with the vocabulary on the last axis, at least one token" if has_vocabulary else ""
        raise ShapeError(
            f"{name} is {value.dtype} of shape {tuple(value.shape)}; "
            f"give {' or '.join(map(KINDS.__getitem__, spec.kinds))}{where}"
        )


def check_reward_order(name: str, returned: Any) -> Any:
    """The return value of a reward function, as it is; raises an error if it has no order, or is no sequence.

    Raises:
        CannotRunError: for a mapping, a set, text, one number or None.
    """
    is_one = not hasattr(returned, "__iter__") or getattr(returned, "ndim", 1) == 0
    if is_one or isinstance(returned, (Mapping, Set, str, bytes, bytearray)):
        raise CannotRunError(
            f"the reward {name} returned a {type(returned).__name__}; it must return a sequence of numbers, one for "
            "each response in the order of the responses"
        )
    return returned
