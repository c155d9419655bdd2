"""The precision of computations."""

import torch
from jaxtyping import Float
from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """Convert ``values`` to float32; float64 stays float64.

    Rounding a logit to bfloat16 changes it by up to 1/256 of its size, more than a KL of a few hundredths of a nat.
    So this is called before any subtraction.
    """
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def normalised(z: Float[Tensor, "*tokens vocab"]) -> Float[Tensor, "*tokens vocab"]:
    """Log-probabilities from logits, to 3e-6 in float32.

    On a CPU torch's log_softmax sums sequentially, and errs by several 1e-4 where one of 150 000 tokens has nearly all
    mass.
    """
    return z - z.logsumexp(-1, keepdim=True)


def bitwise_equal(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have equal shape, type and bits: 0.0 is not -0.0, and a NaN equals one of the same bits."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    first, second = (x.detach().reshape(-1).contiguous().view(torch.uint8) for x in (first, second))
    return torch.equal(first, second.to(first.device))
