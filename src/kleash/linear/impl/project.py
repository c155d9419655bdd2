"""From hidden states to logits, in float32 whatever the weights are kept in."""

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.impl.pair import OneModel


def logits(model: OneModel) -> Float[Tensor, "tokens vocab"]:
    """All logits at once, over the temperature."""
    head, dtype = model.head, model.dtype
    z = model.hidden.to(dtype)
    if head.weight is not None:
        z = z @ head.weight.to(dtype).T
    if head.bias is not None:
        z = z + head.bias.to(dtype)
    z = head.scale * z
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return z / model.temperature


def multiply_(
    out: Float[Tensor, "tokens vocab"], model: OneModel, hidden: Float[Tensor, "tokens dim"], tile: int
) -> None:
    """Write ``hidden W^T`` into ``out``, upcasting ``tile`` rows of the weight at a time."""
    weight, hidden = model.head.weight, hidden.to(model.dtype)
    if weight is None:
        out.copy_(hidden)
    elif weight.dtype == model.dtype:
        torch.mm(hidden, weight.T, out=out)
    else:
        for start in range(0, len(weight), tile):
            rows = weight[start : start + tile].to(model.dtype)
            torch.mm(hidden, rows.T, out=out[:, start : start + tile])


def finish_(z: Float[Tensor, "rows vocab"], model: OneModel) -> None:
    """Make ``hidden W^T`` the logits over the temperature, in place."""
    head, factor = model.head, model.head.scale
    if head.bias is not None:
        z.add_(head.bias)
    if head.softcap is not None:
        z.mul_(factor / head.softcap).tanh_()
        factor = head.softcap
    factor /= model.temperature
    if factor != 1.0:
        z.mul_(factor)
