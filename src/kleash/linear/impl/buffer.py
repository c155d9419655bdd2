"""How much memory a call takes for its chunks where the options leave that open: by the device it runs on."""

from dataclasses import replace

import torch

from kleash.linear.impl.loop import ENOUGH_TOKENS, REDONE
from kleash.linear.impl.pair import HeadPair
from kleash.linear.impl.vocab_shards import LOCAL_VOCAB
from kleash.linear.options import CPU_BYTES, LinearOptions

SHARE = 8
"""Of the free memory of a GPU, a call takes at most one part in so many: eight processes that share a GPU and ask at
the same time take two thirds of it at most."""
MARGIN = 64 * 2**20
"""For what the loop needs beside a chunk's logits, which does not grow with it."""
WORK_BUFFERS = 5
"""Buffers like a chunk's logits for its elementwise work, where ranks share a vocabulary and do all of it at once."""


def with_buffer(options: LinearOptions, pair: HeadPair) -> LinearOptions:
    """The options with a number for ``buffer_bytes``.

    On a GPU, enough for 1024 tokens a chunk, or for half as many, a quarter and so on, within a share of what is
    free: fewer tokens would read the weights more often than multiplying by them takes. The steps keep the size of
    a chunk, and so the rounding of sums over chunks, from following every change of what is free.
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
    """What a chunk of so many tokens takes: logits of both models, products, the elementwise work, upcast tiles."""
    size, dims = pair.p.dtype.itemsize, pair.p.hidden.shape[1] + pair.q.hidden.shape[1]
    buffers = 2 if pair.across is LOCAL_VOCAB else 2 + WORK_BUFFERS + REDONE
    row = (buffers * pair.p.vocabulary + 2 * dims) * size
    # A quarter more: upcast tiles of weights and what ``skip_below`` gathers have shares of the whole.
    return max(1, rows) * row * 4 // 3 + MARGIN


def free_bytes(device: torch.device) -> int | None:
    """Memory of a GPU that nobody has, and half of what torch keeps for later, which may be in pieces.

    None where the driver does not say.
    """
    try:
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    except RuntimeError:
        return None
    return free + max(kept, 0) // 2


def allocatable(nbytes: int, device: torch.device) -> bool:
    """Whether so much can be had in one piece, which torch then keeps for the buffers of the call."""
    if torch.cuda.is_current_stream_capturing():
        return True
    try:
        torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    return True
