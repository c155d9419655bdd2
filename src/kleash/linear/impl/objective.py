"""The objective of the chunked backend: a chunk's terms, the losses and their derivatives, and the gradient."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.divergences import entropy
from kleash.linear.impl import kl_fast
from kleash.linear.impl.base import Needed, Objective, ObjectiveResult, Request, objective_value_and_grad
from kleash.linear.impl.chunk_loop import (
    Chunk,
    ChunkPlan,
    RowFunction,
    chunks,
    fast_version,
    logit_blocks,
    plan_chunks,
    replace_failed_rows_,
    row_blocks,
)
from kleash.linear.impl.compiling import uses_native
from kleash.linear.impl.fallback import fallback_kl
from kleash.linear.impl.kl_fast import kl_terms, moments, phi_of_residual
from kleash.linear.impl.native import row_functions as native
from kleash.linear.impl.objective_grad import (
    LogitGradientFunction,
    ObjectiveRows,
    TermRows,
    closed_form_gradient,
    native_gradient,
    objective_gradient_rows,
)
from kleash.linear.impl.project import logits_backward_
from kleash.linear.impl.row_statistics import Buffers
from kleash.linear.impl.sums import GradientSumsPair, new_gradient_sums
from kleash.linear.types import TokenTerms
from kleash.linear.vocab_shards import LOCAL_VOCAB, LocalVocab


def terms_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    tokens: Int[Tensor, " rows"],
    buffers: Buffers = kl_fast.NO_BUFFERS,
    *,
    q_is_delta: bool = False,
    vocab_shards: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor, ...]:
    """The fields of TermRows for each row, by ``kl_fast``; KL or entropy is not finite where it fails."""
    x = moments(zp, zq, buffers, q_is_delta, vocab_shards)
    (largest,) = vocab_shards.all_reduce_max(x.mass.amax(-1, keepdim=True))
    phi_sum = phi_of_residual(x, buffers).mul_(x.mass).sum(-1, keepdim=True)
    below = torch.sub(x.top, zp, out=buffers[2]).mul_(x.mass).sum(-1, keepdim=True)
    residual_sum = x.residual.mul_(x.mass).sum(-1, keepdim=True)
    phi_sum, residual_sum, below, token_zp, token_zq = vocab_shards.all_reduce_sum(
        phi_sum,
        residual_sum,
        below,
        vocab_shards.gather_local(zp, tokens),
        vocab_shards.gather_local(zq, tokens),
    )
    terms = kl_terms(x, phi_sum, residual_sum)
    # The largest mass is 1 but for the rounding of exp's argument, which all of a row's masses share.
    log_total = (x.total / largest).log()
    log_excess = torch.log1p(terms.excess)
    token_logp = token_zp - x.top - log_total
    token_delta = token_zq if q_is_delta else token_zq - token_zp
    token_logq = token_logp + (token_delta - x.shift - log_excess)
    columns = (
        token_logp,
        token_logq,
        log_total + below / x.total,
        x.top + log_total,
        x.shift + log_excess,
    )
    logp, logq, entropies, log_sum_p, log_sum_delta = (column[:, 0] for column in columns)
    return logp, logq, terms.kl, entropies, log_sum_p, log_sum_delta


def fallback_terms_rows(
    zp: Tensor,
    zq: Tensor,
    tokens: Tensor,
    *,
    q_is_delta: bool = False,
    vocab_shards: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor, ...]:
    """The fields of TermRows for each row, for all logits."""
    (kl,) = fallback_kl(zp, zq, q_is_delta=q_is_delta, vocab_shards=vocab_shards)
    zq = zp + zq if q_is_delta else zq
    sum_p, sum_q = vocab_shards.log_sum_exp(zp, zq)
    logp = zp - sum_p
    local_logp = vocab_shards.gather_local(logp, tokens)[:, 0]
    local_logq = vocab_shards.gather_local(zq - sum_q, tokens)[:, 0]
    token_logp, token_logq, entropies = vocab_shards.all_reduce_sum(local_logp, local_logq, entropy(logp))
    return token_logp, token_logq, kl, entropies, sum_p[:, 0], (sum_q - sum_p)[:, 0]


TERMS_ROWS = RowFunction(
    terms_rows,
    fallback_terms_rows,
    slice(2, 4),
    kl_fast.NUM_BUFFERS,
    native=native.terms_rows,
    accepts_delta=True,
)


def objective_result(
    request: Request, tokens: Int[Tensor, " tokens"], objective: Objective, needed: Needed
) -> ObjectiveResult:
    """The sum of the objective's losses, the terms of each token, and the gradients of the sum."""
    pair, options = request.pair, request.options
    use_native = uses_native(pair, options)
    num_buffers = 2 if use_native else kl_fast.NUM_BUFFERS + 1
    plan = plan_chunks(pair, options, num_buffers, native=use_native)
    fast = fast_version(TERMS_ROWS, pair, plan, options)
    logit_gradient = native_gradient if use_native else closed_form_gradient
    sums = new_gradient_sums(pair, needed)
    dtype, device = pair.p.dtype, pair.p.hidden.device
    loss = torch.zeros((), dtype=dtype, device=device)
    terms = TokenTerms(*(torch.empty(pair.tokens, dtype=dtype, device=device) for _ in TokenTerms._fields))
    for chunk in chunks(pair, plan, q_is_delta=True):
        index = chunk.positions
        assert isinstance(index, slice)
        ids = tokens[index]
        log_sums = [terms.kl.new_empty(len(ids)) for _ in range(2)]
        known = TermRows(*(x[index] for x in terms), *log_sums)
        for block in logit_blocks(chunk, plan.block_rows):
            rows = chunk.zp[block], chunk.zq[block], ids[block]
            computed = fast(*rows, q_is_delta=chunk.q_is_delta)
            computed = replace_failed_rows_(TERMS_ROWS, computed, rows, chunk.q_is_delta, pair.vocab_shards)
            for result, new in zip(known, computed, strict=True):
                result[block] = new
        chunk_loss, coefficients = objective_value_and_grad(objective, known.terms, index)
        loss += chunk_loss
        if any(needed):
            add_chunk_gradient_(chunk, ids, known, coefficients, plan, sums, logit_gradient)
    return ObjectiveResult(loss, terms, sums.gradients)


def add_chunk_gradient_(
    chunk: Chunk,
    ids: Int[Tensor, " chunk"],
    known: TermRows,
    c: TokenTerms,
    plan: ChunkPlan,
    sums: GradientSumsPair,
    logit_gradient: LogitGradientFunction,
) -> None:
    """Replace a chunk's logits by the gradient of its losses, and add the gradients that follow to the sums."""
    outs = sums.p.gradient_buffer(chunk.zp), sums.q.gradient_buffer(chunk.zq)
    needs, models = sums.needed, (chunk.pair.p, chunk.pair.q)
    with_entropy = bool((c.entropy != 0).any())
    unused = (c.token_logp == 0) & (c.token_logq == 0) & (c.kl == 0) & (c.entropy == 0)
    # Allocating memory for each block would take longer than the arithmetic.
    buffers = torch.empty_like(chunk.zp[: plan.block_rows]), torch.empty_like(chunk.zp[: plan.block_rows])
    for block in row_blocks(chunk, plan.block_rows):
        zp, zq = chunk.zp[block], chunk.zq[block]
        zq = zp + zq if chunk.q_is_delta and needs[1] else zq
        rows = ObjectiveRows(
            zp,
            zq,
            ids[block],
            TermRows(*(x[block] for x in known)),
            TokenTerms(*(x[block] for x in c)),
            q_is_delta=chunk.q_is_delta and not needs[1],
            with_entropy=with_entropy,
        )
        gradients = objective_gradient_rows(rows, needs, chunk.pair.vocab_shards, buffers, logit_gradient)
        for gradient, z, model in zip(gradients, (zp, zq), models, strict=True):
            if gradient is not None:
                logits_backward_(gradient, z, model.head, model.divisor(block))
                gradient[unused[block]] = 0.0  # last: a softcap's slope at NaN, times 0, would be NaN
        for gradient, out in zip(gradients, outs, strict=True):
            if gradient is not None:
                out[block] = gradient
    for model, out, total in zip(models, outs, sums, strict=True):
        if total.needed:
            # A row of zeros times a hidden state that is NaN would still be NaN.
            hidden = model.hidden.masked_fill(unused[:, None], 0.0) if bool(unused.any()) else model.hidden
            total.add(chunk.positions, out, hidden, plan.tile_rows)
