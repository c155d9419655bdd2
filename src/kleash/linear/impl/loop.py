"""A chunk of tokens at a time, the elementwise work a few rows at a time: no ``[tokens, vocab]`` ever."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.impl.compiling import compiled, wanted
from kleash.linear.impl.pair import Pair
from kleash.linear.impl.project import finish_, multiply_
from kleash.linear.options import LinearOptions

ROW_BLOCK = 2**17
"""Logits of one model whose elementwise work is done at once: 512 KiB, so that it stays in the cache."""


class Plan(NamedTuple):
    """How the work is cut."""

    chunk: int
    """Tokens whose logits exist together."""
    rows: int
    """Tokens whose elementwise work is done together."""
    tile: int
    """Rows of a weight that are upcast together."""


def plan(pair: Pair, options: LinearOptions) -> Plan:
    """As many tokens a chunk as the budget allows, all chunks nearly equal."""
    size, budget = pair.p.dtype.itemsize, options.buffer_bytes
    tile = 1
    for model in (pair.p, pair.q):
        weight = model.head.weight
        if weight is not None and weight.dtype != model.dtype:
            tile = max(1, min(len(weight), options.buffer_bytes // 8 // (weight.shape[1] * size)))
            budget -= tile * weight.shape[1] * size // 2
    widths = 2 * pair.p.vocabulary + pair.p.hidden.shape[1] + pair.q.hidden.shape[1]
    most = max(1, budget // (widths * size))
    chunks = max(1, -(-pair.tokens // most))
    chunk = -(-pair.tokens // chunks)
    return Plan(chunk, max(1, min(chunk, ROW_BLOCK // pair.p.vocabulary)), tile)


class Chunk(NamedTuple):
    """Some tokens, and room for their logits."""

    start: int
    zp: Float[Tensor, "chunk vocab"]
    zq: Float[Tensor, "chunk vocab"]


def chunks(pair: Pair, cut: Plan) -> Iterator[Chunk]:
    """The products of hidden states and weights, chunk after chunk in the same memory."""
    shape = (cut.chunk, pair.p.vocabulary)
    room_p, room_q = (torch.empty(shape, dtype=m.dtype, device=m.hidden.device) for m in (pair.p, pair.q))
    for start in range(0, pair.tokens, cut.chunk):
        zp, zq = room_p[: pair.tokens - start], room_q[: pair.tokens - start]
        multiply_(zp, pair.p, pair.p.hidden[start : start + cut.chunk], cut.tile)
        if pair.same:
            zq.copy_(zp)
        else:
            multiply_(zq, pair.q, pair.q.hidden[start : start + cut.chunk], cut.tile)
        yield Chunk(start, zp, zq)


def blocks(pair: Pair, chunk: Chunk, rows: int, *, whole: bool) -> Iterator[slice]:
    """Where in the chunk the next few rows stand, made logits just before they are used.

    ``whole``: each block has that many rows; the last reaches back over rows that were done already.
    """
    count = len(chunk.zp)
    for start in range(0, count, rows):
        end = min(start + rows, count)
        finish_(chunk.zp[start:end], pair.p)
        finish_(chunk.zq[start:end], pair.q)
        yield slice(max(0, end - rows) if whole else start, end)


class Core(NamedTuple):
    """What is asked of a few rows of logits: a tuple with a number for each row, one tuple per question."""

    fast: Callable[..., tuple[Tensor, ...]]
    """The usual way; where its ``decisive`` numbers are not finite, nothing it said counts."""
    careful: Callable[..., tuple[Tensor, ...]]
    """The specification, for logits of any kind."""
    decisive: slice
    """Which of the numbers tell whether the usual way worked: the KL divergences."""


def per_token(core: Core, pair: Pair, options: LinearOptions, *given: Tensor) -> tuple[Tensor, ...]:
    """What ``core`` says about each token; ``given`` is known about them beforehand."""
    cut = plan(pair, options)
    fast, whole = core.fast, False
    if wanted(pair, options):
        fast, whole = compiled(core.fast), True
    none = torch.empty((0, pair.p.vocabulary), dtype=pair.p.dtype, device=pair.p.hidden.device)
    out = tuple(
        numbers.new_empty(pair.tokens) for numbers in core.careful(none, none, *(x[:0] for x in given))
    )
    for chunk in chunks(pair, cut):
        for here in blocks(pair, chunk, cut.rows, whole=whole):
            known = [x[chunk.start :][here] for x in given]
            found = checked(core, fast, (chunk.zp[here], chunk.zq[here], *known))
            for numbers, new in zip(out, found, strict=True):
                numbers[chunk.start :][here] = new
    return out


def checked(
    core: Core, fast: Callable[..., tuple[Tensor, ...]], rows: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """What the fast way says, or the careful one about the rows that it cannot do."""
    found = fast(*rows)
    rare = ~torch.stack(found[core.decisive]).isfinite().all(0)
    if rare.any():
        for numbers, right in zip(found, core.careful(*(x[rare] for x in rows)), strict=True):
            numbers[rare] = right
    return found
