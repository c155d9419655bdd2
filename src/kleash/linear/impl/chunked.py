"""The chunked backend: the logits of a few tokens at a time, within ``buffer_bytes``; never ``[tokens, vocab]``."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.divergences import Divergence
from kleash.linear.impl import divergence_rows, kl_fast, row_statistics
from kleash.linear.impl.base import (
    KL,
    REVERSE_KL,
    Backend,
    Needed,
    Objective,
    ObjectiveResult,
    Request,
    SavedForward,
    ValueAndGrad,
)
from kleash.linear.impl.chunk_loop import RowCallable, RowFunction, evaluate_rows
from kleash.linear.impl.fallback import fallback_kl
from kleash.linear.impl.forward_saved import SavedGradient
from kleash.linear.impl.gradient import chunk_planner, run_chunks, value_and_grad
from kleash.linear.impl.native import row_functions as native
from kleash.linear.impl.objective import objective_result
from kleash.linear.impl.reference import divergence_of_logits, statistics_of_logits
from kleash.linear.impl.sums import GradientSumsPair
from kleash.linear.types import StatisticsAndTop, TokenStatistics
from kleash.linear.vocab_shards import LOCAL_VOCAB, LocalVocab

KL_ROWS = RowFunction(
    kl_fast.kl_rows,
    fallback_kl,
    slice(0, 1),
    kl_fast.NUM_BUFFERS,
    native=native.kl_rows,
    accepts_delta=True,
)
STATISTICS_ROWS = RowFunction(
    row_statistics.statistics_rows,
    statistics_of_logits,
    slice(2, 4),
    row_statistics.NUM_BUFFERS,
    native=native.statistics_rows,
)


def plain_divergence_rows(divergence: Divergence) -> RowCallable:
    """The function of each row's value by the reference's formula, for all logits: the fallback of the fast one."""

    def rows(zp: Tensor, zq: Tensor, vocab_shards: LocalVocab = LOCAL_VOCAB) -> tuple[Tensor]:
        return (divergence_of_logits(divergence, zp, zq, vocab_shards),)

    return rows


class ChunkedBackend:
    """Computes chunk by chunk, with elementwise work by torch or by the library in C, compiled where that is faster."""

    def unsupported(self, request: Request) -> str | None:
        """None: this backend can do every call."""
        return None

    def values(self, request: Request) -> Float[Tensor, " tokens"]:
        """The divergence of each token."""
        if request.divergence == REVERSE_KL:
            return self.values(request.swapped)
        if request.divergence == KL:
            return evaluate_rows(KL_ROWS, request.pair, request.options)[0]
        function = RowFunction(
            divergence_rows.fast_divergence_rows(request.divergence),
            plain_divergence_rows(request.divergence),
            slice(0, 1),
            divergence_rows.NUM_BUFFERS,
            compiles=False,
        )
        return evaluate_rows(function, request.pair, request.options)[0]

    def values_saving_forward(
        self, request: Request, needed: Needed
    ) -> tuple[Float[Tensor, " tokens"], SavedForward | None]:
        """The divergence of each token, and the gradient of the last chunk's; sharded heads save nothing."""
        if request.divergence == REVERSE_KL:
            return self.values_saving_forward(request.swapped, needed.swapped)
        pair = request.pair
        if pair.is_sharded or pair.tokens == 0:
            return self.values(request), None
        plan, step = chunk_planner(request, needed)(pair.tokens)
        start = (pair.tokens - 1) // plan.chunk_tokens * plan.chunk_tokens
        first, last = pair.select(slice(0, start)), pair.select(slice(start, None))
        first_request = Request(pair=first, options=request.options, divergence=request.divergence)
        values = [self.values(first_request)] if start else []
        saved = SavedGradient(any(needed.p)), SavedGradient(any(needed.q))
        ones = torch.ones(last.tokens, dtype=pair.p.dtype, device=pair.p.hidden.device)
        # With the plan of all tokens: a plan of the last ones could make two chunks, and only one can be saved.
        last_values = run_chunks(
            last, ones, GradientSumsPair(*saved), lambda _: (plan, step), q_is_delta=request.divergence == KL
        )
        gradients = saved[0].gradient, saved[1].gradient
        forward = SavedForward(start=start, last=last, gradients=gradients, tile_rows=plan.tile_rows)
        return torch.cat([*values, last_values]), forward

    def value_and_grad(
        self,
        request: Request,
        weights: Float[Tensor, " tokens"],
        needed: Needed,
        saved: SavedForward | None = None,
    ) -> ValueAndGrad:
        """The divergence of each token, and the gradient of the weighted sum."""
        if request.divergence == REVERSE_KL:
            result = self.value_and_grad(request.swapped, weights, needed.swapped, saved)
            return ValueAndGrad(result.per_token, result.gradients.swapped)
        planner, is_kl = chunk_planner(request, needed), request.divergence == KL
        return value_and_grad(request, weights, needed, planner, q_is_delta=is_kl, saved=saved)

    def objective(
        self, request: Request, tokens: Int[Tensor, " tokens"], objective: Objective, needed: Needed
    ) -> ObjectiveResult:
        """The sum of the objective's losses, the terms of each token, and the gradients of the sum."""
        return objective_result(request, tokens, objective, needed)

    def statistics(self, request: Request, tokens: Int[Tensor, " tokens"]) -> TokenStatistics:
        """The statistics of each token."""
        return TokenStatistics(*evaluate_rows(STATISTICS_ROWS, request.pair, request.options, tokens))

    def statistics_and_top(
        self, request: Request, tokens: Int[Tensor, " tokens"], top: int
    ) -> StatisticsAndTop:
        """The statistics of each token, and the likeliest tokens of both models, from the same logits."""

        def of_logits(zp: Tensor, zq: Tensor) -> tuple[Tensor, ...]:
            return *row_statistics.top_rows(zp, top), *row_statistics.top_rows(zq, top)

        *columns, zp, ids_p, zq, ids_q = evaluate_rows(
            STATISTICS_ROWS, request.pair, request.options, tokens, of_logits=of_logits
        )
        return row_statistics.with_top(TokenStatistics(*columns), (zp, ids_p), (zq, ids_q))


CHUNKED: Backend = ChunkedBackend()
