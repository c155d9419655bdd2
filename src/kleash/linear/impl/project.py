"""From hidden states to logits, in float32 whatever the weights are kept in, and back."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.head import Head
from kleash.linear.impl import onednn
from kleash.linear.impl.native import products
from kleash.linear.impl.pair import HeadInputs, Where
from kleash.linear.impl.vocab_shards import LocalVocab


def logits(model: HeadInputs) -> Float[Tensor, "*tokens vocab"]:
    """All logits at once, over the temperature."""
    head, dtype = model.head, model.dtype
    z = model.hidden.to(dtype)
    if head.weight is not None:
        z = model.across.replicate(z) @ head.weight.to(dtype).T
    if head.bias is not None:
        z = z + head.bias.to(dtype)
    z = head.scale * z
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    t = model.temperature
    return z / (t[..., None] if isinstance(t, Tensor) else t)


def normalised(z: Float[Tensor, "*tokens vocab"]) -> Float[Tensor, "*tokens vocab"]:
    """log_softmax, whose float32 version errs by 4e-6 on 32 000 tokens: it sums one after another."""
    return z - z.logsumexp(-1, keepdim=True)


def both_normalised(
    zp: Float[Tensor, "tokens vocab"], zq: Float[Tensor, "tokens vocab"], across: LocalVocab
) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the words here, among all words on whatever rank."""
    sum_p, sum_q = across.log_sum_exp(zp, zq)
    return zp - sum_p, zq - sum_q


def multiply_(
    out: Float[Tensor, "tokens vocab"], model: HeadInputs, hidden: Float[Tensor, "tokens dim"], tile: int
) -> None:
    """Write ``hidden W^T`` into ``out``, for ``tile`` rows of the weight at a time if that ``tiles``.

    A tile of 0 rows, here and below: by the library in C.
    """
    weight = model.head.weight
    if weight is not None and widens(hidden, weight, out):
        torch.mm(hidden, weight.T, out_dtype=out.dtype, out=out)
        return
    hidden = hidden.to(model.dtype)
    if weight is None:
        out.copy_(hidden)
    elif tile == 0:
        products.write_logits_(out, hidden, weight)
    elif not tiles(model):
        torch.mm(hidden, weight.T, out=out)
    else:
        for start, rows in upcast(weight, model.dtype, tile):
            here = out[:, start : start + tile]
            if onednn.pays(out.dtype, out.device):
                here.copy_(onednn.product(hidden, rows))
            else:
                torch.mm(hidden, rows.T, out=here)


def upcast(
    weight: Float[Tensor, "vocab dim"], dtype: torch.dtype, tile: int
) -> Iterator[tuple[int, Float[Tensor, "some dim"]]]:
    """Where the next ``tile`` rows start, and these rows in another dtype, all of them in the same memory."""
    as_it_is = weight.dtype == dtype
    room = weight if as_it_is else weight.new_empty(weight[:tile].shape, dtype=dtype)
    for start in range(0, len(weight), tile):
        rows = weight[start : start + tile]
        yield start, rows if as_it_is else room[: len(rows)].copy_(rows)


def tiles(model: HeadInputs) -> bool:
    """Whether products with the weight are made for some of its rows at a time: these are upcast, or it is faster."""
    weight = model.head.weight
    return weight is not None and (weight.dtype != model.dtype or onednn.pays(model.dtype, weight.device))


def finish_(z: Float[Tensor, "rows vocab"], head: Head, divisor: float | Float[Tensor, "rows 1"]) -> None:
    """Make ``hidden W^T`` the logits over the temperature, in place."""
    factor = head.scale
    if head.bias is not None:
        z.add_(head.bias)
    if head.softcap is not None:
        z.mul_(factor / head.softcap).tanh_()
        factor = head.softcap
    stretch_(z, factor, divisor)


def stretch_(z: Tensor, factor: float, divisor: float | Float[Tensor, "rows 1"]) -> None:
    """``z`` times the factor over the divisor, in place."""
    if isinstance(divisor, Tensor) or factor != divisor:
        z.mul_(factor / divisor)


def pull_back_(
    gradient: Float[Tensor, "rows vocab"],
    z: Float[Tensor, "rows vocab"],
    head: Head,
    divisor: float | Float[Tensor, "rows 1"],
) -> None:
    """From the gradient in the finished logits ``z`` to that in ``hidden W^T + bias``, in place."""
    if head.softcap is not None:
        steepness = z.mul(divisor / head.softcap).square_().neg_().add_(1.0)
        gradient.mul_(steepness)
    stretch_(gradient, head.scale, divisor)


def into_hidden(
    gradient: Float[Tensor, "tokens vocab"], model: HeadInputs, tile: int
) -> Float[Tensor, "tokens dim"]:
    """``gradient W`` of all ranks: at once if the weight has its dtype, unless that ``tiles``."""
    weight = model.head.weight
    if weight is None:
        return gradient
    if tile == 0:
        total = gradient.new_zeros(len(gradient), weight.shape[1])
        products.add_to_hidden_(total, gradient, weight)
        return model.across.all_reduce_gradient(total)
    if weight.dtype == gradient.dtype and not onednn.pays(gradient.dtype, gradient.device):
        return model.across.all_reduce_gradient(gradient @ weight)
    total = gradient.new_zeros(len(gradient), weight.shape[1])
    for start, rows in upcast(weight, gradient.dtype, tile):
        some = gradient[:, start : start + tile]
        if onednn.pays(gradient.dtype, gradient.device):
            total.add_(onednn.product(some, rows.T))
        else:
            total.addmm_(some, rows)
    return model.across.all_reduce_gradient(total)


def into_weight_(
    total: Float[Tensor, "vocab dim"],
    gradient: Float[Tensor, "tokens vocab"],
    hidden: Float[Tensor, "tokens dim"],
    tile: int,
) -> None:
    """Add ``gradient^T hidden`` to ``total``, by tiles if the product is narrower than the sum."""
    hidden = hidden.to(gradient.dtype)
    if tile == 0:
        products.add_to_weight_(total, gradient, hidden)
        return
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.T, hidden)
        return
    # Until torch 2.10, addmm could not add what it widens to what is float32 already.
    if widens(gradient, hidden, total) and torch.__version__ >= "2.10":
        torch.addmm(total, gradient.T, hidden, out_dtype=total.dtype, out=total)
        return
    for start in range(0, len(total), tile):
        total[start : start + tile].add_(gradient[:, start : start + tile].T @ hidden)


def add_rows_(
    total: Float[Tensor, "tokens dim"], where: Where, rows: Float[Tensor, "some dim"], *, shared: bool
) -> None:
    """Put a chunk's rows where they belong; add them to what the other model may have put there, if it is shared."""
    total[where] = total[where] + rows if shared else rows.to(total.dtype)


def widens(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether the device multiplies these two as they are and adds up, and gives out, in float32."""
    half = a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)
    return half and out.dtype == torch.float32 and out.device.type == "cuda"


def narrow(model: HeadInputs) -> bool:
    """Whether the gradient's products may be taken in bfloat16: both factors are, and the device is fast at it.

    What comes out of them is bfloat16 anyway; the logits, whose rounding would drown a small KL, never are.
    """
    bf16 = torch.bfloat16
    if model.hidden.dtype != bf16 or model.head.weight is None or model.head.weight.dtype != bf16:
        return False
    if model.dtype != torch.float32:
        return False
    return model.hidden.device.type != "cpu" or _cpu_is_fast_at_bfloat16()


def _cpu_is_fast_at_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
