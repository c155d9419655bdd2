"""A chunk of tokens at a time, the elementwise work a few rows at a time: no ``[tokens, vocab]`` ever."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.linear.impl import onednn
from kleash.linear.impl.compiling import compiled, goes_native, wanted
from kleash.linear.impl.native import products
from kleash.linear.impl.native.rows import SCRATCH_ROWS, scratch, threads_within
from kleash.linear.impl.pair import HeadPair, Where
from kleash.linear.impl.project import finish_, multiply_, stretch_, tiles
from kleash.linear.impl.vocab_shards import LOCAL_VOCAB, LocalVocab
from kleash.linear.options import LinearOptions

RowCore: TypeAlias = Callable[..., tuple[Any, ...]]
"""From the logits of a few rows to a tuple of numbers for each row."""
ROW_BLOCK = 2**18
"""Logits of one model whose elementwise work is done at once: 1 MiB, half of it a core's on two cores."""
NATIVE_BLOCK = 2**20
"""The same for the library in C, which goes row by row itself: enough for many cores, and still in a cache."""

ENOUGH_TOKENS = 1024
"""Tokens in a chunk beyond which a matmul gets no faster, however much memory the budget leaves."""

REDONE = 5
"""Buffers like the logits for rows that are done again, where they are not just a few."""


class Plan(NamedTuple):
    """How the work is cut."""

    chunk: int
    """Tokens whose logits exist together."""
    rows: int
    """Tokens whose elementwise work is done together."""
    tile: int
    """Rows of a weight that are upcast together; 0 where the library in C makes the products."""
    rooms: int
    """Buffers for the elementwise work."""
    threads: int = 0
    """Of the library in C; 0 where torch does the elementwise work."""


def plan(
    pair: HeadPair, options: LinearOptions, rooms: int, tokens: int | None = None, *, native: bool = False
) -> Plan:
    """As many tokens a chunk as help and as the budget allows after the other buffers, all chunks nearly equal.

    ``rows`` depends on the vocabulary and the budget alone, so that few shapes are ever compiled.
    ``tokens`` is how many of the pair's are read; all of them if it is left out. ``native``: for the library in C.
    """
    tokens = pair.tokens if tokens is None else tokens
    size, budget, words = pair.p.dtype.itemsize, options.chunk_bytes, pair.p.vocabulary
    if options.skip_below:
        budget -= options.chunk_bytes // 8
    dims = pair.p.hidden.shape[1] + pair.q.hidden.shape[1]
    if has_native_products(pair, options):
        tile = 0
        dim = max(pair.p.hidden.shape[1], pair.q.hidden.shape[1])
        per_token, more = products.workspace_floats(dim, torch.get_num_threads())
        budget -= more * size
        dims += per_token // 2
    else:
        tile = 1
        for model in (pair.p, pair.q):
            weight = model.head.weight
            if weight is not None and tiles(model):
                # Neither a tile of the weight nor the product with it is larger than this share of the budget.
                longest = max(weight.shape[1], min(ENOUGH_TOKENS, tokens), 1) * size
                tile = max(tile, min(len(weight), options.chunk_bytes // 8 // longest))
                if weight.dtype != model.dtype:
                    budget -= tile * weight.shape[1] * size // 2
    if tile and onednn.pays(pair.p.dtype, pair.p.hidden.device):
        # It packs a tile of the weight, and one of the gradient; and there is the product with a tile.
        budget -= tile * max(pair.p.hidden.shape[1], pair.q.hidden.shape[1]) * size
        dims += tile
    if pair.across is not LOCAL_VOCAB:
        # A message is for many tokens: the elementwise work of a whole chunk is done at once.
        most = min(ENOUGH_TOKENS, max(1, budget // (((2 + rooms + REDONE) * words + 2 * dims) * size)))
        most = pair.across.agreed_chunk(most, tokens)
        even = max(1, -(-tokens // max(1, -(-tokens // most))))
        return Plan(even, even, tile, rooms)
    block, threads = ROW_BLOCK // words, 0
    if native:
        threads = threads_within(words, options.chunk_bytes // 8)
        budget -= SCRATCH_ROWS * threads * words * size
        block = max(NATIVE_BLOCK // words, threads)
    rows = max(1, min(block, budget // 4 // (max(rooms, 1) * words * size)))
    budget -= rows * rooms * words * size
    most = min(ENOUGH_TOKENS, max(1, budget // ((2 * words + 2 * dims) * size)))
    rows = min(rows, most)
    multiple = products.LANES if tile == 0 and most >= products.LANES else rows
    most -= most % multiple
    even = -(-tokens // max(1, -(-tokens // most)))
    return Plan(max(1, min(-(-even // multiple) * multiple, tokens)), rows, tile, rooms, threads)


def has_native_products(pair: HeadPair, options: LinearOptions) -> bool:
    """Whether the library in C makes the products of this call."""
    if not goes_native(pair, options) or not products.supports(pair):
        return False
    dim = max(pair.p.hidden.shape[1], pair.q.hidden.shape[1])
    _, workspace = products.workspace_floats(dim, torch.get_num_threads())
    return workspace * pair.p.dtype.itemsize <= options.chunk_bytes // 8


def chunk_slices(tokens: int, cut: Plan) -> Iterator[slice]:
    """The tokens of each chunk.

    Where the library in C makes the products, chunks differ by at most a vector of tokens: a short chunk at the end
    would read the heads for few tokens.
    """
    if cut.tile or cut.chunk % products.LANES:
        for start in range(0, tokens, cut.chunk):
            yield slice(start, min(start + cut.chunk, tokens))
        return
    count, vectors = -(-tokens // cut.chunk), -(-tokens // products.LANES)
    ends = [vectors * (number + 1) // count * products.LANES for number in range(count)]
    for start, end in pairwise([0, *ends]):
        yield slice(start, min(end, tokens))


class Chunk(NamedTuple):
    """Some tokens, and the room where their logits are."""

    where: Where
    """Which they are."""
    pair: HeadPair
    """The two models on them."""
    zp: Float[Tensor, "chunk vocab"]
    zq: Float[Tensor, "chunk vocab"]
    """The logits under q, or, if ``apart``, by how much they are larger than those under p."""
    apart: bool


def chunks(
    pair: HeadPair, cut: Plan, *, positions: Int[Tensor, " some"] | None = None, apart: bool = False
) -> Iterator[Chunk]:
    """The products of hidden states and weights, chunk after chunk in the same memory.

    Of the tokens at ``positions``; of all if there are none. ``apart``: where one head serves both models,
    the difference of their logits comes as the product of the difference of their hidden states.
    """
    shape = (cut.chunk, pair.p.vocabulary)
    room_p, room_q = (torch.empty(shape, dtype=m.dtype, device=m.hidden.device) for m in (pair.p, pair.q))
    tokens = pair.tokens if positions is None else len(positions)
    for run in chunk_slices(tokens, cut):
        where = run if positions is None else positions[run]
        count = run.stop - run.start
        chunk = Chunk(
            where,
            pair.at(where),
            room_p[:count],
            room_q[:count],
            apart and pair.one_head,
        )
        fill_(chunk, cut.tile)
        yield chunk


def fill_(chunk: Chunk, tile: int) -> None:
    """Make the products."""
    p, q = chunk.pair.p, chunk.pair.q
    multiply_(chunk.zp, p, p.hidden, tile)
    if chunk.apart:
        multiply_(chunk.zq, q, q.hidden.to(q.dtype) - p.hidden.to(p.dtype), tile)
    elif chunk.pair.one_product:
        chunk.zq.copy_(chunk.zp)
    else:
        multiply_(chunk.zq, q, q.hidden, tile)


def blocks(chunk: Chunk, rows: int) -> Iterator[slice]:
    """Where in the chunk the next few rows stand, made logits just before they are used."""
    p, q = chunk.pair.p, chunk.pair.q
    for here in runs(chunk, rows):
        finish_(chunk.zp[here], p.head, p.divisor(here))
        if chunk.apart:
            stretch_(chunk.zq[here], q.head.scale, q.divisor(here))
        else:
            finish_(chunk.zq[here], q.head, q.divisor(here))
        yield here


def runs(chunk: Chunk, rows: int) -> Iterator[slice]:
    """Where in the chunk the next few rows stand."""
    for start in range(0, len(chunk.zp), rows):
        yield slice(start, start + rows)


class Core(NamedTuple):
    """What is asked of a few rows of logits: a tuple with a number for each row, one tuple per question."""

    fast: RowCore
    """The usual way; where its ``decisive`` numbers are not finite, nothing it said counts."""
    careful: RowCore
    """For logits of any kind, on whatever rank: the keyword ``across``; if ``apart``, it takes that, too."""
    decisive: slice
    """Which of the numbers tell whether the usual way worked."""
    rooms: int
    """How many buffers the usual way works in."""
    native: RowCore | None = None
    """The usual way by the library in C: its keyword ``room`` is what that works in."""
    compiles: bool = True
    """Whether torch may compile the usual way."""
    apart: bool = False
    """Whether it can do with the difference of the logits: it takes the keyword ``apart`` then."""


def per_token(
    core: Core,
    pair: HeadPair,
    options: LinearOptions,
    *given: Tensor,
    of_logits: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor, ...]:
    """What ``core`` says about each token; ``given`` is known about them beforehand.

    ``of_logits``: makes more tensors, with a row for each token, from the logits of a few rows of both models.
    """
    native = core.native is not None and goes_native(pair, options)
    cut = plan(pair, options, 0 if native else core.rooms, native=native)
    none = torch.empty((0, pair.p.vocabulary), dtype=pair.p.dtype, device=pair.p.hidden.device)
    kinds = *core.careful(none, none, *(x[:0] for x in given)), *(of_logits(none, none) if of_logits else ())
    out = tuple(numbers.new_empty((pair.tokens, *numbers.shape[1:])) for numbers in kinds)
    fast = fast_way(core, pair, cut, options)
    for chunk in chunks(pair, cut, apart=core.apart):
        traits = {"apart": chunk.apart} if core.apart else {}
        known, result = ([x[chunk.where] for x in xs] for xs in (given, out))
        for here in blocks(chunk, cut.rows):
            rows = chunk.zp[here], chunk.zq[here], *(x[here] for x in known)
            found = checked(core, fast(*rows, **traits), rows, chunk.apart, pair.across)
            found = *found, *(of_logits(rows[0], rows[1]) if of_logits else ())
            for numbers, new in zip(result, found, strict=True):
                numbers[here] = new
    return out


def fast_way(core: Core, pair: HeadPair, cut: Plan, options: LinearOptions) -> RowCore:
    """What does ``core``'s work: the library in C if it was planned, or what torch compiles, or torch's functions."""
    if core.native is not None and cut.threads:
        return partial(core.native, room=scratch(pair.p.vocabulary, cut.threads))
    return in_room(core.fast, pair, cut, options, compiles=core.compiles)


def in_room(
    core: RowCore, pair: HeadPair, cut: Plan, options: LinearOptions, *, compiles: bool = True
) -> RowCore:
    """``core`` with memory to work in, which the next call uses again; or compiled, for blocks that are full."""
    shape = (cut.rooms, min(cut.rows, cut.chunk), pair.p.vocabulary)
    room = torch.empty(shape, dtype=pair.p.dtype, device=pair.p.hidden.device).unbind()

    traits = {} if pair.across is LOCAL_VOCAB else {"across": pair.across}

    def run(*rows: Tensor, **more: Any) -> tuple[Any, ...]:
        return core(*rows, room=[buffer[: len(rows[0])] for buffer in room], **traits, **more)

    if not (compiles and wanted(pair, options)):
        return run
    quick = compiled(core)
    return lambda *x, **traits: quick(*x, **traits) if len(x[0]) == cut.rows else run(*x, **traits)


def checked(
    core: Core, found: tuple[Tensor, ...], rows: tuple[Tensor, ...], apart: bool, across: LocalVocab
) -> tuple[Tensor, ...]:
    """What the fast way says, or the careful one about the rows that it cannot do."""
    traits: dict[str, Any] = {"across": across, "apart": apart} if core.apart else {"across": across}
    for rare in across.row_parts(~torch.stack(found[core.decisive]).isfinite().all(0), rows[0].shape[1]):
        for numbers, right in zip(found, core.careful(*(x[rare] for x in rows), **traits), strict=True):
            numbers[rare] = right
    return found
