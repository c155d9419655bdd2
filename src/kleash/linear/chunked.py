"""The loop over chunks of tokens: a chunk's logits exist together, and are processed in float64 a few rows at a time.

Of ranks that store a head between them and have their own tokens, a chunk has some of each: their hidden states move to
the rows, and this rank keeps the results of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.arguments import type_text
from kleash.autodiff import refuse_transforms
from kleash.divergences import DIVERGENCES, Divergence
from kleash.errors import ShapeError
from kleash.linear import compiled_rows
from kleash.linear import rows as row_functions
from kleash.linear.compiled_rows import compiled, should_compile
from kleash.linear.gradient_sums import GradientSums
from kleash.linear.pair import HeadPair, Tensors, TokenIndex
from kleash.linear.products import finish_logits_, logits_backward_, multiply_, tile_rows, widens
from kleash.linear.rows import KL, TermRows
from kleash.linear.types import (
    INTEGER_FIELDS,
    LinearOptions,
    StatisticsAndTop,
    TokenStatistics,
    TokenTerms,
    TopTokens,
)

RowFunction: TypeAlias = Callable[..., tuple[Any, ...]]
"""From the logits of a few rows, and other columns, to a tuple of tensors with an entry for each row."""
Columns: TypeAlias = Tensor | TermRows | TokenTerms
"""What is known of some rows: a tensor, or a tuple of tensors, with an entry for each."""
Objective: TypeAlias = Callable[[TokenTerms, slice], Tensor]
"""From the terms of some tokens, and the slice of the flattened tokens that they are, to a loss for each token."""
REVERSE_KL = DIVERGENCES["reverse_kl"]
CPU_BYTES = 128 * 2**20
"""The default of ``buffer_bytes`` on a CPU, where larger chunks are no faster."""
ENOUGH_TOKENS = 1024
"""The most tokens in a chunk: a matmul gets no faster with more."""
ROW_BLOCK = 2**17
"""Logits of one model whose elementwise work is done together on a CPU: a MiB of float64. Half as many take a tenth
longer, since a block costs a fifth of a millisecond whatever its size; twice as many are no faster."""
COMPILED_BLOCK = 2**20
"""Such logits where the work is compiled, and keeps few results."""
ROW_BUFFERS = 8
"""Tensors of a block's size in float64 that exist together."""
COMPILED_BUFFERS, GPU_BUFFERS = 6, 2
"""Such tensors where the work is compiled, in the dtype of the logits: on a CPU, and on a GPU."""
SMALL_BLOCK = 2**14
"""Logits of one model that the functions for rows that are not finite take at once; they need many buffers."""


class Plan(NamedTuple):
    """The sizes of chunks, row blocks and weight tiles."""

    chunk_tokens: int
    """Tokens of this rank whose logits exist together."""
    block_rows: int
    """Tokens whose elementwise work is done together."""
    tiles: tuple[int, int]
    """Rows of p's weight, and of q's, that are multiplied together."""
    counts: list[int]
    """Tokens of each rank whose tokens move; of this rank alone if none do."""


def plan_chunks(pair: HeadPair, options: LinearOptions, tokens: int, is_compiled: bool) -> Plan:
    """The largest chunks that the memory allows, all of nearly equal size and at most ``ENOUGH_TOKENS``.

    Raises:
        CannotRunError: if ranks that share the vocabulary have different numbers of tokens.
    """
    size, vocab_size = pair.dtype.itemsize, max(1, pair.vocab_shards.local_size)
    dims, is_gpu = sum(model.hidden.shape[-1] for model in pair), pair.device.type != "cpu"
    token_bytes = (2 * vocab_size + 2 * dims) * size
    default = 2 * ENOUGH_TOKENS * token_bytes if is_gpu else CPU_BYTES
    nbytes = default if options.buffer_bytes is None else options.buffer_bytes
    compiled_buffers = GPU_BUFFERS if is_gpu else COMPILED_BUFFERS
    row_bytes = vocab_size * (
        compiled_buffers * size if is_compiled else ROW_BUFFERS * torch.float64.itemsize
    )
    block, share = (COMPILED_BLOCK if is_compiled else ROW_BLOCK) // vocab_size, 4
    if is_gpu or pair.is_sharded:  # it costs half a millisecond of launches, or messages, whatever its size
        block, share = nbytes, 2
    block = max(1, min(block, nbytes // share // row_bytes))
    p, q = (tile_rows(model, nbytes, min(ENOUGH_TOKENS, tokens)) for model in pair)
    upcast = sum(
        tile * model.hidden.shape[-1] * size
        for tile, model in zip((p, q), pair, strict=True)
        if model.head.weight is not None
        and tile < len(model.head.weight)
        and not widens(model.hidden, model.head.weight, pair.dtype, pair.device)
    )
    most = min(ENOUGH_TOKENS, max(1, (nbytes - block * row_bytes - upcast) // token_bytes))
    most, block, counts = pair.vocab_shards.agreed_sizes(most, block, tokens)
    chunks = max(1, -(-max(counts) // most))
    return Plan(max(1, -(-max(counts) // chunks)), block, (p, q), counts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """A chunk of tokens, the memory of its logits, and which of its tokens are this rank's."""

    pair: HeadPair
    """The two models on these tokens: of all ranks, if theirs move."""
    index: TokenIndex
    """Which of this rank's tokens these are."""
    counts: list[int]
    """Tokens of each rank in the chunk."""
    zp: Float[Tensor, "chunk vocab"]
    zq: Float[Tensor, "chunk vocab"]
    plan: Plan

    @property
    def local(self) -> slice:
        """Where this rank's tokens stand in the chunk."""
        return self.pair.vocab_shards.local_part(self.counts)

    def spread(self, values: Tensor) -> Tensor:
        """An entry for each token of the chunk, from one for each of this rank's."""
        return self.pair.vocab_shards.gather_tokens(values, self.counts)

    def logit_blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """A few rows at a time, with both models' logits, which are finished just before."""
        for rows in self.row_blocks():
            for model, z in zip(self.pair, (self.zp, self.zq), strict=True):
                finish_logits_(z[rows], model.head, model.divisor(rows))
            yield rows, self.zp[rows], self.zq[rows]

    def likeliest(self, number: int, *log_sums: Float[Tensor, "chunk 1"]) -> list[TopTokens]:
        """The likeliest tokens of both models, whose logits are finished and have these log-sum-exps; a collective."""
        shards = self.pair.vocab_shards
        tops = [shards.largest(*row_functions.top_rows(z, number)) for z in (self.zp, self.zq)]
        return [
            TopTokens(ids, (logits - log_sum).exp_())
            for (logits, ids), log_sum in zip(tops, log_sums, strict=True)
        ]

    def row_blocks(self) -> Iterator[slice]:
        """A few rows at a time."""
        for start in range(0, len(self.zp), self.plan.block_rows):
            yield slice(start, min(start + self.plan.block_rows, len(self.zp)))


def chunks(
    pair: HeadPair,
    options: LinearOptions,
    is_compiled: bool,
    positions: Int[Tensor, " some"] | None = None,
) -> Iterator[Chunk]:
    """Each chunk, with ``hidden W^T`` in place of its logits; all chunks use the same memory.

    Args:
        pair: the two models.
        options: the memory.
        is_compiled: whether the row functions are, which take more rows together.
        positions: which of this rank's tokens are read; None for all.
    """
    tokens = pair.tokens if positions is None else len(positions)
    plan = plan_chunks(pair, options, tokens, is_compiled)
    keep_freed_memory()
    shape = len(plan.counts) * plan.chunk_tokens, pair.vocab_shards.local_size
    buffers = [torch.empty(shape, dtype=pair.dtype, device=pair.device) for _ in pair]
    for start in range(0, max(plan.counts), plan.chunk_tokens):
        rows = slice(min(start, tokens), min(start + plan.chunk_tokens, tokens))
        index = rows if positions is None else positions[rows]
        counts = [max(0, min(plan.chunk_tokens, count - start)) for count in plan.counts]
        part = pair.select(index).gathered(counts)
        zp, zq = (buffer[: part.tokens] for buffer in buffers)
        multiply_(zp, part.p, plan.tiles[0])
        if part.p.hidden is part.q.hidden and part.p.head.weight is part.q.head.weight:
            zq.copy_(zp)
        else:
            multiply_(zq, part.q, plan.tiles[1])
        yield Chunk(pair=part, index=index, counts=counts, zp=zp, zq=zq, plan=plan)


@cache
def keep_freed_memory() -> None:
    """Have the C library keep the memory of freed blocks of rows for the next ones.

    glibc gives freed tensors of a block's size back to the system, which clears each page again for the next block, and
    this can take longer than the elementwise work. It keeps what is smaller than the largest mapping of at most 32 MiB
    that was freed before.
    """
    bytearray(2**25 - 2**16)


def select_rows(columns: Columns, index: TokenIndex) -> Columns:
    """What is known of some of the rows."""
    if isinstance(columns, Tensor):
        return columns[index]
    return type(columns)(*(x[index] for x in columns))


def compute_rows(
    pair: HeadPair, fast: RowFunction, general: RowFunction, zp: Tensor, zq: Tensor, *columns: Columns
) -> tuple[Any, ...]:
    """The results of ``fast`` for a block of rows, with those of ``general`` in rows where one is not finite.

    Finite must be the results with one number for each row, not the gradients in the logits.

    Args:
        pair: both models.
        fast: a function of rows whose logits are finite.
        general: the same function of any rows, which is slower.
        zp: logits of the block under p, [rows, vocab].
        zq: logits of the block under q.
        columns: further arguments of both functions, with an entry for each row.
    """
    results = fast(zp, zq, *columns, pair.vocab_shards)
    compute_not_finite_(pair, results, len(zp), general, zp, zq, *columns)
    return results


def compute_not_finite_(
    pair: HeadPair,
    results: tuple[Any, ...],
    block: int,
    general: RowFunction,
    zp: Tensor,
    zq: Tensor,
    *columns: Columns,
) -> None:
    """Put the results of ``general`` into rows where one is not finite; ``block``: rows for which there is memory."""
    sums = [x for x in results if x is not None and x.shape[1] == 1]
    not_finite = (~torch.cat(sums, -1).isfinite().all(-1)).nonzero()[:, 0]
    # Ranks that share the words have different numbers of them, and must take as many rows together.
    size = max(1, block // 4 if pair.is_sharded else SMALL_BLOCK // zp.shape[1])
    for start in range(0, len(not_finite), size):
        some = not_finite[start : start + size]
        known = (select_rows(x, some) for x in columns)
        replacements = general(zp[some], zq[some], *known, pair.vocab_shards)
        for result, replacement in zip(results, replacements, strict=True):
            if result is not None:
                result[some] = replacement.to(result.dtype)


def row_function(name: str, is_compiled: bool, device: str) -> RowFunction:
    """A function that ``rows`` and ``compiled_rows`` have."""
    return compiled(getattr(compiled_rows, name), device) if is_compiled else getattr(row_functions, name)


def value_and_grad(
    pair: HeadPair,
    options: LinearOptions,
    record: Divergence,
    weights: Float[Tensor, " tokens"],
    needed: tuple[bool, ...],
) -> tuple[Float[Tensor, " tokens"], Tensors]:
    """The divergence of each token, and the gradient of ``sum weights D``; a token of weight 0 is not read.

    ``needed`` says which of the six tensors need a gradient: none, for the values alone.
    """
    if record == REVERSE_KL:
        swapped = replace(pair, p=pair.q, q=pair.p)
        result, gradients = value_and_grad(swapped, options, KL, weights, (*needed[3:], *needed[:3]))
        return result, (*gradients[3:], *gradients[:3])
    sums = GradientSums(pair, needed)
    is_compiled = record == KL and should_compile(pair, options)
    fast = (
        row_function("kl_gradient_rows", is_compiled, pair.device.type)
        if record == KL
        else partial(row_functions.divergence_gradient_rows, record)
    )
    fast = partial(fast, needs=sums.needs)
    general = partial(row_functions.any_divergence_gradient_rows, record, needs=sums.needs)
    weights = weights.detach().to(pair.dtype)
    read = weights != 0
    positions = None if bool(read.all()) else read.nonzero()[:, 0]
    result = torch.zeros_like(weights)
    for chunk in chunks(pair, options, is_compiled, positions):
        column = chunk.spread(weights[chunk.index])[:, None].double()
        gradients = sums.buffers(chunk.pair, chunk.zp, chunk.zq)
        blocks: list[Tensor] = []
        for rows, zp, zq in chunk.logit_blocks():
            value, *in_logits = compute_rows(pair, fast, general, zp, zq, column[rows])
            blocks.append(value)
            write_gradients(chunk, rows, in_logits, gradients)
        result[chunk.index] = torch.cat(blocks)[chunk.local, 0].to(pair.dtype)
        if any(needed):
            sums.add(chunk.pair, chunk.index, chunk.local, gradients, chunk.plan.tiles)
    return result, sums.gradients


def write_gradients(
    chunk: Chunk, rows: slice, in_logits: list[Tensor | None], gradients: tuple[Tensor | None, ...]
) -> None:
    """Turn the gradients in the logits of some rows into those in ``hidden W^T + bias``, and write them."""
    logits = (chunk.zp, chunk.zq)
    for gradient, z, model, out in zip(in_logits, logits, chunk.pair, gradients, strict=True):
        if gradient is not None and out is not None:
            logits_backward_(gradient, z[rows], model.head, model.divisor(rows))
            out[rows] = gradient


def objective(
    pair: HeadPair,
    options: LinearOptions,
    tokens: Int[Tensor, " tokens"],
    function: Objective,
    needed: tuple[bool, ...],
) -> tuple[Float[Tensor, ""], TokenTerms, Tensors]:
    """The sum of the objective's losses, the terms of each token, and the gradients of the sum."""
    sums = GradientSums(pair, needed)
    is_compiled = should_compile(pair, options)
    fast = row_function("term_rows", is_compiled, pair.device.type)
    loss = torch.zeros((), dtype=pair.dtype, device=pair.device)
    terms = TokenTerms(*(torch.zeros(pair.tokens, dtype=pair.dtype, device=pair.device) for _ in range(4)))
    for chunk in chunks(pair, options, is_compiled):
        ids, index = chunk.spread(tokens[chunk.index]), chunk.index
        assert isinstance(index, slice), "all tokens are read"
        blocks = [
            compute_rows(pair, fast, row_functions.any_term_rows, zp, zq, ids[rows])
            for rows, zp, zq in chunk.logit_blocks()
        ]
        known = TermRows(*(torch.cat(columns) for columns in zip(*blocks, strict=True)))
        local = TokenTerms(*(x[chunk.local, 0].to(pair.dtype) for x in known[:4]))
        for term, new in zip(terms, local, strict=True):
            term[index] = new
        coefficients = TokenTerms(*(torch.zeros_like(term) for term in local))
        if len(local.kl):
            part, coefficients = objective_value_and_grad(function, local, index)
            loss += part
        if any(needed):
            spread = TokenTerms(*(chunk.spread(c)[:, None].double() for c in coefficients))
            add_objective_gradient(chunk, ids, known, spread, sums, is_compiled)
    return loss, terms, sums.gradients


def add_objective_gradient(
    chunk: Chunk,
    ids: Int[Tensor, " chunk"],
    known: TermRows,
    c: TokenTerms,
    sums: GradientSums,
    is_compiled: bool,
) -> None:
    """Replace a chunk's logits by the gradient of its losses, and add what follows from it to the sums."""
    pair, gradients = chunk.pair, sums.buffers(chunk.pair, chunk.zp, chunk.zq)
    fast = partial(row_function("objective_gradient_rows", is_compiled, pair.device.type), needs=sums.needs)
    unused = torch.stack([x == 0 for x in c]).all(0)

    for rows in chunk.row_blocks():
        _, *in_logits = compute_rows(
            pair,
            fast,
            row_functions.any_objective_gradient_rows,
            chunk.zp[rows],
            chunk.zq[rows],
            *(select_rows(x, rows) for x in (ids, known, c)),
        )
        write_gradients(chunk, rows, in_logits, gradients)
    if bool(unused.any()):
        # A row of zeros times a hidden state that is NaN would still be NaN, and so would a softcap's slope.
        for gradient in gradients:
            if gradient is not None:
                gradient.masked_fill_(unused, 0.0)
        p, q = (replace(model, hidden=model.hidden.masked_fill(unused, 0.0)) for model in pair)
        pair = replace(pair, p=p, q=q)
    sums.add(pair, chunk.index, chunk.local, gradients, chunk.plan.tiles)


def objective_value_and_grad(
    function: Objective, terms: TokenTerms, rows: slice
) -> tuple[Float[Tensor, ""], TokenTerms]:
    """The sum of the objective's losses, and its derivative in each term."""
    with torch.enable_grad():
        leaves = TokenTerms(*(x.clone().requires_grad_() for x in terms))
        losses = losses_of(function, leaves, rows)
        refuse_transforms(
            "linear_objective",
            "its losses are differentiated in its terms alone; detach what else they read",
            losses,
        )
        total = losses.sum()
    if not total.requires_grad:
        return total, TokenTerms(*(torch.zeros_like(x) for x in terms))
    slopes = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return total.detach(), TokenTerms(*slopes)


def losses_of(function: Objective, terms: TokenTerms, rows: slice) -> Float[Tensor, " rows"]:
    """The objective's losses.

    Raises:
        ShapeError: if the objective does not return one loss for each token.
    """
    losses: Any = function(terms, rows)
    shape = getattr(losses, "shape", None)
    if shape != terms.kl.shape:
        returned = type_text(losses) if shape is None else f"losses of shape {tuple(shape)}"
        raise ShapeError(
            f"the objective was given {len(terms.kl)} tokens and returned {returned}; return one loss for each"
        )
    return losses


def statistics(
    pair: HeadPair, options: LinearOptions, tokens: Int[Tensor, " tokens"], top: int
) -> StatisticsAndTop:
    """The statistics of each token, and the ``top`` likeliest tokens of both models, from the same logits."""
    is_compiled = should_compile(pair, options)
    fast = row_function(
        "statistics_rows" if is_compiled else "statistics_sums", is_compiled, pair.device.type
    )
    finished = row_functions.StatisticRows if is_compiled else row_functions.finished_statistics
    shards = pair.vocab_shards
    top = min(top, shards.vocab_size)
    exchanged = shards.largest_number(top)
    columns = TokenStatistics(
        *(
            torch.zeros(
                pair.tokens, dtype=torch.int64 if name in INTEGER_FIELDS else pair.dtype, device=pair.device
            )
            for name in TokenStatistics._fields
        )
    )
    likeliest = [
        TopTokens(columns.top1_p.new_zeros(pair.tokens, top), columns.kl_pq.new_zeros(pair.tokens, top))
        for _ in pair
    ]
    for chunk in chunks(pair, options, is_compiled):
        ids = chunk.spread(tokens[chunk.index])
        # A block leaves one small tensor: several among large ones that are freed leave no room for those of the next.
        blocks = [
            torch.cat([*fast(zp, zq, ids[rows], shards), row_functions.ranks_of(zq, ids[rows], shards)], -1)
            for rows, zp, zq in chunk.logit_blocks()
        ]
        *parts, ranks = torch.cat(blocks).T.contiguous()[..., None]
        sums, general = finished(*parts), row_functions.any_statistics_rows
        compute_not_finite_(pair, sums, chunk.plan.block_rows, general, chunk.zp, chunk.zq, ids)
        listed = chunk.likeliest(max(1, exchanged), sums.log_sum_p, sums.log_sum_q)
        (id_p, probability_p), (id_q, probability_q) = listed
        computed = {
            **sums._asdict(),
            "top1_p": id_p,
            "top1_q": id_q,
            "top1_probability_p": probability_p,
            "top1_probability_q": probability_q,
            "rank_q": ranks,
        }
        for name, column in columns._asdict().items():
            column[chunk.index] = computed[name][chunk.local, 0].to(column.dtype)
        for model, words in zip(likeliest, listed, strict=True):
            for column, x in zip(model, words, strict=True):
                column[chunk.index] = x[chunk.local, :top].to(column.dtype)
    return StatisticsAndTop(columns, *likeliest)
