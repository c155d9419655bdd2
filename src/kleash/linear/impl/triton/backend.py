"""The triton backend: the loop of ``chunked``, with a kernel for the elementwise work of each row.

torch multiplies a chunk's hidden states by the weights. One kernel then reads the products and computes the summary of
each row, and a second one reads them again and writes the gradient over them. The host does not wait in between. Values
alone are computed by a kernel that is fused with the products where the memory is for few tokens at a time.
"""

from importlib.util import find_spec
from os import environ

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.linear.impl.base import (
    KL,
    REVERSE_KL,
    Backend,
    HeadPair,
    Needed,
    Objective,
    ObjectiveResult,
    Request,
    SavedForward,
    ValueAndGrad,
    objective_value_and_grad,
)
from kleash.linear.impl.chunk_loop import Chunk, ChunkPlan, chunks, plan_chunks
from kleash.linear.impl.chunked import CHUNKED
from kleash.linear.impl.gradient import ChunkStep, Planner, value_and_grad
from kleash.linear.impl.project import finish_logits_
from kleash.linear.impl.row_statistics import top_rows, with_top
from kleash.linear.impl.sums import GradientSums, GradientSumsPair, new_gradient_sums
from kleash.linear.impl.triton.launch import statistics, summarise, write_gradients
from kleash.linear.types import INTEGER_FIELDS, StatisticsAndTop, TokenStatistics, TokenTerms

FEW_TOKENS = 512
"""Tokens in a chunk below which a GPU reads the weights more slowly than it multiplies by them."""


class TritonBackend:
    """Computes KL, objectives and statistics with Triton kernels; imports triton when it first computes."""

    def unsupported(self, request: Request) -> str | None:
        """Why the kernels cannot do the call; None if they can."""
        pair = request.pair
        device = pair.p.hidden.device.type
        reason = None
        if find_spec("triton") is None:
            reason = "needs triton, which is not installed"
        elif device != "cuda" and not (device == "cpu" and environ.get("TRITON_INTERPRET") == "1"):
            reason = f"runs on CUDA tensors and these are on {device}"
        elif pair.p.dtype != torch.float32:
            reason = f"computes in float32 and a tensor is {pair.p.dtype}"
        elif request.divergence not in (KL, REVERSE_KL):
            reason = "has kernels for KL in both directions and for no other divergence"
        elif pair.is_sharded:
            reason = "cannot use a head split over a vocabulary_group"
        return None if reason is None else f"{reason}; ask for 'chunked'"

    def values(self, request: Request) -> Float[Tensor, " tokens"]:
        """KL of each token."""
        request = as_forward_kl(request)
        pair = request.pair
        plan = kernel_plan(request)
        if plan.chunk_tokens < min(FEW_TOKENS, pair.tokens):
            from kleash.linear.impl.triton import fused

            if fused.supports(pair):
                return fused.kl_values(pair)
        values = torch.empty(pair.tokens, dtype=pair.p.dtype, device=pair.p.hidden.device)
        for chunk in chunks(pair, plan, q_is_delta=uses_delta(pair)):
            values[chunk.positions] = summarise(chunk).kl
        return values

    def values_saving_forward(
        self, request: Request, needed: Needed
    ) -> tuple[Float[Tensor, " tokens"], None]:
        """KL of each token; nothing is saved."""
        return self.values(request), None

    def value_and_grad(
        self,
        request: Request,
        weights: Float[Tensor, " tokens"],
        needed: Needed,
        saved: SavedForward | None = None,
    ) -> ValueAndGrad:
        """KL of each token, and the gradient of the weighted sum."""
        if request.divergence == REVERSE_KL:
            result = self.value_and_grad(request.swapped, weights, needed.swapped)
            return ValueAndGrad(result.per_token, result.gradients.swapped)
        q_is_delta = uses_delta(request.pair)
        return value_and_grad(request, weights, needed, kernel_planner(request), q_is_delta=q_is_delta)

    def objective(
        self, request: Request, tokens: Int[Tensor, " tokens"], objective: Objective, needed: Needed
    ) -> ObjectiveResult:
        """The sum of the objective's losses, the terms of each token, and the gradients of the sum."""
        pair = request.pair
        sums = new_gradient_sums(pair, needed)
        dtype, device = pair.p.dtype, pair.p.hidden.device
        loss = torch.zeros((), dtype=dtype, device=device)
        terms = TokenTerms(
            *(torch.empty(pair.tokens, dtype=dtype, device=device) for _ in TokenTerms._fields)
        )
        plan = kernel_plan(request)
        for chunk in chunks(pair, plan, q_is_delta=uses_delta(pair)):
            index = chunk.positions
            assert isinstance(index, slice)
            summary = summarise(chunk, tokens[index])
            for term, new in zip(terms, summary.terms, strict=True):
                term[index] = new
            chunk_loss, c = objective_value_and_grad(objective, summary.terms, index)
            loss += chunk_loss
            if any(needed):
                outs = gradient_buffer(sums.p, chunk.zp), gradient_buffer(sums.q, chunk.zq)
                write_gradients(summary, c, *outs)
                unused = (c.token_logp == 0) & (c.token_logq == 0) & (c.kl == 0) & (c.entropy == 0)
                add_chunk(chunk, outs, sums, plan.tile_rows, unused)
        return ObjectiveResult(loss, terms, sums.gradients)

    def statistics(self, request: Request, tokens: Int[Tensor, " tokens"]) -> TokenStatistics:
        """The statistics of each token."""
        pair = request.pair
        parts = [
            statistics(summarise(chunk, tokens[chunk.positions]))
            for chunk in chunks(pair, kernel_plan(request), q_is_delta=uses_delta(pair))
        ]
        if not parts:
            empty = pair.p.hidden.new_empty(0, dtype=pair.p.dtype)
            return TokenStatistics(
                *(empty.long() if name in INTEGER_FIELDS else empty for name in TokenStatistics._fields)
            )
        return TokenStatistics(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def statistics_and_top(
        self, request: Request, tokens: Int[Tensor, " tokens"], top: int
    ) -> StatisticsAndTop:
        """The statistics of each token, and the likeliest tokens of both models, from the same logits."""
        if not request.pair.tokens:
            return CHUNKED.statistics_and_top(request, tokens, top)
        parts: list[tuple[Tensor, ...]] = []
        for chunk in chunks(request.pair, kernel_plan(request)):
            columns = statistics(summarise(chunk, tokens[chunk.positions]))
            tops: list[Tensor] = []
            for z, model in ((chunk.zp, chunk.pair.p), (chunk.zq, chunk.pair.q)):
                finish_logits_(z, model.head, model.divisor(slice(0, len(z))))
                tops += top_rows(z, top)
            parts.append((*columns, *tops))
        *columns, zp, ids_p, zq, ids_q = (torch.cat(each) for each in zip(*parts, strict=True))
        return with_top(TokenStatistics(*columns), (zp, ids_p), (zq, ids_q))


TRITON: Backend = TritonBackend()


def as_forward_kl(request: Request) -> Request:
    """The request for KL, or the request for reverse KL with p and q exchanged."""
    return request.swapped if request.divergence == REVERSE_KL else request


def kernel_planner(request: Request) -> Planner:
    """The planner whose step runs the two kernels on a chunk."""

    def planner(tokens: int) -> tuple[ChunkPlan, ChunkStep]:
        plan = kernel_plan(request, tokens)

        def step(chunk: Chunk, weights: Tensor, sums: GradientSumsPair) -> Tensor:
            summary = summarise(chunk)
            outs = gradient_buffer(sums.p, chunk.zp), gradient_buffer(sums.q, chunk.zq)
            write_gradients(summary, weights, *outs)
            add_chunk(chunk, outs, sums, plan.tile_rows)
            return summary.kl

        return plan, step

    return planner


def add_chunk(
    chunk: Chunk,
    gradients: tuple[Tensor | None, Tensor | None],
    sums: GradientSumsPair,
    tile: int,
    unused: Tensor | None = None,
) -> None:
    """Add a chunk's gradients to the sums; hidden states of ``unused`` tokens count as 0, since 0 times NaN is NaN."""
    for model, gradient, total in zip((chunk.pair.p, chunk.pair.q), gradients, sums, strict=True):
        if gradient is not None:
            hidden = model.hidden if unused is None else model.hidden.masked_fill(unused[:, None], 0.0)
            total.add(chunk.positions, gradient, hidden, tile)


def gradient_buffer(total: GradientSums, z: Float[Tensor, "chunk vocab"]) -> Tensor | None:
    """Where a chunk's gradient is written: over its logits, each row at the start of its own; None if not needed."""
    if not total.needed:
        return None
    return z.view(torch.bfloat16)[:, : z.shape[1]] if total.is_bfloat16 else z


def uses_delta(pair: HeadPair) -> bool:
    """Whether q's logits come as their difference from p's, where one head serves both models.

    This is more accurate, and takes no longer unless the products are of bfloat16, which cannot hold the difference.
    """
    return all(x is None or x.dtype == torch.float32 for x in pair.tensors)


def kernel_plan(request: Request, tokens: int | None = None) -> ChunkPlan:
    """The sizes of chunks whose elementwise work needs no buffers; the memory of one row is reserved for it."""
    return plan_chunks(request.pair, request.options, 1, tokens)
