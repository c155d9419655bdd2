"""The loop over chunks of tokens: a chunk's logits exist together, and are processed a few rows at a time."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.linear.impl import onednn
from kleash.linear.impl.base import HeadPair, TokenIndex
from kleash.linear.impl.compiling import compiled, should_compile, uses_native
from kleash.linear.impl.native import products
from kleash.linear.impl.native.row_functions import SCRATCH_ROWS, new_scratch, threads_within
from kleash.linear.impl.project import finish_logits_, multiply_, needs_tiles, scale_
from kleash.linear.options import LinearOptions
from kleash.linear.vocab_shards import LocalVocab

RowCallable: TypeAlias = Callable[..., tuple[Any, ...]]
"""From the logits of a few rows to a tuple of tensors with an entry for each row."""
ROW_BLOCK = 2**18
"""Logits of one model in a block of rows: 1 MiB of float32, half of a core's cache on two cores."""
NATIVE_BLOCK = 2**20
"""The same for the library in C, which works row by row: enough rows for many cores, and still in a cache."""

ENOUGH_TOKENS = 1024
"""The most tokens in a chunk: a matmul gets no faster with more."""

FALLBACK_BUFFERS = 5
"""Buffers of a chunk's size that the fallback needs where ranks share a vocabulary."""


class ChunkPlan(NamedTuple):
    """The sizes of chunks, row blocks and weight tiles."""

    chunk_tokens: int
    """Tokens whose logits exist together."""
    block_rows: int
    """Tokens whose elementwise work is done together."""
    tile_rows: int
    """Rows of a weight that are upcast together; 0 where the library in C computes the products."""
    num_buffers: int
    """Buffers of a block's size for the elementwise work."""
    threads: int = 0
    """Threads of the library in C; 0 where torch does the elementwise work."""


class ProductPlan(NamedTuple):
    """How the products with the heads' weights are computed, and the memory that this takes besides their factors."""

    tile_rows: int
    """As in ``ChunkPlan``."""
    fixed_bytes: int
    """Memory that does not depend on the number of tokens."""
    dims: int
    """Further numbers for each token, counted in pairs like the dimensions of its hidden states (value, gradient)."""


def plan_chunks(
    pair: HeadPair,
    options: LinearOptions,
    num_buffers: int,
    tokens: int | None = None,
    *,
    native: bool = False,
) -> ChunkPlan:
    """The largest chunks that the memory allows beside the other buffers, all of nearly equal size.

    ``block_rows`` depends on the vocabulary and the memory only, so that torch compiles few shapes.

    Args:
        pair: the two models.
        options: the memory.
        num_buffers: buffers of a block's size for the elementwise work.
        tokens: how many of the pair's tokens are read; None for all.
        native: whether the library in C does the elementwise work.
    """
    tokens = pair.tokens if tokens is None else tokens
    plan = plan_products(pair, options, tokens)
    size, vocab_size, tile = pair.p.dtype.itemsize, pair.local_vocab_size, plan.tile_rows
    budget = options.chunk_bytes - plan.fixed_bytes
    dims = pair.p.hidden.shape[1] + pair.q.hidden.shape[1] + plan.dims
    if pair.is_sharded:
        # One message serves many tokens: the elementwise work of a whole chunk is done at once.
        row = (2 + num_buffers + FALLBACK_BUFFERS) * vocab_size + 2 * dims
        most = min(ENOUGH_TOKENS, max(1, budget // (row * size)))
        most = pair.vocab_shards.agreed_chunk(most, tokens)
        even = max(1, -(-tokens // max(1, -(-tokens // most))))
        return ChunkPlan(even, even, tile, num_buffers)
    block, threads = ROW_BLOCK // vocab_size, 0
    if native:
        threads = threads_within(vocab_size, options.chunk_bytes // 8)
        budget -= SCRATCH_ROWS * threads * vocab_size * size
        block = max(NATIVE_BLOCK // vocab_size, threads)
    rows = max(1, min(block, budget // 4 // (max(num_buffers, 1) * vocab_size * size)))
    budget -= rows * num_buffers * vocab_size * size
    most = min(ENOUGH_TOKENS, max(1, budget // ((2 * vocab_size + 2 * dims) * size)))
    rows = min(rows, most)
    multiple = products.LANES if tile == 0 and most >= products.LANES else rows
    most -= most % multiple
    even = -(-tokens // max(1, -(-tokens // most)))
    chunk_tokens = max(1, min(-(-even // multiple) * multiple, tokens))
    return ChunkPlan(chunk_tokens, rows, tile, num_buffers, threads)


def plan_products(pair: HeadPair, options: LinearOptions, tokens: int) -> ProductPlan:
    """How to compute the products with the heads' weights for this many tokens."""
    size, dim = pair.p.dtype.itemsize, max(pair.p.hidden.shape[1], pair.q.hidden.shape[1])
    if has_native_products(pair, options):
        per_token, fixed = products.workspace_floats(dim, torch.get_num_threads())
        return ProductPlan(0, fixed * size, per_token // 2)
    tile, fixed_bytes = 1, 0
    for model in (pair.p, pair.q):
        weight = model.head.weight
        if weight is not None and needs_tiles(model):
            # Neither a tile of the weight nor the product with it is larger than this share of the budget.
            longest = max(weight.shape[1], min(ENOUGH_TOKENS, tokens), 1) * size
            tile = max(tile, min(len(weight), options.chunk_bytes // 8 // longest))
            if weight.dtype != model.dtype:
                fixed_bytes += tile * weight.shape[1] * size // 2
    if not onednn.is_faster(pair.p.dtype, pair.p.hidden.device):
        return ProductPlan(tile, fixed_bytes, 0)
    # oneDNN packs a tile of the weight and one of the gradient, and there is the product with a tile.
    return ProductPlan(tile, fixed_bytes + tile * dim * size, tile)


def has_native_products(pair: HeadPair, options: LinearOptions) -> bool:
    """Whether the library in C computes the matrix products of this call."""
    if not uses_native(pair, options) or not products.supports(pair):
        return False
    dim = max(pair.p.hidden.shape[1], pair.q.hidden.shape[1])
    _, workspace = products.workspace_floats(dim, torch.get_num_threads())
    return workspace * pair.p.dtype.itemsize <= options.chunk_bytes // 8


def chunk_slices(tokens: int, plan: ChunkPlan) -> Iterator[slice]:
    """The slice of the tokens of each chunk.

    Where the library in C computes the products, chunks differ by at most a vector of tokens: a short chunk at the end
    would read the heads for few tokens.
    """
    if plan.tile_rows or plan.chunk_tokens % products.LANES:
        for start in range(0, tokens, plan.chunk_tokens):
            yield slice(start, min(start + plan.chunk_tokens, tokens))
        return
    count, vectors = -(-tokens // plan.chunk_tokens), -(-tokens // products.LANES)
    ends = [vectors * (number + 1) // count * products.LANES for number in range(count)]
    for start, end in pairwise([0, *ends]):
        yield slice(start, min(end, tokens))


class Chunk(NamedTuple):
    """A chunk of tokens and the memory of its logits."""

    positions: TokenIndex
    """Which of the call's tokens these are."""
    pair: HeadPair
    """The two models on these tokens."""
    zp: Float[Tensor, "chunk vocab"]
    zq: Float[Tensor, "chunk vocab"]
    """The logits under q, or, if ``q_is_delta``, their difference from the logits under p."""
    q_is_delta: bool


def chunks(
    pair: HeadPair,
    plan: ChunkPlan,
    *,
    positions: Int[Tensor, " some"] | None = None,
    q_is_delta: bool = False,
) -> Iterator[Chunk]:
    """Each chunk, with ``hidden W^T`` in place of its logits; all chunks use the same memory.

    Args:
        pair: the two models.
        plan: the sizes.
        positions: the tokens to read; None for all.
        q_is_delta: whether q's logits may come as their difference from p's, which is the product of the difference of
            the hidden states, where both models have one head.
    """
    shape = (plan.chunk_tokens, pair.local_vocab_size)
    buffer_p, buffer_q = (torch.empty(shape, dtype=m.dtype, device=m.hidden.device) for m in (pair.p, pair.q))
    tokens = pair.tokens if positions is None else len(positions)
    for rows in chunk_slices(tokens, plan):
        index = rows if positions is None else positions[rows]
        count = rows.stop - rows.start
        chunk = Chunk(
            index,
            pair.select(index),
            buffer_p[:count],
            buffer_q[:count],
            q_is_delta and pair.has_shared_head,
        )
        multiply_chunk_(chunk, plan.tile_rows)
        yield chunk


def multiply_chunk_(chunk: Chunk, tile: int) -> None:
    """Write ``hidden W^T`` of both models into the chunk."""
    p, q = chunk.pair.p, chunk.pair.q
    multiply_(chunk.zp, p, p.hidden, tile)
    if chunk.q_is_delta:
        multiply_(chunk.zq, q, q.hidden.to(q.dtype) - p.hidden.to(p.dtype), tile)
    elif chunk.pair.has_shared_product:
        chunk.zq.copy_(chunk.zp)
    else:
        multiply_(chunk.zq, q, q.hidden, tile)


def logit_blocks(chunk: Chunk, block_rows: int) -> Iterator[slice]:
    """The row blocks of a chunk; the rows of a block become logits just before it is yielded."""
    p, q = chunk.pair.p, chunk.pair.q
    for rows in row_blocks(chunk, block_rows):
        finish_logits_(chunk.zp[rows], p.head, p.divisor(rows))
        if chunk.q_is_delta:
            scale_(chunk.zq[rows], q.head.scale, q.divisor(rows))
        else:
            finish_logits_(chunk.zq[rows], q.head, q.divisor(rows))
        yield rows


def row_blocks(chunk: Chunk, block_rows: int) -> Iterator[slice]:
    """The row blocks of a chunk."""
    for start in range(0, len(chunk.zp), block_rows):
        yield slice(start, start + block_rows)


class RowFunction(NamedTuple):
    """A function of rows of logits, in its fast versions and its fallback.

    Each version takes the logits under p and under q, further tensors with an entry for each row, and keywords; it
    returns a tuple of tensors with an entry for each row.
    """

    fast: RowCallable
    """By torch. A row with a ``checked`` result that is not finite goes to the fallback. Keyword: ``buffers``."""
    fallback: RowCallable
    """For all logits. Keywords: ``vocab_shards``, and ``q_is_delta`` if ``accepts_delta``."""
    checked: slice
    """The results that show whether the fast version could compute a row."""
    num_buffers: int
    """The number of ``buffers``."""
    native: RowCallable | None = None
    """By the library in C. Keyword: ``scratch``."""
    compiles: bool = True
    """Whether torch may compile the fast version."""
    accepts_delta: bool = False
    """Whether q's logits may be their difference from p's; all versions take the keyword ``q_is_delta`` then."""


def evaluate_rows(
    function: RowFunction,
    pair: HeadPair,
    options: LinearOptions,
    *inputs: Tensor,
    of_logits: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor, ...]:
    """The results of a row function for each token.

    Args:
        function: the row function.
        pair: the two models.
        options: memory and compilation.
        inputs: its further arguments, with an entry for each token.
        of_logits: computes more tensors, with an entry for each row, from the logits of a few rows of both models.
    """
    native = function.native is not None and uses_native(pair, options)
    plan = plan_chunks(pair, options, 0 if native else function.num_buffers, native=native)
    fast = fast_version(function, pair, plan, options)
    results: tuple[Tensor, ...] | None = None
    for chunk in chunks(pair, plan, q_is_delta=function.accepts_delta):
        keywords = {"q_is_delta": chunk.q_is_delta} if function.accepts_delta else {}
        # All positions of a chunk are a slice here, so that these are views, and the results are written in place.
        chunk_inputs = [x[chunk.positions] for x in inputs]
        for block in logit_blocks(chunk, plan.block_rows):
            rows = chunk.zp[block], chunk.zq[block], *(x[block] for x in chunk_inputs)
            computed = fast(*rows, **keywords)
            computed = replace_failed_rows_(function, computed, rows, chunk.q_is_delta, pair.vocab_shards)
            computed = *computed, *(of_logits(rows[0], rows[1]) if of_logits else ())
            if results is None:
                results = tuple(x.new_empty((pair.tokens, *x.shape[1:])) for x in computed)
            for result, new in zip(results, computed, strict=True):
                result[chunk.positions][block] = new
    if results is None:
        none = torch.empty((0, pair.local_vocab_size), dtype=pair.p.dtype, device=pair.p.hidden.device)
        return *function.fallback(none, none, *inputs), *(of_logits(none, none) if of_logits else ())
    return results


def fast_version(
    function: RowFunction, pair: HeadPair, plan: ChunkPlan, options: LinearOptions
) -> RowCallable:
    """The version that the plan is for: by the library in C, compiled by torch, or by torch's functions."""
    if function.native is not None and plan.threads:
        return partial(function.native, scratch=new_scratch(pair.local_vocab_size, plan.threads))
    return with_buffers(function.fast, pair, plan, options, compiles=function.compiles)


def with_buffers(
    function: RowCallable, pair: HeadPair, plan: ChunkPlan, options: LinearOptions, *, compiles: bool = True
) -> RowCallable:
    """The function with buffers that all blocks share; if compiled, full blocks use the compiled version instead."""
    shape = (plan.num_buffers, min(plan.block_rows, plan.chunk_tokens), pair.local_vocab_size)
    buffers = torch.empty(shape, dtype=pair.p.dtype, device=pair.p.hidden.device).unbind()

    shards = {"vocab_shards": pair.vocab_shards} if pair.is_sharded else {}

    def run(*rows: Tensor, **keywords: Any) -> tuple[Any, ...]:
        return function(*rows, buffers=[buffer[: len(rows[0])] for buffer in buffers], **shards, **keywords)

    if not (compiles and should_compile(pair, options)):
        return run
    quick = compiled(function)
    return lambda *x, **keywords: (
        quick(*x, **keywords) if len(x[0]) == plan.block_rows else run(*x, **keywords)
    )


def replace_failed_rows_(
    function: RowFunction,
    results: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    q_is_delta: bool,
    vocab_shards: LocalVocab,
) -> tuple[Tensor, ...]:
    """Write the fallback's results into ``results`` for the rows that the fast version could not compute; return it."""
    keywords: dict[str, Any] = {"vocab_shards": vocab_shards}
    if function.accepts_delta:
        keywords["q_is_delta"] = q_is_delta
    failed = ~torch.stack(results[function.checked]).isfinite().all(0)
    for part in vocab_shards.row_parts(failed, rows[0].shape[1]):
        replacements = function.fallback(*(x[part] for x in rows), **keywords)
        for result, replacement in zip(results, replacements, strict=True):
            result[part] = replacement
    return results
