"""KL from probabilities as people hold them: lists, arrays, tensors."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from kleash.autodiff import is_batched
from kleash.divergences.named import kl
from kleash.errors import CannotRunError, NotProbabilitiesError

ROUNDING_OF_THE_SUM = 1e-5
"""How far from 1 a sum may be by the rounding of float32 probabilities over a large vocabulary."""


def kl_from_probs(p: Any, q: Any) -> Float64[Tensor, "*batch"]:
    """KL(p || q) in nats from probabilities, computed and returned in float64.

    For one distribution or a batch of rows, the outcomes on the last axis. Zeros as in ``kl``. The
    rounding of a sum (up to 1e-5) is divided out; anything more is an error. Differentiable in tensors;
    the derivative in a probability that is 0 is taken as 0.

    Args:
        p: what is averaged over: a list, a numpy array or a tensor.
        q: the same outcomes under the other distribution.

    Raises:
        NotProbabilitiesError: a ValueError, if numbers are negative, not finite, absent, or do not sum to 1.
        VocabularyMismatchError: if the two have different numbers of outcomes.
        ShapeError: if their other axes differ.
        CannotRunError: inside ``torch.func.vmap``, where numbers cannot be checked.
    """
    return kl(_checked("p", p), _checked("q", q))


def _checked(name: str, values: Any) -> Tensor:
    """The log-probabilities of what really are probabilities."""
    probs = _in_float64(name, values)
    if is_batched(probs):
        raise CannotRunError(
            f"{name} is inside torch.func.vmap, where kl_from_probs cannot check it; give it all rows at once, or kl "
            "their logarithms"
        )
    if probs.ndim == 0 or probs.shape[-1] == 0:
        raise NotProbabilitiesError(
            f"{name} is empty (shape {tuple(probs.shape)}); give at least one probability"
        )
    wrong = ~((probs >= 0) & (probs < torch.inf))
    if wrong.any():
        first = [int(i) for i in wrong.nonzero()[0]]
        raise NotProbabilitiesError(
            f"{name}{first} is {probs[wrong][0].item():g}, which is not a probability; "
            "for log-probabilities use kl"
        )
    sums = probs.sum(-1, keepdim=True)
    off = (sums - 1).abs() > ROUNDING_OF_THE_SUM
    if off.any():
        raise NotProbabilitiesError(
            f"{name} sums to {sums[off][0].item():.6g}, not to 1; divide it by its sum first"
        )
    there = probs > 0
    return torch.where(there, torch.where(there, probs, 1.0).log(), -torch.inf) - sums.log()


def _in_float64(name: str, values: Any) -> Tensor:
    if isinstance(values, Tensor):
        if values.is_complex() or values.layout != torch.strided or values.device.type == "meta":
            raise NotProbabilitiesError(
                f"{name} is {values.dtype} of layout {values.layout} on {values.device}; give real numbers in a dense "
                "tensor"
            )
        return values.to(torch.float64)
    try:
        return torch.tensor(np.asarray(values, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise NotProbabilitiesError(
            f"{name} is no array of numbers ({error}); give rows of equal length"
        ) from error
