"""From hidden states to logits, in float32 whatever the weights are kept in."""

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.impl.pair import OneModel


def logits(model: OneModel) -> Float[Tensor, "*tokens vocab"]:
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


def pull_back_(
    gradient: Float[Tensor, "rows vocab"], z: Float[Tensor, "rows vocab"], model: OneModel
) -> None:
    """From the gradient in the finished logits ``z`` to that in ``hidden W^T + bias``, in place."""
    head = model.head
    if head.softcap is not None:
        steepness = z.mul(model.temperature / head.softcap).square_().neg_().add_(1.0)
        gradient.mul_(steepness)
    factor = head.scale / model.temperature
    if factor != 1.0:
        gradient.mul_(factor)


def into_hidden(
    gradient: Float[Tensor, "tokens vocab"], model: OneModel, tile: int
) -> Float[Tensor, "tokens dim"]:
    """``gradient W``, upcasting ``tile`` rows of the weight at a time."""
    weight = model.head.weight
    if weight is None:
        return gradient
    if weight.dtype == model.dtype:
        return gradient @ weight
    total = gradient.new_zeros(len(gradient), weight.shape[1])
    for start in range(0, len(weight), tile):
        total.addmm_(gradient[:, start : start + tile], weight[start : start + tile].to(model.dtype))
    return total
