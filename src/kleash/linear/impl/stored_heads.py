"""The backend for heads whose rows are stored on several ranks, each of which has tokens of its own (FSDP2, ZeRO-3).

The head is never on one rank as a whole. A call is done in rounds of a few tokens of each rank, in one of two ways:

| | what is exchanged | what a round computes |
|---|---|---|
| move tokens | the hidden states of all ranks, and their gradients | each rank its rows of the logits of all tokens |
| gather rows | blocks of rows, and their gradients | each rank all logits of its tokens |

Both hand the round to another backend: the first as a vocabulary that the ranks share, the second as logits. All ranks
take the way that exchanges fewer bytes. They make the same number of rounds, with no tokens where a rank has no more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.linear.head import Head
from kleash.linear.impl.base import (
    NOTHING_NEEDED,
    Backend,
    Gradients,
    HeadInputs,
    HeadPair,
    Needed,
    Objective,
    ObjectiveResult,
    PerModel,
    PerTensor,
    Request,
    SavedForward,
    TokenIndex,
    ValueAndGrad,
    objective_value_and_grad,
    weighted_objective,
    zero_objective,
)
from kleash.linear.impl.gathered_rows import (
    BLOCK_SHARE,
    CallGradients,
    add_product_gradients,
    products_of,
    storage_of,
    whole_bias,
)
from kleash.linear.types import StatisticsAndTop, TokenStatistics, TokenTerms, TopTokens
from kleash.linear.vocab_shards import ShardedVocab


class StoredHeadBackend:
    """Runs another backend in rounds, so that no rank ever has the whole head."""

    def __init__(self, backend: Backend) -> None:
        """``backend`` computes the rounds."""
        self.backend = backend

    def unsupported(self, request: Request) -> str | None:
        """Why the backend of the rounds cannot do the call."""
        return self.backend.unsupported(request)

    def values(self, request: Request) -> Float[Tensor, " tokens"]:
        """The divergence of each token."""
        pair = request.pair
        values = torch.zeros(pair.tokens, dtype=pair.p.dtype, device=pair.p.hidden.device)
        for step in _rounds(request, NOTHING_NEEDED):
            values[step.tokens] = self.backend.values(step.request)[step.local]
            del step  # a round's logits, before the next one's are made
        return values

    def values_saving_forward(
        self, request: Request, needed: Needed
    ) -> tuple[Float[Tensor, " tokens"], None]:
        """The divergence of each token; nothing is saved."""
        return self.values(request), None

    def value_and_grad(
        self,
        request: Request,
        weights: Float[Tensor, " tokens"],
        needed: Needed,
        saved: SavedForward | None = None,
    ) -> ValueAndGrad:
        """The divergence of each token of a weight other than 0, and the gradient of all ranks' weighted sum."""
        pair, positions = request.pair, weights.nonzero()[:, 0]
        values = torch.zeros(pair.tokens, dtype=pair.p.dtype, device=pair.p.hidden.device)
        sums = CallGradients(pair, needed)
        for step in _rounds(request, needed, positions, sums=sums):
            result = self.backend.value_and_grad(step.request, step.spread(weights[step.tokens]), step.needed)
            values[step.tokens] = result.per_token[step.local]
            step.add(sums, result.gradients)
            del step, result
        return ValueAndGrad(values, sums.gradients)

    def objective(
        self, request: Request, tokens: Int[Tensor, " tokens"], objective: Objective, needed: Needed
    ) -> ObjectiveResult:
        """The sum of the objective's losses, the terms of each token, and the gradients of all ranks' sum.

        The objective reads this rank's data, so its derivatives are exchanged; the logits are then computed again.
        """
        pair, sums = request.pair, CallGradients(request.pair, needed)
        empty = torch.zeros(pair.tokens, dtype=pair.p.dtype, device=pair.p.hidden.device)
        terms = TokenTerms(*(empty.clone() for _ in TokenTerms._fields))
        loss = empty.new_zeros(())
        for step in _rounds(request, needed, sums=sums):
            ids = step.spread(tokens[step.tokens])
            result = self.backend.objective(step.request, ids, zero_objective, NOTHING_NEEDED)
            local_terms = TokenTerms(*(term[step.local] for term in result.terms))
            slopes = TokenTerms(*(torch.zeros_like(term) for term in local_terms))
            for term, new in zip(terms, local_terms, strict=True):
                term[step.tokens] = new
            if len(local_terms.kl):
                assert isinstance(step.tokens, slice), "without positions, a round is a slice of the tokens"
                part, slopes = objective_value_and_grad(objective, local_terms, step.tokens)
                loss = loss + part
            if any(needed):
                spread = TokenTerms(*(step.spread(slope) for slope in slopes))
                result = self.backend.objective(step.request, ids, weighted_objective(spread), step.needed)
                step.add(sums, result.gradients)
            del step, result
        return ObjectiveResult(loss, terms, sums.gradients)

    def statistics(self, request: Request, tokens: Int[Tensor, " tokens"]) -> TokenStatistics:
        """The statistics of each token."""
        columns: list[list[Tensor]] = []
        for step in _rounds(request, NOTHING_NEEDED):
            computed = self.backend.statistics(step.request, step.spread(tokens[step.tokens]))
            columns.append([column[step.local] for column in computed])
            del step
        if not columns:
            return self.backend.statistics(_without_tokens(request), tokens)
        return TokenStatistics(*(torch.cat(parts) for parts in zip(*columns, strict=True)))

    def statistics_and_top(
        self, request: Request, tokens: Int[Tensor, " tokens"], top: int
    ) -> StatisticsAndTop:
        """The statistics of each token, and the ``top`` likeliest tokens of both models, from gathered rows."""
        results: list[StatisticsAndTop] = []
        for step in _rounds(request, NOTHING_NEEDED, gather_rows=True):
            results.append(self.backend.statistics_and_top(step.request, tokens[step.tokens], top))
            del step
        if not results:
            results = [self.backend.statistics_and_top(_without_tokens(request), tokens, top)]
        parts = [(result.statistics, result.top_p, result.top_q) for result in results]
        statistics, top_p, top_q = (
            [torch.cat(columns) for columns in zip(*part, strict=True)] for part in zip(*parts, strict=True)
        )
        return StatisticsAndTop(TokenStatistics(*statistics), TopTokens(*top_p), TopTokens(*top_q))


class _Round(NamedTuple):
    """Some tokens of each rank, as a call of the other backend."""

    tokens: TokenIndex
    """This rank's tokens in the whole call: a slice, or their positions."""
    request: Request
    local: slice
    """This rank's tokens in the request."""
    spread: Callable[[Tensor], Tensor]
    """From an entry for each of this rank's tokens to one for each token of the request."""
    needed: Needed
    """The gradients that are needed of the request."""
    add: Callable[[CallGradients, Gradients], None]
    """Adds the request's gradients to those of the call."""


class _Plan(NamedTuple):
    """How a call is divided; the same on all ranks."""

    gathers_rows: bool
    tokens: int
    """Tokens of a rank in a round."""
    block: int
    """Rows of a rank in a block of gathered rows."""
    counts: list[int]
    """Tokens of each rank in the whole call."""


def _rounds(
    request: Request,
    needed: Needed,
    positions: Tensor | None = None,
    *,
    gather_rows: bool = False,
    sums: CallGradients | None = None,
) -> Iterator[_Round]:
    """The rounds of a call, equally many on each rank.

    Args:
        request: the call, with each rank's rows of a stored head.
        needed: the gradients that are needed of the call.
        positions: the tokens that are read; None for all.
        gather_rows: whether to gather rows also where that exchanges more bytes.
        sums: to which a round may add the gradients of weights itself.
    """
    pair = request.pair
    tokens = pair.tokens if positions is None else len(positions)
    plan = _plan(request, needed, tokens, gather_rows=gather_rows)
    options = replace(request.options, buffer_bytes=max(1, request.options.chunk_bytes // 2))
    request = replace(request, options=options)
    for start in range(0, max(plan.counts), plan.tokens):
        rows = slice(min(start, tokens), min(start + plan.tokens, tokens))
        index = rows if positions is None else positions[rows]
        if plan.gathers_rows:
            yield _gathered_round(request, pair.select(index), index, plan.block, needed)
        else:
            counts = [max(0, min(plan.tokens, count - start)) for count in plan.counts]
            part = _with_sums(pair.select(index), needed, sums)
            yield _moved_round(request, part, index, counts, needed)


def _plan(request: Request, needed: Needed, tokens: int, *, gather_rows: bool) -> _Plan:
    """The way that exchanges fewer bytes, and its sizes."""
    pair, storage = request.pair, storage_of(request.pair)
    counts, budgets = storage.all_gather_numbers(tokens, request.options.chunk_bytes)
    size, vocab_size, ranks = pair.p.dtype.itemsize, storage.vocab_size, storage.world_size
    budget, models = min(budgets) // 2, (pair.p, pair.q)
    dims = [model.hidden.shape[-1] for model in models]
    has_gradient = any(needed)

    # A third for the logits, a half for the round, and the rest for the copies of a block that a collective makes.
    gathered_tokens = max(1, min(budgets) // 3 // (vocab_size * size * (4 if has_gradient else 2)))
    rounds = -(-max(counts) // gathered_tokens)
    row_bytes = moved_bytes = 0
    for model, dim, flags in zip(models, dims, (needed.p, needed.q), strict=True):
        # A hidden state is gathered once; its float32 gradient is reduced over all ranks, which sends it twice.
        moved_bytes += sum(counts) * dim * (model.hidden.dtype.itemsize + (8 if flags.hidden else 0))
        if model.storage is not None and model.head.weight is not None:
            passes = 1 + int(flags.hidden)
            width = model.head.weight.dtype.itemsize * passes + (4 if flags.weight else 0)
            row_bytes += rounds * vocab_size * dim * width
    largest = max(dims)
    block = max(1, min(budgets) // BLOCK_SHARE // (ranks * largest * size))
    if gather_rows or _requires_gathered_rows(pair, needed) or row_bytes < moved_bytes:
        return _Plan(True, gathered_tokens, block, counts)
    per_token = sum(dims) * size * (3 if has_gradient else 1)
    return _Plan(False, max(1, budget // per_token // ranks), block, counts)


def _requires_gathered_rows(pair: HeadPair, needed: Needed) -> bool:
    """Whether tokens cannot be moved: a rank has no rows, a model has logits only, or a trained head is whole."""
    return 0 in storage_of(pair).rows or any(
        model.head.weight is None or (model.storage is None and (flags.weight or flags.bias))
        for model, flags in ((pair.p, needed.p), (pair.q, needed.q))
    )


def _with_sums(pair: HeadPair, needed: Needed, sums: CallGradients | None) -> HeadPair:
    """The pair with the sums of the weights' gradients, so that a round does not need further ones of their size."""
    if sums is None:
        return pair
    models: list[HeadInputs] = []
    for model, place, flags in ((pair.p, 1, needed.p), (pair.q, 4, needed.q)):
        total = sums.sum_at(place) if flags.weight else None
        fits = total is not None and total.dtype == model.dtype
        models.append(replace(model, weight_sum=total) if fits else model)
    return HeadPair(p=models[0], q=models[1])


def _moved_round(
    request: Request, pair: HeadPair, index: TokenIndex, counts: Sequence[int], needed: Needed
) -> _Round:
    """All ranks' tokens, and this rank's rows of both heads."""
    storage = storage_of(pair)
    shards = ShardedVocab(storage.group, storage.rows, storage.rank, storage.device)

    def spread(values: Tensor) -> Tensor:
        return storage.gather_tokens(values, counts)

    temperature = pair.p.temperature
    if isinstance(temperature, Tensor):
        temperature = spread(temperature)
    hidden_p = spread(pair.p.hidden)
    hidden_q = hidden_p if pair.q.hidden is pair.p.hidden else spread(pair.q.hidden)
    head_p, head_q = (_local_head(model, storage.local_rows) for model in (pair.p, pair.q))
    moved = HeadPair(
        p=replace(
            pair.p, hidden=hidden_p, head=head_p, temperature=temperature, vocab_shards=shards, storage=None
        ),
        q=replace(
            pair.q, hidden=hidden_q, head=head_q, temperature=temperature, vocab_shards=shards, storage=None
        ),
    )
    local = slice(sum(counts[: storage.rank]), sum(counts[: storage.rank + 1]))

    def add(sums: CallGradients, gradients: Gradients) -> None:
        for place, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if place % 3 == 0:  # of hidden states; the other two of a model are its weight and bias
                sums.add(place, index, gradient[local])
            else:
                sums.add(place, slice(None), gradient)

    return _Round(index, replace(request, pair=moved), local, spread, needed, add)


def _local_head(model: HeadInputs, rows: slice) -> Head:
    """This rank's rows of a head; of a whole head, those that it stores of the other one, which is not whole."""
    head = model.head
    if model.storage is not None:
        return head
    assert head.weight is not None, "logits are not moved"
    return replace(head, weight=head.weight[rows], bias=None if head.bias is None else head.bias[rows])


def _gathered_round(
    request: Request, pair: HeadPair, index: TokenIndex, block: int, needed: Needed
) -> _Round:
    """This rank's tokens as logits over the whole vocabulary, made from blocks of rows."""
    products = products_of(pair, block)
    biases = [whole_bias(model) for model in (pair.p, pair.q)]
    if pair.q.head.bias is pair.p.head.bias:
        biases[1] = biases[0]
    inner = [
        replace(model, hidden=product, head=replace(model.head, weight=None, bias=bias), storage=None)
        for model, product, bias in zip((pair.p, pair.q), products, biases, strict=True)
    ]

    def inner_needed(flags: PerModel[bool]) -> PerModel[bool]:
        return PerModel(hidden=flags.hidden or flags.weight, weight=False, bias=flags.bias)

    def add(sums: CallGradients, gradients: Gradients) -> None:
        add_product_gradients(sums, gradients, pair, index, block, needed)

    of_logits = PerTensor(inner_needed(needed.p), inner_needed(needed.q))
    request = replace(request, pair=HeadPair(p=inner[0], q=inner[1]))
    return _Round(index, request, slice(0, pair.tokens), _unchanged, of_logits, add)


def _without_tokens(request: Request) -> Request:
    """The request with no tokens, as logits."""
    pair, vocab_size = request.pair, request.pair.vocab_size
    empty = torch.zeros((0, vocab_size), dtype=pair.p.dtype, device=pair.p.hidden.device)
    model = HeadInputs(hidden=empty, head=Head(None), temperature=1.0, dtype=pair.p.dtype)
    return replace(request, pair=HeadPair(p=model, q=model))


def _unchanged(values: Tensor) -> Tensor:
    return values
