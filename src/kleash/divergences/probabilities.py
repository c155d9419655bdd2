"""KL from probabilities: lists, arrays and tensors, with checked values."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from kleash.autodiff import is_batched
from kleash.divergences.functions import kl
from kleash.errors import CannotRunError, NotProbabilitiesError

SUM_TOLERANCE = 1e-5
"""Largest difference of a sum from 1 that float32 rounding over a large vocabulary explains."""


def kl_from_probs(p: Any, q: Any) -> Float64[Tensor, "*batch"]:
    """KL(p || q) in nats from probabilities, computed and returned in float64.

    For one distribution or a batch of rows, with the outcomes on the last axis. Zeros as in ``kl``. Sums within 1e-5
    of 1 are normalised; others raise an error. Differentiable in tensors, in a probability of 0 through that sum alone.

    Args:
        p: the distribution of the average: a list, a numpy array or a tensor.
        q: the same outcomes under the other distribution.

    Raises:
        NotProbabilitiesError: a ValueError, if numbers are negative, not finite, missing, or do not sum to 1.
        VocabularyMismatchError: if the two have different numbers of outcomes.
        ShapeError: if their leading axes differ.
        CannotRunError: inside ``torch.func.vmap``, where values cannot be checked.

    >>> kleash.kl_from_probs([0.5, 0.5], [0.9, 0.1])
    tensor(0.5108, dtype=torch.float64)
    """
    return kl(_log_probs("p", p), _log_probs("q", q))


def _log_probs(name: str, values: Any) -> Tensor:
    """Check that ``values`` are probabilities and return their logarithms, normalised."""
    probs = _as_float64(name, values)
    if is_batched(probs):
        raise CannotRunError(
            f"{name} is inside torch.func.vmap, where kl_from_probs cannot check it; give all rows at once, or pass "
            "their logarithms to kl"
        )
    invalid = ~((probs >= 0) & (probs < torch.inf))
    if invalid.any():
        index = [int(i) for i in invalid.nonzero()[0]]
        raise NotProbabilitiesError(
            f"{name}{index} is {probs[invalid][0].item():g}, which is not a probability; "
            "for log-probabilities use kl"
        )
    sums = probs.sum(-1, keepdim=True)
    is_off = (sums - 1).abs() > SUM_TOLERANCE
    if is_off.any():
        raise NotProbabilitiesError(
            f"{name} sums to {sums[is_off][0].item():.6g}, not to 1; divide it by its sum first, in float64"
        )
    positive = probs > 0
    return torch.where(positive, torch.where(positive, probs, 1.0).log(), -torch.inf) - sums.log()


def _as_float64(name: str, values: Any) -> Tensor:
    """Convert a list, array or dense real tensor to a float64 tensor."""
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
            f"{name} is not an array of numbers ({error}); give rows of equal length"
        ) from error
