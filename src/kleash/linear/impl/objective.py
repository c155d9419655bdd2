"""A loss made of token terms: a chunk's terms first, then its gradient from what the loss says about them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.divergences import entropy
from kleash.linear.impl import kl_fast
from kleash.linear.impl.compiling import goes_native
from kleash.linear.impl.fallback import fallback_kl
from kleash.linear.impl.kl_fast import generator, moments, summed
from kleash.linear.impl.loop import (
    Chunk,
    Core,
    Plan,
    blocks,
    checked,
    chunks,
    fast_way,
    plan,
    runs,
)
from kleash.linear.impl.native import rows as native_rows
from kleash.linear.impl.objective_grad import (
    ObjectiveRows,
    Pull,
    closed_form_gradient,
    native_gradient,
    objective_gradient_rows,
)
from kleash.linear.impl.pair import HeadPair
from kleash.linear.impl.project import pull_back_
from kleash.linear.impl.results import Needed, Objective, ObjectiveResult, objective_value_and_grad
from kleash.linear.impl.row_statistics import Buffers
from kleash.linear.impl.skipping import tell
from kleash.linear.impl.sums import GradientSums, both_sums
from kleash.linear.impl.vocab_shards import LOCAL_VOCAB, LocalVocab
from kleash.linear.options import LinearOptions
from kleash.linear.statistics import TokenTerms


def terms_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    tokens: Int[Tensor, " rows"],
    room: Buffers = kl_fast.NO_BUFFERS,
    *,
    apart: bool = False,
    across: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor, ...]:
    """The fields of TokenTerms, the log-sum-exp of p's logits, and by how much q's is larger."""
    x = moments(zp, zq, room, apart, across)
    (largest,) = across.all_reduce_max(x.mass.amax(-1, keepdim=True))
    gaps = generator(x, room).mul_(x.mass).sum(-1, keepdim=True)
    below = torch.sub(x.top, zp, out=room[2]).mul_(x.mass).sum(-1, keepdim=True)
    slack = x.ahead.mul_(x.mass).sum(-1, keepdim=True)
    gaps, slack, below, token_zp, token_zq = across.all_reduce_sum(
        gaps, slack, below, across.gather_local(zp, tokens), across.gather_local(zq, tokens)
    )
    found = summed(x, gaps, slack)
    # The largest mass is 1 but for the rounding of exp's argument, which all of a row's masses share.
    log_total = (x.total / largest).log()
    excess = torch.log1p(found.excess)
    token_logp = token_zp - x.top - log_total
    ahead = token_zq if apart else token_zq - token_zp
    token_logq = token_logp + (ahead - x.shift - excess)
    numbers = token_logp, token_logq, log_total + below / x.total, x.top + log_total, x.shift + excess
    logp, logq, entropies, sums, more = (n[:, 0] for n in numbers)
    return logp, logq, found.kl, entropies, sums, more


def fallback_terms_rows(
    zp: Tensor, zq: Tensor, tokens: Tensor, *, apart: bool = False, across: LocalVocab = LOCAL_VOCAB
) -> tuple[Tensor, ...]:
    """The same for rows of any kind."""
    (kl,) = fallback_kl(zp, zq, apart=apart, across=across)
    zq = zp + zq if apart else zq
    sum_p, sum_q = across.log_sum_exp(zp, zq)
    logp = zp - sum_p
    own = across.gather_local(logp, tokens)[:, 0], across.gather_local(zq - sum_q, tokens)[:, 0]
    token_logp, token_logq, entropies = across.all_reduce_sum(*own, entropy(logp))
    return token_logp, token_logq, kl, entropies, sum_p[:, 0], (sum_q - sum_p)[:, 0]


TERMS = Core(
    terms_rows,
    fallback_terms_rows,
    slice(2, 4),
    kl_fast.NUM_BUFFERS,
    native=native_rows.terms_rows,
    apart=True,
)


def evaluate_objective(
    pair: HeadPair,
    tokens: Int[Tensor, " tokens"],
    objective: Objective,
    needed: Needed,
    options: LinearOptions,
) -> ObjectiveResult:
    """The sum of the objective's losses, the terms, and the gradients that are needed."""
    native = goes_native(pair, options)
    cut = plan(pair, options, 2 if native else kl_fast.NUM_BUFFERS + 1, native=native)
    fast, pull = fast_way(TERMS, pair, cut, options), native_gradient if native else closed_form_gradient
    sums = both_sums(pair, needed, options)
    dtype, device = pair.p.dtype, pair.p.hidden.device
    loss = torch.zeros((), dtype=dtype, device=device)
    found = TokenTerms(*(torch.empty(pair.tokens, dtype=dtype, device=device) for _ in TokenTerms._fields))
    for chunk in chunks(pair, cut, apart=True):
        where = chunk.where
        assert isinstance(where, slice)
        ids = tokens[where]
        known = [x[where] for x in found] + [found[0].new_empty(len(ids)) for _ in range(2)]
        for here in blocks(chunk, cut.rows):
            rows = chunk.zp[here], chunk.zq[here], ids[here]
            new = checked(TERMS, fast(*rows, apart=chunk.apart), rows, chunk.apart, pair.across)
            for numbers, part in zip(known, new, strict=True):
                numbers[here] = part
        part, coefficients = objective_value_and_grad(objective, TokenTerms(*known[:4]), where)
        loss += part
        if any(needed):
            turn_(chunk, ids, known, coefficients, cut, sums, pull)
    tell(options, needed, (sums[0].cutter, sums[1].cutter))
    return ObjectiveResult(loss, found, sums[0].done + sums[1].done)


def turn_(
    chunk: Chunk,
    ids: Tensor,
    known: list[Tensor],
    c: TokenTerms,
    cut: Plan,
    sums: tuple[GradientSums, GradientSums],
    pull: Pull,
) -> None:
    """Replace a chunk's logits by their gradient and take it in."""
    rooms = sums[0].room(chunk.zp), sums[1].room(chunk.zq)
    needs = sums[0].wanted, sums[1].wanted
    models = chunk.pair.p, chunk.pair.q
    with_entropy = bool((c.entropy != 0).any())
    unused = (c.token_logp == 0) & (c.token_logq == 0) & (c.kl == 0) & (c.entropy == 0)
    # Memory that is allocated anew for each block costs more than the arithmetic.
    spare = torch.empty_like(chunk.zp[: cut.rows]), torch.empty_like(chunk.zp[: cut.rows])
    for here in runs(chunk, cut.rows):
        zp, zq = chunk.zp[here], chunk.zq[here]
        zq = zp + zq if chunk.apart and needs[1] else zq
        local = TokenTerms(*(x[here] for x in c))
        apart = chunk.apart and not needs[1]
        facts = [x[here] for x in known]
        rows = ObjectiveRows(zp, zq, ids[here], facts, local, apart, with_entropy)
        found = objective_gradient_rows(rows, needs, chunk.pair.across, spare, pull)
        for side, gradient in enumerate(found):
            if gradient is not None:
                pull_back_(gradient, (zp, zq)[side], models[side].head, models[side].divisor(here))
                gradient[unused[here]] = 0.0  # last: a softcap's slope at NaN, times 0, would be NaN
        for side, gradient in enumerate(found):
            if gradient is not None:
                rooms[side][here] = gradient
    for side in (0, 1):
        if needs[side]:
            hidden = models[side].hidden
            # A row of zeros times a hidden state that is NaN would still be NaN.
            hidden = hidden.masked_fill(unused[:, None], 0.0) if bool(unused.any()) else hidden
            sums[side].add(chunk.where, rooms[side], hidden, cut.tile)
