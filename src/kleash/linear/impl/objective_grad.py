"""The gradient of an objective in the logits of a few rows.

With the derivatives ``c`` of the losses in the terms, the gradient in p's logits is

    c_logp (1_x - p) + c_kl p (u - KL) - c_H p (log p + H),    u = log p - log q

and in q's ``c_logq (1_x - q) + c_kl (q - p)``.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.linear.impl.base import weighted_terms
from kleash.linear.impl.fallback import replace_rows_
from kleash.linear.impl.native import row_functions as native
from kleash.linear.impl.reference import terms_of_logits
from kleash.linear.impl.row_statistics import LOG2_E
from kleash.linear.types import TokenTerms
from kleash.linear.vocab_shards import LocalVocab


class TermRows(NamedTuple):
    """The results of ``objective.terms_rows`` for some rows."""

    token_logp: Float[Tensor, " rows"]
    token_logq: Float[Tensor, " rows"]
    kl: Float[Tensor, " rows"]
    entropy: Float[Tensor, " rows"]
    """Entropy of p."""
    log_sum_p: Float[Tensor, " rows"]
    """Log-sum-exp of p's logits."""
    log_sum_delta: Float[Tensor, " rows"]
    """Log-sum-exp of q's logits minus that of p's."""

    @property
    def terms(self) -> TokenTerms:
        """The terms that the objective reads."""
        return TokenTerms(*self[: len(TokenTerms._fields)])


class ObjectiveRows(NamedTuple):
    """Some rows of logits, their terms, and the derivatives of their losses."""

    zp: Float[Tensor, "rows vocab"]
    zq: Float[Tensor, "rows vocab"]
    """q's logits, or, if ``q_is_delta``, their difference from p's."""
    ids: Int[Tensor, " rows"]
    known: TermRows
    coefficients: TokenTerms
    """The derivatives of the losses in the terms."""
    q_is_delta: bool
    with_entropy: bool
    """Whether any coefficient of the entropy is not 0."""


LogitGradientFunction: TypeAlias = Callable[
    [ObjectiveRows, tuple[bool, bool], LocalVocab, tuple[Tensor, Tensor]],
    tuple[Tensor | None, Tensor | None, Tensor],
]
"""A function that computes the gradients in the logits of some rows.

Arguments: the rows; whether the gradients in p's and in q's logits are needed; the ranks that share the vocabulary; two
buffers, in which the gradients may be returned.
Returns: the gradients in p's and q's logits, None where not needed, and a bool for each row: whether it was computed.
"""


def objective_gradient_rows(
    rows: ObjectiveRows,
    needs: tuple[bool, bool],
    vocab_shards: LocalVocab,
    buffers: tuple[Tensor, Tensor],
    logit_gradient: LogitGradientFunction,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients in both logits, where needed; by autograd for rows that ``logit_gradient`` cannot compute."""
    in_p, in_q, computed = logit_gradient(rows, needs, vocab_shards, buffers)
    for part in vocab_shards.row_parts(~computed, rows.zp.shape[1]):
        zq = rows.zp[part] + rows.zq[part] if rows.q_is_delta else rows.zq[part]
        coefficients = TokenTerms(*(x[part] for x in rows.coefficients))
        replacement = reference_objective_gradient_rows(
            rows.zp[part], zq, rows.ids[part], coefficients, vocab_shards
        )
        replace_rows_((in_p, in_q), part, replacement)
    return in_p, in_q


def closed_form_gradient(
    rows: ObjectiveRows, needs: tuple[bool, bool], vocab_shards: LocalVocab, buffers: tuple[Tensor, Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The gradients by the formulas at the top of this module, with torch's functions: a ``LogitGradientFunction``."""
    in_p = in_q = None
    computed = torch.ones(len(rows.zp), dtype=torch.bool, device=rows.zp.device)
    if needs[0]:
        in_p = gradient_in_p(rows, vocab_shards, buffers)
        computed &= in_p.sum(-1).isfinite()
    if needs[1]:
        in_q = gradient_in_q(rows, vocab_shards)
        computed &= in_q.sum(-1).isfinite()
    return in_p, in_q, computed


def native_gradient(
    rows: ObjectiveRows, needs: tuple[bool, bool], vocab_shards: LocalVocab, buffers: tuple[Tensor, Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The gradients by the same formulas in C, written into the buffers: a ``LogitGradientFunction``."""
    known = rows.known
    in_p, in_q = (x[: len(rows.zp)] if needed else None for x, needed in zip(buffers, needs, strict=True))
    computed = native.objective_gradient_(
        rows.zp,
        rows.zq,
        rows.ids,
        torch.stack(rows.coefficients, -1),
        torch.stack([known.kl, known.entropy, known.log_sum_p, known.log_sum_delta], -1),
        (in_p, in_q),
        q_is_delta=rows.q_is_delta,
        with_entropy=rows.with_entropy,
    )
    return in_p, in_q, computed


def gradient_in_p(rows: ObjectiveRows, vocab_shards: LocalVocab, buffers: tuple[Tensor, Tensor]) -> Tensor:
    """``c_logp (1_x - p) + p (c_kl (u - KL) - c_H (log p + H))``, in the first buffer."""
    zp, zq = rows.zp, rows.zq
    gradient, buffer = (x[: len(zp)] for x in buffers)
    _, _, kl, entropies, sum_p, delta = (x[:, None] for x in rows.known)
    c_logp, _, c_kl, c_entropy = (x[:, None] for x in rows.coefficients)
    gradient = torch.neg(zq, out=gradient) if rows.q_is_delta else torch.sub(zp, zq, out=gradient)
    gradient.add_(delta - kl).mul_(c_kl).sub_(c_logp)
    if rows.with_entropy:
        gradient.sub_(torch.sub(zp, sum_p - entropies, out=buffer).mul_(c_entropy))
    gradient.mul_(torch.add(sum_p * -LOG2_E, zp, alpha=LOG2_E, out=buffer).exp2_())
    return vocab_shards.scatter_add_local_(gradient, rows.ids, c_logp)


def gradient_in_q(rows: ObjectiveRows, vocab_shards: LocalVocab) -> Tensor:
    """``c_logq (1_x - q) + c_kl (q - p)``; ``q - p`` as ``max(p, q) (1 - exp(-|u|))`` with its sign."""
    zp, zq, c = rows.zp, rows.zq, rows.coefficients
    sum_p, delta = rows.known.log_sum_p[:, None], rows.known.log_sum_delta[:, None]
    logp, logq = zp - sum_p, zq - (sum_p + delta)
    u = zp.sub(zq).add_(delta)
    larger = torch.maximum(logp, logq).mul_(LOG2_E).exp2_()
    gradient = torch.expm1(u.abs().neg_()).mul_(larger).mul_(u.sign_()).mul_(c.kl[:, None])
    gradient.sub_(logq.mul_(LOG2_E).exp2_().mul_(c.token_logq[:, None]))
    return vocab_shards.scatter_add_local_(gradient, rows.ids, c.token_logq[:, None])


def reference_objective_gradient_rows(
    zp: Tensor, zq: Tensor, ids: Tensor, coefficients: TokenTerms, vocab_shards: LocalVocab
) -> tuple[Tensor, Tensor]:
    """The gradients in both logits by the reference and autograd; a term with coefficient 0 is not read."""
    with torch.enable_grad():
        leaf_p, leaf_q = zp.detach().requires_grad_(), zq.detach().requires_grad_()
        total = weighted_terms(terms_of_logits(leaf_p, leaf_q, ids, vocab_shards), coefficients).sum()
        in_p, in_q = torch.autograd.grad(total, (leaf_p, leaf_q), allow_unused=True, materialize_grads=True)
    return in_p, in_q
