"""The head's formula, from hidden states to logits and back, and the matrix products that it needs.

Products are computed by the library in C, by oneDNN or by torch, whichever is fastest for the call and the machine.
Logits are float32, or float64 if any tensor is, for every dtype of the weights.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.autodiff import forward_mode_active
from kleash.linear.head import Head
from kleash.linear.impl import onednn
from kleash.linear.impl.base import HeadInputs, TokenIndex
from kleash.linear.impl.native import products
from kleash.linear.vocab_shards import LocalVocab


def logits(model: HeadInputs) -> Float[Tensor, "*tokens vocab"]:
    """All logits at once, divided by the temperature."""
    head, dtype = model.head, model.dtype
    product = model.hidden.to(dtype)
    if head.weight is not None:
        product = product_of_rows(model.vocab_shards.replicate(product), head.weight.to(dtype))
    z, t = head.logits_of_product(product), model.temperature
    return z / (t[..., None] if isinstance(t, Tensor) else t)


def product_of_rows(
    hidden: Float[Tensor, "*tokens dim"], weight: Float[Tensor, "vocab dim"]
) -> Float[Tensor, "*tokens vocab"]:
    """``hidden weight^T``, whose derivatives are not rounded either where a backward pass runs under autocast."""
    if forward_mode_active():
        return hidden @ weight.T
    apply = cast("Callable[..., Tensor]", _ProductOfRows.apply)  # pyright: ignore[reportUnknownMemberType]
    return apply(hidden, weight)


class _ProductOfRows(torch.autograd.Function):
    """The product without autocast in either pass; derivatives of every order are products of the same kind."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.autocast(hidden.device.type, enabled=False):
            return hidden @ weight.T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight = ctx.saved_tensors
        to_hidden = product_of_rows(gradient, weight.T) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return to_hidden, None
        return to_hidden, product_of_rows(gradient.flatten(0, -2).T, hidden.flatten(0, -2).T)


def normalised(z: Float[Tensor, "*tokens vocab"]) -> Float[Tensor, "*tokens vocab"]:
    """Log-probabilities; torch's log_softmax in float32 errs by 4e-6 on 32 000 tokens, since it sums sequentially."""
    return z - z.logsumexp(-1, keepdim=True)


def both_normalised(
    zp: Float[Tensor, "tokens vocab"], zq: Float[Tensor, "tokens vocab"], vocab_shards: LocalVocab
) -> tuple[Tensor, Tensor]:
    """The log-probabilities of this rank's part of the vocabulary, normalised over all ranks."""
    sum_p, sum_q = vocab_shards.log_sum_exp(zp, zq)
    return zp - sum_p, zq - sum_q


def multiply_(
    out: Float[Tensor, "tokens vocab"], model: HeadInputs, hidden: Float[Tensor, "tokens dim"], tile: int
) -> None:
    """Write ``hidden W^T`` into ``out``, ``tile`` rows of the weight at a time if the product ``needs_tiles``.

    Here and in the functions below, a ``tile`` of 0 means the library in C.
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
    elif not needs_tiles(model):
        torch.mm(hidden, weight.T, out=out)
    else:
        for start, rows in upcast_tiles(weight, model.dtype, tile):
            columns = out[:, start : start + tile]
            if onednn.is_faster(out.dtype, out.device):
                columns.copy_(onednn.product(hidden, rows))
            else:
                torch.mm(hidden, rows.T, out=columns)


def upcast_tiles(
    weight: Float[Tensor, "vocab dim"], dtype: torch.dtype, tile: int
) -> Iterator[tuple[int, Float[Tensor, "some dim"]]]:
    """Each ``tile`` rows of the weight in another dtype, and where they start; all tiles share one buffer."""
    has_dtype = weight.dtype == dtype
    buffer = weight if has_dtype else weight.new_empty(weight[:tile].shape, dtype=dtype)
    for start in range(0, len(weight), tile):
        rows = weight[start : start + tile]
        yield start, rows if has_dtype else buffer[: len(rows)].copy_(rows)


def needs_tiles(model: HeadInputs) -> bool:
    """Whether products with the weight are computed by tiles of its rows: to upcast them, or because it is faster."""
    weight = model.head.weight
    return weight is not None and (
        weight.dtype != model.dtype or onednn.is_faster(model.dtype, weight.device)
    )


def finish_logits_(
    z: Float[Tensor, "rows vocab"], head: Head, divisor: float | Float[Tensor, "rows 1"]
) -> None:
    """Turn ``hidden W^T`` into logits divided by the temperature, in place."""
    factor = head.scale
    if head.bias is not None:
        z.add_(head.bias)
    if head.softcap is not None:
        z.mul_(factor / head.softcap).tanh_()
        factor = head.softcap
    scale_(z, factor, divisor)


def scale_(z: Tensor, factor: float, divisor: float | Float[Tensor, "rows 1"]) -> None:
    """Multiply ``z`` by ``factor / divisor``, in place."""
    if isinstance(divisor, Tensor) or factor != divisor:
        z.mul_(factor / divisor)


def logits_backward_(
    gradient: Float[Tensor, "rows vocab"],
    z: Float[Tensor, "rows vocab"],
    head: Head,
    divisor: float | Float[Tensor, "rows 1"],
) -> None:
    """Turn the gradient in the logits ``z`` into that in ``hidden W^T + bias``, in place."""
    if head.softcap is not None:
        slope = z.mul(divisor / head.softcap).square_().neg_().add_(1.0)
        gradient.mul_(slope)
    scale_(gradient, head.scale, divisor)


def hidden_gradient(
    gradient: Float[Tensor, "tokens vocab"], model: HeadInputs, tile: int
) -> Float[Tensor, "tokens dim"]:
    """``gradient W``, summed over the ranks; by tiles where the product ``needs_tiles``."""
    weight = model.head.weight
    if weight is None:
        return gradient
    if tile == 0:
        total = gradient.new_zeros(len(gradient), weight.shape[1])
        products.add_hidden_gradient_(total, gradient, weight)
        return model.vocab_shards.all_reduce_gradient(total)
    if weight.dtype == gradient.dtype and not onednn.is_faster(gradient.dtype, gradient.device):
        return model.vocab_shards.all_reduce_gradient(gradient @ weight)
    total = gradient.new_zeros(len(gradient), weight.shape[1])
    for start, rows in upcast_tiles(weight, gradient.dtype, tile):
        columns = gradient[:, start : start + tile]
        if onednn.is_faster(gradient.dtype, gradient.device):
            total.add_(onednn.product(columns, rows.T))
        else:
            total.addmm_(columns, rows)
    return model.vocab_shards.all_reduce_gradient(total)


def add_weight_gradient_(
    total: Float[Tensor, "vocab dim"],
    gradient: Float[Tensor, "tokens vocab"],
    hidden: Float[Tensor, "tokens dim"],
    tile: int,
) -> None:
    """Add ``gradient^T hidden`` to ``total``, by tiles if the product is narrower than the sum."""
    hidden = hidden.to(gradient.dtype)
    if tile == 0:
        products.add_weight_gradient_(total, gradient, hidden)
        return
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.T, hidden)
        return
    # Until torch 2.10, addmm could not add a product that it widens to a sum that is float32 already.
    if widens(gradient, hidden, total) and torch.__version__ >= "2.10":
        torch.addmm(total, gradient.T, hidden, out_dtype=total.dtype, out=total)
        return
    for start in range(0, len(total), tile):
        total[start : start + tile].add_(gradient[:, start : start + tile].T @ hidden)


def set_rows_(
    total: Float[Tensor, "tokens dim"], index: TokenIndex, rows: Float[Tensor, "some dim"], *, add: bool
) -> None:
    """Write a chunk's rows to their tokens; if ``add``, add them to the rows of the other model."""
    total[index] = total[index] + rows if add else rows.to(total.dtype)


def widens(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether the device multiplies these half-precision factors with sums and result in float32."""
    half = a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)
    return half and out.dtype == torch.float32 and out.device.type == "cuda"


def has_bfloat16_gradient(model: HeadInputs) -> bool:
    """Whether the gradient's products are taken in bfloat16: both factors are, and the device is fast at it.

    Their result is bfloat16 in any case. The logits never are, since their rounding would exceed a small KL.
    """
    bf16 = torch.bfloat16
    if model.hidden.dtype != bf16 or model.head.weight is None or model.head.weight.dtype != bf16:
        return False
    if model.dtype != torch.float32:
        return False
    return model.hidden.device.type != "cpu" or _cpu_is_fast_at_bfloat16()


def _cpu_is_fast_at_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
