"""Matrix products in float32 by ``products.c``, where they are faster than those of torch and of oneDNN.

That is on a processor of AMD with AVX-512: torch multiplies there by MKL, which keeps its AVX-512 functions to Intel's
own processors, and neither MKL nor oneDNN fetches the next part of a weight during the arithmetic on the last one. A
chunk of 100 tokens reads the heads twice and reads and writes the whole weight gradient once, so that this is worth 10
to 15 % of the time of each product (``benchmarks/linear_peers.py``). Other processors have not been measured.

No sum depends on the number of threads, nor on the other tokens of the chunk, except the weight gradient's, which is a
sum over chunks.
"""

import ctypes
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.impl import onednn
from kleash.linear.impl.native.building import library
from kleash.linear.impl.pair import HeadInputs, HeadPair

LANES = 16
"""Tokens of a chunk come in multiples of this, where there are enough of them: a vector of logits has so many."""
BLOCK, STRIDE, WIDE, DEPTH = 112, 272, 32, 256
"""The sizes of products.c's packed parts, for a bound on the memory that it works in."""


@cache
def faster_here() -> bool:
    """Whether this is a processor where these products are the faster ones, and the library has them."""
    return onednn.is_amd_with_avx512() and hasattr(library(), "kleash_logits")


def supports(pair: HeadPair) -> bool:
    """Whether the products with both weights can be made here, and are faster so. The library is there."""
    return all(supports_model(model) for model in (pair.p, pair.q)) and faster_here()


def supports_model(model: HeadInputs) -> bool:
    """Whether the weight is float32 and each of its rows contiguous."""
    weight = model.head.weight
    if weight is None or {weight.dtype, model.dtype} != {torch.float32}:
        return False
    return weight.device.type == "cpu" and has_contiguous_rows(weight)


def has_contiguous_rows(x: Float[Tensor, "rows columns"]) -> bool:
    """Whether the numbers of a row lie side by side, and rows follow each other."""
    return (x.shape[1] <= 1 or x.stride(1) == 1) and (len(x) <= 1 or x.stride(0) >= x.shape[1])


def workspace_floats(dim: int, threads: int) -> tuple[int, int]:
    """Bounds on the numbers that products work in: for each token, and beside that."""
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


def add_to_weight_(
    total: Float[Tensor, "vocab dim"],
    gradient: Float[Tensor, "tokens vocab"],
    hidden: Float[Tensor, "tokens dim"],
) -> None:
    """Add ``gradient^T hidden`` to ``total``."""
    call("kleash_into_weight", gradient, hidden, total)


def add_to_hidden_(
    total: Float[Tensor, "tokens dim"],
    gradient: Float[Tensor, "tokens vocab"],
    weight: Float[Tensor, "vocab dim"],
) -> None:
    """Add ``gradient weight`` to ``total``."""
    call("kleash_into_hidden", gradient, weight, total)


def call(name: str, tokens_by: Tensor, other: Tensor, out: Tensor) -> None:
    """A product of the library: ``tokens_by`` has a row for each token."""
    factors = [x if has_contiguous_rows(x) else x.contiguous() for x in (tokens_by, other)]
    assert has_contiguous_rows(out)
    tokens, threads = len(tokens_by), ctypes.c_int64(torch.get_num_threads())
    words, dim = {
        "kleash_logits": other.shape,
        "kleash_into_weight": out.shape,
        "kleash_into_hidden": other.shape,
    }[name]
    sizes = ctypes.c_int64(tokens), ctypes.c_int64(words), ctypes.c_int64(dim)
    work = torch.empty(exact_workspace_floats(tokens, dim, threads.value))
    matrices = [y for x in factors for y in (pointer(x), ctypes.c_int64(x.stride(0)))]
    stride = ctypes.c_int64(out.stride(0))
    getattr(library(), name)(*matrices, *sizes, threads, pointer(work), pointer(out), stride)


def exact_workspace_floats(tokens: int, dim: int, threads: int) -> int:
    """How many numbers the products of so many tokens work in."""
    count = library().kleash_workspace
    count.restype = ctypes.c_int64
    return int(count(*map(ctypes.c_int64, (tokens, dim, threads))))


def pointer(x: Tensor) -> ctypes.c_void_p:
    """Where the tensor's numbers are."""
    assert x.dtype == torch.float32 and x.device.type == "cpu"
    return ctypes.c_void_p(x.data_ptr())
