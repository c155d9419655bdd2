"""The head's formula, from hidden states to logits and back, and the matrix products that it needs.

Logits are float32, or float64 if any tensor is, for every dtype of the weights.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.head import Head
from kleash.linear.pair import HeadInputs

CPUINFO = Path("/proc/cpuinfo")
TILE_SHARE = 4
"""A tile of a weight, and the product with it, take at most this part of the memory for a chunk."""


def logits(model: HeadInputs) -> Float[Tensor, "*tokens vocab"]:
    """All logits at once, divided by the temperature."""
    head, dtype = model.head, model.dtype
    product = model.hidden.to(dtype)
    if head.weight is not None:
        product = product @ head.weight.to(dtype).T
    z, t = head.logits_of_product(product), model.temperature
    return z / (t[..., None] if isinstance(t, Tensor) else t)


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL: on AMD processors with AVX-512.

    MKL uses AVX-512 only on Intel's processors. oneDNN, which torch has for other operations, uses what the processor
    supports, and is twice as fast (``benchmarks/linear_peers.py``).
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return False
    return CPUINFO.exists() and "AuthenticAMD" in CPUINFO.read_text(encoding="utf-8", errors="replace")


def uses_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of this dtype on this device are computed by oneDNN."""
    is_float32_on_cpu = dtype == torch.float32 and device.type == "cpu"
    return is_float32_on_cpu and bool(torch.backends.mkldnn.enabled) and onednn_is_faster()


def product(
    a: Float[Tensor, "rows inner"], b: Float[Tensor, "columns inner"]
) -> Float[Tensor, "rows columns"]:
    """``a b^T``, by oneDNN where it is faster."""
    if not uses_onednn(a.dtype, a.device):
        return a @ b.T
    return cast("Any", torch.ops.mkldnn)._linear_pointwise(a, b, None, "none", [], "")


def tile_rows(model: HeadInputs, nbytes: int, tokens: int) -> int:
    """Rows of the weight that are multiplied together: all, unless they are upcast or multiplied by oneDNN first."""
    weight = model.head.weight
    if weight is None or (weight.dtype == model.dtype and not uses_onednn(model.dtype, weight.device)):
        return max(1, 0 if weight is None else len(weight))
    longest = max(weight.shape[1], tokens, 1) * model.dtype.itemsize
    return max(1, min(len(weight), nbytes // TILE_SHARE // longest))


def tiles(
    weight: Float[Tensor, "vocab dim"], dtype: torch.dtype, size: int
) -> Iterator[tuple[slice, Float[Tensor, "some dim"]]]:
    """Each ``size`` rows of the weight in another dtype, and which they are."""
    for start in range(0, len(weight), size):
        rows = slice(start, start + size)
        yield rows, weight[rows].to(dtype)


def multiply_(out: Float[Tensor, "tokens vocab"], model: HeadInputs, tile: int) -> None:
    """Write ``hidden W^T`` into ``out``, ``tile`` rows of the weight at a time."""
    hidden, weight = model.hidden, model.head.weight
    if weight is None:  # the hidden states are the logits
        out.copy_(hidden)
    elif widens(hidden, weight, out.dtype, out.device):  # the GPU sums in float32 without a copy
        torch.mm(hidden, weight.T, out_dtype=out.dtype, out=out)
    elif tile >= len(weight) and weight.dtype == out.dtype and not uses_onednn(out.dtype, out.device):
        torch.mm(hidden.to(model.dtype), weight.T, out=out)
    else:
        hidden = hidden.to(model.dtype)
        for rows, part in tiles(weight, model.dtype, tile):
            out[:, rows] = product(hidden, part)


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
        gradient.mul_(z.mul(divisor / head.softcap).square_().neg_().add_(1.0))
    scale_(gradient, head.scale, divisor)


def hidden_gradient(
    gradient: Float[Tensor, "tokens vocab"], model: HeadInputs, tile: int
) -> Float[Tensor, "tokens dim"]:
    """The gradient in the hidden states, ``gradient W``, from that in the logits of this rank's rows of the head.

    Args:
        gradient: in the logits.
        model: whose head has the weight W; a head without one passes the hidden states on as logits.
        tile: the number of rows of W that are converted and multiplied at a time, where W is not multiplied whole.
    """
    weight = model.head.weight
    if weight is None:
        return gradient
    if weight.dtype == gradient.dtype and not uses_onednn(gradient.dtype, gradient.device):
        return gradient @ weight
    total = gradient.new_zeros(len(gradient), weight.shape[1])
    for rows, part in tiles(weight, gradient.dtype, tile):
        total.add_(product(gradient[:, rows], part.T))
    return total


def add_weight_gradient_(
    total: Float[Tensor, "vocab dim"],
    gradient: Float[Tensor, "tokens vocab"],
    hidden: Float[Tensor, "tokens dim"],
    tile: int,
) -> None:
    """Add ``gradient^T hidden`` to ``total``, by tiles if the product is narrower than the sum.

    oneDNN is no faster here: MKL is at factors of this layout.
    """
    hidden = hidden.to(gradient.dtype)
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.T, hidden)
    elif widens(gradient, hidden, total.dtype, total.device):
        torch.addmm(total, gradient.T, hidden, out_dtype=total.dtype, out=total)
    else:
        for start in range(0, len(total), tile):
            total[start : start + tile].add_(gradient[:, start : start + tile].T @ hidden)


def widens(a: Tensor, b: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device multiplies these half-precision factors with sums and a result in a wider dtype."""
    half = a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)
    return half and dtype == torch.float32 and device.type == "cuda"


def has_bfloat16_gradient(model: HeadInputs) -> bool:
    """Whether the gradient's products are taken in bfloat16: both factors are, and the device is fast at it.

    Their result is bfloat16 in any case. The logits never are, since their rounding would exceed a small KL.
    """
    weight, bf16 = model.head.weight, torch.bfloat16
    if weight is None or {model.hidden.dtype, weight.dtype} != {bf16} or model.dtype != torch.float32:
        return False
    return weight.device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
