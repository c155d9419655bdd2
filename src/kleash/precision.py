"""The precision of computations."""

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.autodiff import is_batched
from kleash.errors import NotProbabilitiesError


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


def nan_unless_normalised(
    values: Float[Tensor, "*batch"], **distributions: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """``values`` that were computed from log-probabilities, or NaN for rows whose probabilities do not sum to 1.

    On a CPU it raises an error instead, except for a sum of 0 or inf, which padding has, and in torch.compile and vmap,
    where no value can be read; reading one would make a GPU wait. The sum may be off by 5 %, since bfloat16 rounds
    log-probabilities by up to 0.03, and by 64 roundings of the dtype, since they may have been computed in it. Rows
    with NaN pass, and of two distributions values of 0, as of padding that is 0 on both sides.

    Raises:
        NotProbabilitiesError: it names the distribution.
    """
    for name, logp in distributions.items():
        total = at_least_float32(logp.detach()).logsumexp(-1)
        is_off = (total.abs() > max(0.05, 64 * torch.finfo(logp.dtype).eps)) & (
            (values != 0) | (len(distributions) == 1)
        )
        is_readable = total.device.type == "cpu" and not torch.compiler.is_compiling()
        is_wrong = is_off & total.isfinite()
        if is_readable and not is_batched(is_wrong) and is_wrong.any():
            raise NotProbabilitiesError(
                f"{name} is not normalised: its exponentials sum to {total[is_wrong][0].exp():.4g} in "
                f"{int(is_wrong.sum())} of {is_wrong.numel()} rows; give log_softmax(-1) of logits, or the logarithms "
                "of probabilities"
            )
        values = torch.where(is_off, torch.nan, values)
    return values


def bitwise_equal(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have equal shape, type and bits: 0.0 is not -0.0, and a NaN equals one of the same bits.

    A tensor on the device "meta" has no bits, and equals none.
    """
    if first.shape != second.shape or first.dtype != second.dtype or first.is_meta or second.is_meta:
        return False
    first, second = (x.detach().reshape(-1).contiguous().view(torch.uint8) for x in (first, second))
    return torch.equal(first, second.to(first.device))
