"""A chunk of tokens at a time, the elementwise work a few rows at a time: no ``[tokens, vocab]`` ever."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.impl.compiling import compiled, wanted
from kleash.linear.impl.pair import Pair
from kleash.linear.impl.project import finish_, multiply_
from kleash.linear.impl.rows import ROOMS
from kleash.linear.options import LinearOptions

RowCore: TypeAlias = Callable[..., tuple[Tensor, ...]]
"""From the logits of a few rows to a tuple of numbers for each row."""
ROW_BLOCK = 2**18
"""Logits of one model whose elementwise work is done at once: 1 MiB, half of it a core's on two cores."""

ENOUGH_TOKENS = 1024
"""Tokens in a chunk beyond which a matmul gets no faster, however much memory the budget leaves."""


class Plan(NamedTuple):
    """How the work is cut."""

    chunk: int
    """Tokens whose logits exist together."""
    rows: int
    """Tokens whose elementwise work is done together."""
    tile: int
    """Rows of a weight that are upcast together."""


def plan(pair: Pair, options: LinearOptions) -> Plan:
    """As many tokens a chunk as help and as the budget allows after the other buffers, all chunks nearly equal.

    ``rows`` depends on the vocabulary and the budget alone, so that few shapes are ever compiled.
    """
    size, budget, words = pair.p.dtype.itemsize, options.buffer_bytes, pair.p.vocabulary
    rows = max(1, min(ROW_BLOCK // words, budget // 4 // (ROOMS * words * size)))
    budget -= rows * ROOMS * words * size
    tile = 1
    for model in (pair.p, pair.q):
        weight = model.head.weight
        if weight is not None and weight.dtype != model.dtype:
            row_bytes = max(1, weight.shape[1]) * size
            tile = max(tile, min(len(weight), options.buffer_bytes // 8 // row_bytes))
            budget -= tile * row_bytes // 2
    widths = 2 * words + pair.p.hidden.shape[1] + pair.q.hidden.shape[1]
    most = min(ENOUGH_TOKENS, max(1, budget // (widths * size)))
    rows = min(rows, most)
    most -= most % rows
    even = -(-pair.tokens // max(1, -(-pair.tokens // most)))
    return Plan(max(1, min(-(-even // rows) * rows, pair.tokens)), rows, tile)


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
        if pair.one_product:
            zq.copy_(zp)
        else:
            multiply_(zq, pair.q, pair.q.hidden[start : start + cut.chunk], cut.tile)
        yield Chunk(start, zp, zq)


def blocks(pair: Pair, chunk: Chunk, rows: int) -> Iterator[slice]:
    """Where in the chunk the next few rows stand, made logits just before they are used."""
    for start in range(0, len(chunk.zp), rows):
        here = slice(start, start + rows)
        finish_(chunk.zp[here], pair.p)
        finish_(chunk.zq[here], pair.q)
        yield here


class Core(NamedTuple):
    """What is asked of a few rows of logits: a tuple with a number for each row, one tuple per question."""

    fast: RowCore
    """The usual way; where its ``decisive`` numbers are not finite, nothing it said counts."""
    careful: RowCore
    """The specification, for logits of any kind."""
    decisive: slice
    """Which of the numbers tell whether the usual way worked: the KL divergences."""


def per_token(core: Core, pair: Pair, options: LinearOptions, *given: Tensor) -> tuple[Tensor, ...]:
    """What ``core`` says about each token; ``given`` is known about them beforehand."""
    cut = plan(pair, options)
    fast = in_room(core.fast, pair, cut)
    if wanted(pair, options):
        fast = whole_blocks(compiled(core.fast), cut.rows, fast)
    none = torch.empty((0, pair.p.vocabulary), dtype=pair.p.dtype, device=pair.p.hidden.device)
    kinds = core.careful(none, none, *(x[:0] for x in given))
    out = tuple(numbers.new_empty(pair.tokens) for numbers in kinds)
    for chunk in chunks(pair, cut):
        for here in blocks(pair, chunk, cut.rows):
            known = [x[chunk.start :][here] for x in given]
            found = checked(core, fast, (chunk.zp[here], chunk.zq[here], *known))
            for numbers, new in zip(out, found, strict=True):
                numbers[chunk.start :][here] = new
    return out


def in_room(core: RowCore, pair: Pair, cut: Plan) -> RowCore:
    """``core`` with memory to work in, which the next call uses again."""
    shape = (ROOMS, min(cut.rows, pair.tokens), pair.p.vocabulary)
    room = torch.empty(shape, dtype=pair.p.dtype, device=pair.p.hidden.device).unbind()

    def run(*rows: Tensor) -> tuple[Tensor, ...]:
        return core(*rows, room=[buffer[: len(rows[0])] for buffer in room])

    return run


def whole_blocks(core: RowCore, rows: int, others: RowCore) -> RowCore:
    """``core`` for blocks of that many rows, for which it is compiled, and ``others`` for what is left."""
    return lambda *x: core(*x) if len(x[0]) == rows else others(*x)


def checked(core: Core, fast: RowCore, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What the fast way says, or the careful one about the rows that it cannot do."""
    found = fast(*rows)
    rare = ~torch.stack(found[core.decisive]).isfinite().all(0)
    if rare.any():
        for numbers, right in zip(found, core.careful(*(x[rare] for x in rows)), strict=True):
            numbers[rare] = right
    return found
