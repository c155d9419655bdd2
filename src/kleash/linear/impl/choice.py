"""Chooses the backend of a call, and the memory for its chunks where ``buffer_bytes`` is None."""

from dataclasses import replace
from types import MappingProxyType

import torch

from kleash.divergences import Divergence
from kleash.errors import CannotRunError
from kleash.linear.impl.base import KL, Backend, HeadPair, Request
from kleash.linear.impl.chunk_loop import ENOUGH_TOKENS, FALLBACK_BUFFERS
from kleash.linear.impl.chunked import CHUNKED
from kleash.linear.impl.reference import REFERENCE
from kleash.linear.impl.stored_heads import StoredHeadBackend
from kleash.linear.impl.triton.backend import TRITON
from kleash.linear.options import CPU_BYTES, LinearOptions

BACKENDS: MappingProxyType[str, Backend] = MappingProxyType(
    {"reference": REFERENCE, "chunked": CHUNKED, "triton": TRITON}
)
SHARE = 8
"""A call takes at most the eighth part of a GPU's free memory: eight processes that share a GPU and choose at the same
time take at most two thirds of it."""
MARGIN = 64 * 2**20
"""For the memory of the loop beside a chunk's logits, which does not grow with the chunk."""
SHARDED_BUFFERS = 5
"""Buffers of a chunk's size for its elementwise work, where ranks share a vocabulary and do all of it at once."""


def prepare(
    pair: HeadPair, options: LinearOptions | None, divergence: Divergence = KL
) -> tuple[Backend, Request]:
    """The backend of a call, and the call with its memory chosen.

    Raises:
        CannotRunError: as ``select_backend``.
    """
    options = with_buffer(options or LinearOptions(), pair)
    request = Request(pair=pair, options=options, divergence=divergence)
    return select_backend(request), request


def stored_backend(request: Request) -> Backend:
    """The backend for heads whose rows are stored on several ranks, with "chunked" for the rounds by default.

    Raises:
        CannotRunError: for an implementation or compilation that cannot exchange tokens or rows.
    """
    name = "chunked" if request.options.impl == "auto" else request.options.impl
    if name == "triton":
        raise CannotRunError(
            "impl='triton' does not communicate, and the rows of this head are stored on several ranks; take "
            "impl='auto'"
        )
    if request.options.compile == "always":
        raise CannotRunError(
            "compile='always' cannot compile the collectives of a head that is stored on several ranks; take 'auto'"
        )
    return StoredHeadBackend(BACKENDS[name])


def select_backend(request: Request) -> Backend:
    """The backend that ``options.impl`` names; for "auto", triton for CUDA tensors if it can, else chunked.

    Raises:
        CannotRunError: if the backend cannot do the call.
    """
    if request.pair.storage is not None:
        return stored_backend(request)
    name = request.options.impl
    if name == "auto":
        on_gpu = request.pair.p.hidden.device.type == "cuda"
        name = "triton" if on_gpu and TRITON.unsupported(request) is None else "chunked"
    reason = BACKENDS[name].unsupported(request)
    if reason is not None:
        raise CannotRunError(f"impl={name!r} {reason}")
    return BACKENDS[name]


def with_buffer(options: LinearOptions, pair: HeadPair) -> LinearOptions:
    """The options with a number for ``buffer_bytes``.

    On a GPU, enough for 1024 tokens in a chunk, or half as many, a quarter and so on, within a share of the free
    memory: with fewer tokens, reading the weights takes longer than multiplying by them. The halving keeps the chunk
    size, and so the rounding of sums over chunks, from changing with every change of the free memory.
    """
    if options.buffer_bytes is not None:
        return options
    device = pair.p.hidden.device
    if device.type != "cuda":
        return replace(options, buffer_bytes=CPU_BYTES)
    free = free_bytes(device)
    if free is None:
        return replace(options, buffer_bytes=CPU_BYTES)
    rows = ENOUGH_TOKENS
    while rows > 1 and bytes_for(rows, pair) > free // SHARE:
        rows //= 2
    while rows > 1 and not allocatable(bytes_for(rows, pair), device):
        rows //= 2
    return replace(options, buffer_bytes=bytes_for(rows, pair))


def bytes_for(rows: int, pair: HeadPair) -> int:
    """The memory of a chunk of so many tokens: logits of both models, products, elementwise work, upcast tiles."""
    size, dims = pair.p.dtype.itemsize, pair.p.hidden.shape[1] + pair.q.hidden.shape[1]
    buffers = 2 + SHARDED_BUFFERS + FALLBACK_BUFFERS if pair.is_sharded else 2
    row = (buffers * pair.local_vocab_size + 2 * dims) * size
    # A third more: upcast tiles of weights take a share of the whole.
    return max(1, rows) * row * 4 // 3 + MARGIN


def free_bytes(device: torch.device) -> int | None:
    """A GPU's free memory and half of torch's cache, which may be fragmented; None if the driver cannot tell."""
    try:
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    except RuntimeError:
        return None
    return free + max(cached, 0) // 2


def allocatable(nbytes: int, device: torch.device) -> bool:
    """Whether a block of so many bytes can be allocated; torch then caches it for the call's buffers."""
    if torch.cuda.is_current_stream_capturing():
        return True
    try:
        torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    return True
