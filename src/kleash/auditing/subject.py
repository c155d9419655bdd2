"""The audited function, called by its convention, with what comes back brought to one shape and sign."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.auditing.conventions import Convention
from kleash.auditing.situations import Situation
from kleash.errors import CannotRunError, ShapeError


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A function under audit."""

    function: Callable[..., Any]
    convention: Convention
    name: str
    arguments: Mapping[str, Any]
    repeats: int = 1
    """How many calls ``parts`` averages: more than one where the function is random."""

    @property
    def differentiated(self) -> bool:
        """Whether a gradient flows through what it returns."""
        return self.convention.place == "loss"

    def raw(self, situation: Situation) -> Tensor:
        """What the function returns, checked for its shape; of either sign.

        Raises:
            CannotRunError: if it raises, or returns no tensor of real numbers.
            ShapeError: if it returns another shape than the convention says.
        """

        with torch.enable_grad():  # whatever it leaves behind
            return self.raw_in_place(situation.copied())

    def raw_in_place(self, situation: Situation) -> Tensor:
        """``raw``, called on the situation's own tensors: the function may change them."""

        def bound(*given: Any, **named: Any) -> Any:
            return self.function(*given, **{**self.arguments, **named})

        how = f"convention {self.convention.name!r}, {self.convention.summary}"
        try:
            found = self.convention.call(bound, situation)
        except (Exception, SystemExit) as error:
            lines = str(error).strip().splitlines()
            said = f": {lines[0][:300]}" if lines else ""
            raise CannotRunError(
                f"{self.name} raised {type(error).__name__}{said} when called by {how}; "
                "choose the convention that fits it, or bind the arguments it needs"
            ) from error
        kind = _unfit(found)
        if kind:
            raise CannotRunError(
                f"{self.name} returned {kind} when called by {how}; audit a function that returns "
                "a tensor of floating-point numbers"
            )
        sequences, steps, vocab = situation.logp.shape
        expected = {
            "vocabulary": (sequences, steps, vocab),
            "token": (sequences, steps),
            "sequence": (sequences,),
            "mean": (),
        }[self.convention.gives]
        if tuple(found.shape) != expected:
            raise ShapeError(
                f"{self.name} returned {tuple(found.shape)} for {sequences} sequences of {steps} steps, and "
                f"{how} means {expected}; choose the convention that fits it, or bind its reduction"
            )
        return found

    def gradients(
        self, value: Tensor, given: Tensor | Sequence[Tensor], *, again: bool = False
    ) -> tuple[Tensor | None, ...]:
        """The gradient of what it returned in each of ``given``; None where none flows.

        Args:
            value: a scalar made of what it returned.
            given: what to differentiate in.
            again: whether another gradient of the same value will be asked for.

        Raises:
            CannotRunError: if what it returned cannot be differentiated.
        """
        try:
            return torch.autograd.grad(value, given, allow_unused=True, retain_graph=again)
        except (RuntimeError, NotImplementedError) as error:
            said = str(error).strip().splitlines()[0][:300].partition(". ")[0]
            raise CannotRunError(
                f"what {self.name} returned cannot be differentiated ({said}); leave the backward pass to whoever "
                "calls it, or choose a convention that takes it as a reward or a metric"
            ) from error

    def parts(self, situation: Situation) -> Float[Tensor, "sequences parts"]:
        """A value for each token, or where there is only one for each sequence, that; of +KL's sign.

        A mean is called for one sequence at a time and multiplied by the tokens that count, so that the
        parts of a sequence always add up to it.
        """
        if self.repeats == 1:
            return self._parts(situation)
        return torch.stack([self._parts(situation) for _ in range(self.repeats)]).mean(0)

    def _parts(self, situation: Situation) -> Float[Tensor, "sequences parts"]:
        gives = self.convention.gives
        if gives == "mean":
            rows = [situation.only(slice(i, i + 1)) for i in range(len(situation.tokens))]
            found = torch.stack([self.raw(row) * row.mask.sum() for row in rows]).unsqueeze(-1)
        else:
            found = self.raw(situation)
            if gives == "sequence":
                found = found.unsqueeze(-1)
            if gives == "vocabulary":
                found = found.sum(-1)
        return self.convention.sign * found


def _unfit(found: Any) -> str:
    """What it is that a function returned, if it is no dense tensor of real numbers on the CPU."""
    if not isinstance(found, Tensor):
        return type(found).__name__
    if not found.is_floating_point():
        return str(found.dtype)
    if found.layout is not torch.strided or found.device.type != "cpu":
        return f"a {str(found.layout).removeprefix('torch.')} tensor on {found.device}"
    return ""
