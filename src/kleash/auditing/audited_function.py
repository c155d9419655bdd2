"""The audited function, called by its convention; its results are brought to one shape and sign."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.auditing.conventions import Convention
from kleash.auditing.inputs import AuditInputs
from kleash.errors import CannotRunError, ShapeError


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditedFunction:
    """A KL function with its convention and the keyword arguments bound to it."""

    function: Callable[..., Any]
    convention: Convention
    name: str
    arguments: Mapping[str, Any]
    repeats: int = 1
    """Number of calls that ``values`` averages; more than one for a random function."""

    @property
    def is_differentiated(self) -> bool:
        """Whether its result is differentiated: only that of a loss is."""
        return self.convention.place == "loss"

    def call(self, inputs: AuditInputs) -> Tensor:
        """The function's result on copies of ``inputs``, checked for its shape; of either sign.

        Raises:
            CannotRunError: if it raises, or returns no tensor of real numbers.
            ShapeError: if its result does not have the shape of the convention.
        """
        with torch.enable_grad():  # an earlier call may have switched gradients off
            return self.call_in_place(inputs.clone())

    def call_in_place(self, inputs: AuditInputs) -> Tensor:
        """``call`` without the copies: the function may overwrite ``inputs``."""

        def bound(*positional: Any, **keywords: Any) -> Any:
            return self.function(*positional, **{**self.arguments, **keywords})

        description = f"convention {self.convention.name!r}, {self.convention.summary}"
        try:
            result = self.convention.call(bound, inputs)
        except (Exception, SystemExit) as error:
            lines = str(error).strip().splitlines()
            message = f": {lines[0][:300]}" if lines else ""
            raise CannotRunError(
                f"{self.name} raised {type(error).__name__}{message} when called by {description}; "
                "choose the convention that fits it, or bind the arguments it needs"
            ) from error
        unusable_type = _unusable_type(result)
        if unusable_type:
            raise CannotRunError(
                f"{self.name} returned {unusable_type} when called by {description}; audit a function that returns "
                "a tensor of floating-point numbers"
            )
        sequences, steps, vocab = inputs.logp.shape
        expected_shape = {
            "vocabulary": (sequences, steps, vocab),
            "token": (sequences, steps),
            "sequence": (sequences,),
            "mean": (),
        }[self.convention.gives]
        if tuple(result.shape) != expected_shape:
            raise ShapeError(
                f"{self.name} returned {tuple(result.shape)} for {sequences} sequences of {steps} steps, and "
                f"{description} means {expected_shape}; choose the convention that fits it, or bind its reduction"
            )
        return result

    def gradients(
        self, value: Tensor, leaves: Tensor | Sequence[Tensor], *, retain_graph: bool = False
    ) -> tuple[Tensor | None, ...]:
        """The gradient of ``value``, a scalar made of the function's result, in each of ``leaves``.

        Returns:
            None for a leaf that ``value`` does not depend on.

        Raises:
            CannotRunError: if the result cannot be differentiated.
        """
        try:
            return torch.autograd.grad(value, leaves, allow_unused=True, retain_graph=retain_graph)
        except (RuntimeError, NotImplementedError) as error:
            message = str(error).strip().splitlines()[0][:300].partition(". ")[0]
            raise CannotRunError(
                f"the result of {self.name} cannot be differentiated ({message}); remove the backward pass from "
                "the function, or choose a convention with place 'reward' or 'metric'"
            ) from error

    def values(self, inputs: AuditInputs) -> Float[Tensor, "sequences parts"]:
        """The function's value for each token, or for each sequence if it gives only that; with the sign of +KL.

        A function that returns a mean is called with one sequence at a time and its result multiplied by the
        number of unmasked tokens, so that the values of a sequence always add up to its total.
        """
        if self.repeats == 1:
            return self._values_of_one_call(inputs)
        return torch.stack([self._values_of_one_call(inputs) for _ in range(self.repeats)]).mean(0)

    def _values_of_one_call(self, inputs: AuditInputs) -> Float[Tensor, "sequences parts"]:
        """``values`` from one call; for a mean, from one call per sequence."""
        gives = self.convention.gives
        if gives == "mean":
            rows = [inputs.select(slice(i, i + 1)) for i in range(len(inputs.tokens))]
            result = torch.stack([self.call(row) * row.mask.sum() for row in rows]).unsqueeze(-1)
        else:
            result = self.call(inputs)
            if gives == "sequence":
                result = result.unsqueeze(-1)
            if gives == "vocabulary":
                result = result.sum(-1)
        return self.convention.sign * result


def _unusable_type(result: Any) -> str:
    """The type of a result that is not a dense tensor of real numbers on the CPU; "" for one that is."""
    if not isinstance(result, Tensor):
        return type(result).__name__
    if not result.is_floating_point():
        return str(result.dtype)
    if result.layout is not torch.strided or result.device.type != "cpu":
        return f"a {str(result.layout).removeprefix('torch.')} tensor on {result.device}"
    return ""
