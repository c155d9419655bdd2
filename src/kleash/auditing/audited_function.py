"""The audited function, called by its convention; its results are brought to one shape and sign."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kleash.auditing.conventions import Convention
from kleash.auditing.toy_distributions import P_FIELDS, SEQUENCES, AuditInputs, leaf_inputs
from kleash.autodiff import uncompiled
from kleash.errors import CannotRunError, MissingExtraError, ShapeError, summarise_error

RESULT_AXES: Mapping[str, int] = MappingProxyType({"vocabulary": 3, "token": 2, "sequence": 1, "mean": 0})
"""What a convention gives -> how many of the axes sequences, steps and vocabulary the result has."""


class KeptPrecision(TorchDispatchMode):
    """A mode in which tensors that are converted to 16 or 8 bits keep their precision."""

    has_converted = False
    """Whether there was such a conversion."""
    # else torch imports its compiler, which takes seconds, to keep it from what is called here
    _should_skip_dynamo = classmethod(lambda cls: False)

    @uncompiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The result of an operation, such conversions apart."""
        options = dict(kwargs or {})
        dtype = options.get("dtype") if func is torch.ops.aten._to_copy.default else None
        if dtype is not None and dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize:
            options["dtype"] = torch.promote_types(args[0].dtype, torch.float32)
            self.has_converted = True
        return func(*args, **options)


def parameter_roles(function: Callable[..., Any], convention: Convention) -> dict[str, str]:
    """Parameter of the function -> the field of ``AuditInputs`` that it gets, or a view of; of those that are known."""
    inputs, roles = leaf_inputs(SEQUENCES), dict[str, str]()
    fields = {tensor.data_ptr(): field for field, tensor in vars(inputs).items()}

    def note(*args: Any, **kwargs: Any) -> None:
        bound = signature(function).bind_partial(*args, **kwargs)
        roles.update(
            {
                name: fields[x.data_ptr()]
                for name, x in bound.arguments.items()
                if isinstance(x, Tensor) and x.data_ptr() in fields
            }
        )

    with suppress(
        Exception
    ):  # without a signature, with another, or with a result that the call goes on with
        convention.call(note, inputs)
    return roles


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditedFunction:
    """A KL function with its convention and the keyword arguments bound to it."""

    function: Callable[..., Any]
    convention: Convention
    name: str
    arguments: Mapping[str, Any]
    repeats: int = 1
    """Number of calls that ``values`` averages; more than one for a random function."""
    keeps_precision: bool = False
    """Whether conversions to 16 or 8 bits are left out in float64, in which an audit determines what the function is
    apart from its rounding; that shows in float32."""
    reads_tokens: bool = False
    """Whether it takes whole distributions, and its result changes with the tokens all the same."""

    @property
    def bound(self) -> Callable[..., Any]:
        """The function with its arguments bound; itself without any, so that a call may take attributes of a class."""
        return partial(self.function, **self.arguments) if self.arguments else self.function

    def call(self, inputs: AuditInputs) -> Tensor:
        """The function's result on copies of ``inputs``, checked for its shape; of either sign.

        Raises:
            CannotRunError: if it raises, or returns no tensor of real numbers.
            ShapeError: if its result does not have the shape of the convention.
        """
        is_exact = self.keeps_precision and inputs.logp.dtype == torch.float64
        # An earlier call may have switched gradients off.
        with torch.enable_grad(), KeptPrecision() if is_exact else nullcontext():
            return self.call_in_place(inputs.clone())

    def call_in_place(self, inputs: AuditInputs) -> Tensor:
        """``call`` without the copies: the function may overwrite ``inputs``."""
        named = "" if "(" in self.convention.name else f"convention {self.convention.name!r}, "
        description = f"{named}{self.convention.summary}"
        try:
            result = self.convention.call(self.bound, inputs)
            if self.convention.place == "metric" and isinstance(result, float | np.floating | np.ndarray):
                result = torch.tensor(np.array(result))  # as it is logged
        except MissingExtraError as error:  # such as an import of a checkout that was not loaded
            raise CannotRunError(f"{self.name} cannot be called: {error}") from error
        except (Exception, SystemExit) as error:
            message = f": {summarise_error(error)}" if str(error).strip() else ""
            raise CannotRunError(
                f"{self.name} raised {type(error).__name__}{message} when called by {description}, with a vocabulary "
                f"of {inputs.logp.shape[-1]} tokens"
            ) from error
        if not (isinstance(result, Tensor) and result.is_floating_point() and result.device.type == "cpu"):
            kind = (
                f"{result.dtype} on {result.device}" if isinstance(result, Tensor) else type(result).__name__
            )
            raise CannotRunError(
                f"{self.name} returned {kind} when called by {description}, and not a tensor of floating-point numbers "
                "on the CPU"
            )
        expected_shape = inputs.logp.shape[: RESULT_AXES[self.convention.gives]]
        if result.shape != expected_shape:
            sequences, steps = inputs.tokens.shape
            raise ShapeError(
                f"{self.name} returned {tuple(result.shape)} for {sequences} sequences of {steps} steps, and "
                f"{description} means {tuple(expected_shape)}"
            )
        return result

    def gradients(self, value: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradient of ``value``, a scalar made of the result of a loss, in each of ``leaves``.

        Returns:
            None for a leaf that ``value`` does not depend on, and for every leaf if the function is no loss.

        Raises:
            CannotRunError: if the result cannot be differentiated.
        """
        if self.convention.place != "loss" or not value.requires_grad:
            return (None,) * len(leaves)
        try:
            return torch.autograd.grad(value, leaves, allow_unused=True, retain_graph=True)
        except RuntimeError as error:
            message = summarise_error(error).partition(". ")[0]
            raise CannotRunError(
                f"the result of {self.name} cannot be differentiated ({message}); remove a backward pass, or a "
                "change in place, from the function, or choose a convention with place 'reward' or 'metric'"
            ) from error

    def values_and_gradients(self, inputs: AuditInputs, leaves: AuditInputs) -> tuple[Tensor, Tensor]:
        """The values, and the gradients of their unmasked sum in all tensors of p in ``leaves``, in one flat tensor.

        Zeros where no gradient flows.
        """
        values, tensors = self.values(inputs), [getattr(leaves, name) for name in P_FIELDS]
        unmasked = torch.where(inputs.mask, values, 0.0) if values.shape == inputs.mask.shape else values
        pairs = zip(tensors, self.gradients(unmasked.sum(), tensors), strict=True)
        gradients = [(torch.zeros_like(x) if g is None else g).flatten() for x, g in pairs]
        return values.detach(), torch.cat(gradients)

    def values(self, inputs: AuditInputs) -> Float[Tensor, "sequences parts"]:
        """The function's value for each token, or for each sequence if it gives only that; with the sign of +KL.

        A function that returns a mean is called with one sequence at a time and its result multiplied by the
        number of unmasked tokens, so that the values of a sequence always add up to its total.
        """
        values = [self._values_of_one_call(inputs) for _ in range(self.repeats)]
        return self.convention.sign * (values[0] if self.repeats == 1 else torch.stack(values).mean(0))

    def _values_of_one_call(self, inputs: AuditInputs) -> Float[Tensor, "sequences parts"]:
        """``values`` with the sign of the function, from one call; for a mean, from one call per sequence."""
        if self.convention.gives == "mean":
            rows = (inputs.select(slice(i, i + 1)) for i in range(len(inputs.tokens)))
            return torch.stack([self.call(row) * row.mask.sum() for row in rows]).unsqueeze(-1)
        return self.parts(self.call(inputs))

    def parts(self, result: Tensor) -> Float[Tensor, "sequences parts"]:
        """A result that is no mean, for each token, or for each sequence if it gives only that."""
        if self.convention.gives == "vocabulary":
            return result.sum(-1)
        return result.unsqueeze(-1) if self.convention.gives == "sequence" else result
