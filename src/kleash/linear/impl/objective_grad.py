"""The gradient of a loss that is made of token terms, in the logits of a few rows.

With the coefficients ``c`` that the loss has in each term, the gradient in p's logits is

    c_logp (1_x - p) + c_kl p (u - KL) - c_H p (log p + H),    u = log p - log q

and in q's ``c_logq (1_x - q) + c_kl (q - p)``.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.linear.impl.fallback import replace_rows_
from kleash.linear.impl.native import rows as native_rows
from kleash.linear.impl.reference import terms_of_logits
from kleash.linear.impl.results import combined
from kleash.linear.impl.row_statistics import LOG2_E
from kleash.linear.impl.vocab_shards import LocalVocab
from kleash.linear.statistics import TokenTerms


class ObjectiveRows(NamedTuple):
    """Some rows whose gradient is asked for."""

    zp: Float[Tensor, "rows vocab"]
    zq: Float[Tensor, "rows vocab"]
    """q's logits, or, if ``apart``, by how much they are larger."""
    ids: Int[Tensor, " rows"]
    known: list[Tensor]
    """What ``terms_rows`` says."""
    asked: TokenTerms
    """The loss's coefficients."""
    apart: bool
    with_entropy: bool
    """Whether any coefficient in the entropy is not 0."""


Pull: TypeAlias = Callable[
    [ObjectiveRows, tuple[bool, bool], LocalVocab, tuple[Tensor, Tensor]],
    tuple[Tensor | None, Tensor | None, Tensor],
]
"""The gradients in both logits where they are needed, in the spare rooms or in others, and which rows could be done."""


def objective_gradient_rows(
    rows: ObjectiveRows,
    needs: tuple[bool, bool],
    across: LocalVocab,
    spare: tuple[Tensor, Tensor],
    pull: Pull,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients in both logits, by the closed form, or by autograd for rows that it cannot do."""
    in_p, in_q, done = pull(rows, needs, across, spare)
    for some in across.row_parts(~done, rows.zp.shape[1]):
        theirs = rows.zp[some] + rows.zq[some] if rows.apart else rows.zq[some]
        asked = TokenTerms(*(x[some] for x in rows.asked))
        right = fallback_gradient_rows(rows.zp[some], theirs, rows.ids[some], asked, across)
        replace_rows_((in_p, in_q), some, right)
    return in_p, in_q


def closed_form_gradient(
    rows: ObjectiveRows, needs: tuple[bool, bool], across: LocalVocab, spare: tuple[Tensor, Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """By torch's functions."""
    in_p = in_q = None
    done = torch.ones(len(rows.zp), dtype=torch.bool, device=rows.zp.device)
    if needs[0]:
        in_p = into_p(rows, across, spare)
        done &= in_p.sum(-1).isfinite()
    if needs[1]:
        in_q = into_q(rows, across)
        done &= in_q.sum(-1).isfinite()
    return in_p, in_q, done


def native_gradient(
    rows: ObjectiveRows, needs: tuple[bool, bool], across: LocalVocab, spare: tuple[Tensor, Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """By the library in C."""
    _, _, kl, entropies, sum_p, more = rows.known
    known, asked = torch.stack([kl, entropies, sum_p, more], -1), torch.stack(rows.asked, -1)
    in_p, in_q = (x[: len(rows.zp)] if needed else None for x, needed in zip(spare, needs, strict=True))
    done = native_rows.pull_(
        rows.zp,
        rows.zq,
        rows.ids,
        asked,
        known,
        (in_p, in_q),
        apart=rows.apart,
        with_entropy=rows.with_entropy,
    )
    return in_p, in_q, done


def into_p(rows: ObjectiveRows, across: LocalVocab, spare: tuple[Tensor, Tensor]) -> Tensor:
    """``c_logp (1_x - p) + p (c_kl (u - KL) - c_H (log p + H))``, in the first ``spare`` room."""
    zp, zq = rows.zp, rows.zq
    by, room = (x[: len(zp)] for x in spare)
    _, _, kl, entropies, sum_p, more = (x[:, None] for x in rows.known)
    c_logp, _, c_kl, c_entropy = (x[:, None] for x in rows.asked)
    by = torch.neg(zq, out=by) if rows.apart else torch.sub(zp, zq, out=by)
    by.add_(more - kl).mul_(c_kl).sub_(c_logp)
    if rows.with_entropy:
        by.sub_(torch.sub(zp, sum_p - entropies, out=room).mul_(c_entropy))
    by.mul_(torch.add(sum_p * -LOG2_E, zp, alpha=LOG2_E, out=room).exp2_())
    return across.scatter_add_local_(by, rows.ids, c_logp)


def into_q(rows: ObjectiveRows, across: LocalVocab) -> Tensor:
    """``c_logq (1_x - q) + c_kl (q - p)``; the difference as ``max(p, q) (1 - exp(-|u|))`` with its sign."""
    zp, zq, c = rows.zp, rows.zq, rows.asked
    sum_p, more = (x[:, None] for x in rows.known[4:])
    logp, logq = zp - sum_p, zq - (sum_p + more)
    u = zp.sub(zq).add_(more)
    larger = torch.maximum(logp, logq).mul_(LOG2_E).exp2_()
    by = torch.expm1(u.abs().neg_()).mul_(larger).mul_(u.sign_()).mul_(c.kl[:, None])
    by.sub_(logq.mul_(LOG2_E).exp2_().mul_(c.token_logq[:, None]))
    return across.scatter_add_local_(by, rows.ids, c.token_logq[:, None])


def fallback_gradient_rows(
    zp: Tensor, zq: Tensor, ids: Tensor, c: TokenTerms, across: LocalVocab
) -> tuple[Tensor, Tensor]:
    """The same by the specification and autograd; a term whose coefficient is 0 is left out."""
    with torch.enable_grad():
        rows = zp.detach().requires_grad_(), zq.detach().requires_grad_()
        total = combined(terms_of_logits(*rows, ids, across), c).sum()
        in_p, in_q = torch.autograd.grad(total, rows, allow_unused=True, materialize_grads=True)
    return in_p, in_q
