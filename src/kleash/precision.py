"""In which precision things are computed."""

import torch
from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """``values`` in float32, or in float64 if that is what they are in already.

    Rounding a logit to bfloat16 moves it by up to 1/256 of its size, which drowns any KL
    below a few hundredths of a nat. So nothing is subtracted before this has been called.
    """
    return values if values.dtype == torch.float64 else values.to(torch.float32)
