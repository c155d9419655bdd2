"""Value and gradient of a divergence in one pass: a chunk's logits become their gradient in place."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.divergences import Divergence
from kleash.linear.impl.base import KL, HeadPair, Needed, Request, SavedForward, ValueAndGrad
from kleash.linear.impl.chunk_loop import Chunk, ChunkPlan, chunks, logit_blocks, plan_chunks, with_buffers
from kleash.linear.impl.compiling import uses_native
from kleash.linear.impl.divergence_rows import NUM_BUFFERS as DIVERGENCE_BUFFERS
from kleash.linear.impl.divergence_rows import record_gradient_rows, reference_gradient_rows
from kleash.linear.impl.fallback import replace_failed_gradients_, replace_rows_
from kleash.linear.impl.forward_saved import add_saved_gradient
from kleash.linear.impl.kl_fast import NUM_BUFFERS, kl_gradient_rows
from kleash.linear.impl.native.row_functions import kl_gradient_, new_scratch
from kleash.linear.impl.project import has_bfloat16_gradient, logits_backward_
from kleash.linear.impl.sums import GradientSumsPair, new_gradient_sums
from kleash.linear.options import LinearOptions
from kleash.linear.vocab_shards import LocalVocab

ChunkStep: TypeAlias = Callable[["Chunk", Tensor, "GradientSumsPair"], Tensor]
"""Turns a chunk's logits into the gradient of the weighted sum of its values, adds that to the sums, and returns the
values."""
RowStep: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None, Tensor | None]]
"""From the logits of a few rows under p and under q, the weights of the rows and ``q_is_delta`` to each row's value and
the gradients of ``weight value`` in both logits, None where not needed. A gradient may overwrite its own logits."""
Planner: TypeAlias = Callable[[int], "tuple[ChunkPlan, ChunkStep]"]
"""From the number of tokens to the sizes of their chunks, and the step of each chunk."""


def chunk_planner(request: Request, needed: Needed) -> Planner:
    """The planner of a divergence other than reverse KL."""
    pair, options, divergence = request.pair, request.options, request.divergence
    needs = any(needed.p), any(needed.q)

    def planner(tokens: int) -> tuple[ChunkPlan, ChunkStep]:
        if divergence == KL and uses_native(pair, options):
            num_buffers = 0 if can_overwrite_logits(pair) else 2
            plan = plan_chunks(pair, options, num_buffers, tokens, native=True)
            row_step = native_kl_step(pair, plan, needs)
        elif divergence == KL:
            plan = plan_chunks(pair, options, NUM_BUFFERS + 1, tokens)
            row_step = kl_step(pair, plan, options, needs)
        else:
            plan = plan_chunks(pair, options, DIVERGENCE_BUFFERS, tokens)
            row_step = record_step(divergence, needs, pair.vocab_shards)
        return plan, lambda chunk, weights, sums: run_chunk(chunk, row_step, weights, plan, sums)

    return planner


def value_and_grad(
    request: Request,
    weights: Float[Tensor, " tokens"],
    needed: Needed,
    planner: Planner,
    *,
    q_is_delta: bool,
    saved: SavedForward | None = None,
) -> ValueAndGrad:
    """The divergence of each token and the gradient of the weighted sum; gradients of weights are summed in float32."""
    sums = new_gradient_sums(request.pair, needed)
    weights = weights.detach().to(request.pair.p.dtype)
    if saved is not None:
        weights = add_saved_gradient(saved, weights, sums)
    per_token = run_chunks(request.pair, weights, sums, planner, q_is_delta=q_is_delta)
    return ValueAndGrad(per_token, sums.gradients)


def run_chunks(
    pair: HeadPair,
    weights: Float[Tensor, " tokens"],
    sums: GradientSumsPair,
    planner: Planner,
    *,
    q_is_delta: bool,
) -> Float[Tensor, " tokens"]:
    """The divergence of each token, whose gradients are added to the sums.

    A token of weight 0 is not read; its value and its gradient are 0.
    """
    read = weights != 0
    positions = None if bool(read.all()) else read.nonzero()[:, 0]
    plan, step = planner(pair.tokens if positions is None else len(positions))
    per_token = torch.zeros_like(weights)
    for chunk in chunks(pair, plan, positions=positions, q_is_delta=q_is_delta):
        per_token[chunk.positions] = step(chunk, weights[chunk.positions], sums)
    return per_token


def run_chunk(
    chunk: Chunk,
    row_step: RowStep,
    weights: Float[Tensor, " chunk"],
    plan: ChunkPlan,
    sums: GradientSumsPair,
) -> Float[Tensor, " chunk"]:
    """The ``ChunkStep`` that applies a row step to one block of rows after another."""
    values = torch.empty_like(weights)
    out_p, out_q = sums.p.gradient_buffer(chunk.zp), sums.q.gradient_buffer(chunk.zq)
    p, q = chunk.pair.p, chunk.pair.q
    for rows in logit_blocks(chunk, plan.block_rows):
        zp, zq = chunk.zp[rows], chunk.zq[rows]
        values[rows], in_p, in_q = row_step(zp, zq, weights[rows], chunk.q_is_delta)
        if in_p is not None:
            logits_backward_(in_p, zp, p.head, p.divisor(rows))
        if in_q is not None:
            logits_backward_(in_q, zq, q.head, q.divisor(rows))
            copy_unless_in_place_(out_q[rows], in_q)
        if in_p is not None:
            copy_unless_in_place_(out_p[rows], in_p)
    if sums.p.needed:
        sums.p.add(chunk.positions, out_p, p.hidden, plan.tile_rows)
    if sums.q.needed:
        sums.q.add(chunk.positions, out_q, q.hidden, plan.tile_rows)
    return values


def copy_unless_in_place_(out: Float[Tensor, "rows vocab"], gradient: Float[Tensor, "rows vocab"]) -> None:
    """Copy the gradient into ``out``, unless it is there already."""
    if out.data_ptr() != gradient.data_ptr() or out.dtype != gradient.dtype:
        out.copy_(gradient)


def can_overwrite_logits(pair: HeadPair) -> bool:
    """Whether gradients may be written over their logits: no softcap needs those again, and none is bfloat16."""
    return all(model.head.softcap is None and not has_bfloat16_gradient(model) for model in (pair.p, pair.q))


def native_kl_step(pair: HeadPair, plan: ChunkPlan, needs: tuple[bool, bool]) -> RowStep:
    """KL by the library in C, and by the fallback for rows that it cannot compute."""
    vocab_size, in_place = pair.local_vocab_size, can_overwrite_logits(pair)
    scratch = new_scratch(vocab_size, plan.threads)
    outs = [torch.empty(plan.block_rows, vocab_size) if needed and not in_place else None for needed in needs]

    def step(
        zp: Tensor, zq: Tensor, weight: Tensor, q_is_delta: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        targets = [z if out is None else out[: len(z)] for z, out in zip((zp, zq), outs, strict=True)]
        in_p, in_q = (z if needed else None for z, needed in zip(targets, needs, strict=True))
        value = kl_gradient_(zp, zq, weight, (in_p, in_q), scratch, q_is_delta=q_is_delta)
        results = value, in_p, in_q
        replace_failed_gradients_(results, zp, zq, weight, q_is_delta)
        return results

    return step


def kl_step(pair: HeadPair, plan: ChunkPlan, options: LinearOptions, needs: tuple[bool, bool]) -> RowStep:
    """KL by ``kl_fast``, and by the fallback for rows that it cannot compute."""
    function = with_buffers(kl_gradient_rows, pair, plan, options)

    def step(
        zp: Tensor, zq: Tensor, weight: Tensor, q_is_delta: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        results = function(zp, zq, weight, q_is_delta=q_is_delta, needs=needs)
        replace_failed_gradients_(results, zp, zq, weight, q_is_delta, pair.vocab_shards)
        return results[0], results[1], results[2]

    return step


def record_step(record: Divergence, needs: tuple[bool, bool], vocab_shards: LocalVocab) -> RowStep:
    """Any divergence by ``divergence_rows``, and by the reference for rows that it cannot compute."""

    def step(
        zp: Tensor, zq: Tensor, weight: Tensor, q_is_delta: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        results = record_gradient_rows(record, zp, zq, weight, needs, vocab_shards)
        for part in vocab_shards.row_parts(~results[0].isfinite(), zp.shape[1]):
            replacement = reference_gradient_rows(record, zp[part], zq[part], weight[part], vocab_shards)
            replace_rows_(results, part, replacement)
        return results

    return step
