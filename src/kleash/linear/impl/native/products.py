"""Matrix products in float32 by ``products.c``, where they are faster than those of torch and of oneDNN.

That is on AMD processors with AVX-512: torch multiplies by MKL, which uses AVX-512 only on Intel's processors, and
neither MKL nor oneDNN prefetches the next part of a weight during the arithmetic. A chunk of 100 tokens reads the heads
twice and reads and writes the whole weight gradient once, so that this saves 10 to 15 % of the time of each product
(``benchmarks/linear_peers.py``). Other processors have not been measured.

No sum depends on the number of threads. Only the weight gradient, a sum over tokens, depends on the other tokens of a
chunk.
"""

import ctypes
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.impl import onednn
from kleash.linear.impl.base import HeadInputs, HeadPair
from kleash.linear.impl.native.building import library

LANES = 16
"""Tokens in a vector register; chunks are multiples of it, if they have that many tokens."""
BLOCK, STRIDE, WIDE, DEPTH = 112, 272, 32, 256
"""The sizes of the packed parts in products.c, for a bound on its workspace."""


@cache
def is_faster_on_this_machine() -> bool:
    """Whether these products are the faster ones on this processor, and the library has them."""
    return onednn.is_amd_with_avx512() and hasattr(library(), "kleash_logits")


def supports(pair: HeadPair) -> bool:
    """Whether the library computes the products with both weights, and is faster; it has to be built already."""
    return all(supports_model(model) for model in (pair.p, pair.q)) and is_faster_on_this_machine()


def supports_model(model: HeadInputs) -> bool:
    """Whether the weight is float32 on a CPU, with contiguous rows."""
    weight = model.head.weight
    if weight is None or {weight.dtype, model.dtype} != {torch.float32}:
        return False
    return weight.device.type == "cpu" and has_contiguous_rows(weight)


def has_contiguous_rows(x: Float[Tensor, "rows columns"]) -> bool:
    """Whether the entries of each row are contiguous, and rows do not overlap."""
    return (x.shape[1] <= 1 or x.stride(1) == 1) and (len(x) <= 1 or x.stride(0) >= x.shape[1])


def workspace_floats(dim: int, threads: int) -> tuple[int, int]:
    """Bounds on the workspace in float32 numbers: for each token, and in addition."""
    per_thread = 2 * BLOCK * STRIDE + WIDE * (BLOCK + DEPTH)
    return dim + WIDE + threads * 2 * BLOCK, WIDE * dim + threads * per_thread + LANES


def write_logits_(
    out: Float[Tensor, "tokens vocab"],
    hidden: Float[Tensor, "tokens dim"],
    weight: Float[Tensor, "vocab dim"],
) -> None:
    """Write ``hidden weight^T`` into ``out``."""
    if len(hidden) and hidden.shape[1]:
        call("kleash_logits", hidden, weight, out)
    else:
        out.zero_()


def add_weight_gradient_(
    total: Float[Tensor, "vocab dim"],
    gradient: Float[Tensor, "tokens vocab"],
    hidden: Float[Tensor, "tokens dim"],
) -> None:
    """Add ``gradient^T hidden``, the gradient in the weight, to ``total``."""
    call("kleash_weight_gradient", gradient, hidden, total)


def add_hidden_gradient_(
    total: Float[Tensor, "tokens dim"],
    gradient: Float[Tensor, "tokens vocab"],
    weight: Float[Tensor, "vocab dim"],
) -> None:
    """Add ``gradient weight``, the gradient in the hidden states, to ``total``."""
    call("kleash_hidden_gradient", gradient, weight, total)


def call(name: str, first: Tensor, other: Tensor, out: Tensor) -> None:
    """Call a product of the library; ``first`` has a row for each token."""
    factors = [x if has_contiguous_rows(x) else x.contiguous() for x in (first, other)]
    assert has_contiguous_rows(out)
    tokens, threads = len(first), ctypes.c_int64(torch.get_num_threads())
    vocab_size, dim = {
        "kleash_logits": other.shape,
        "kleash_weight_gradient": out.shape,
        "kleash_hidden_gradient": other.shape,
    }[name]
    sizes = ctypes.c_int64(tokens), ctypes.c_int64(vocab_size), ctypes.c_int64(dim)
    workspace = torch.empty(exact_workspace_floats(tokens, dim, threads.value))
    matrices = [y for x in factors for y in (pointer(x), ctypes.c_int64(x.stride(0)))]
    stride = ctypes.c_int64(out.stride(0))
    getattr(library(), name)(*matrices, *sizes, threads, pointer(workspace), pointer(out), stride)


def exact_workspace_floats(tokens: int, dim: int, threads: int) -> int:
    """The workspace of the products of so many tokens, in float32 numbers."""
    count = library().kleash_workspace
    count.restype = ctypes.c_int64
    return int(count(*map(ctypes.c_int64, (tokens, dim, threads))))


def pointer(x: Tensor) -> ctypes.c_void_p:
    """The address of a tensor's data."""
    assert x.dtype == torch.float32 and x.device.type == "cpu"
    return ctypes.c_void_p(x.data_ptr())
