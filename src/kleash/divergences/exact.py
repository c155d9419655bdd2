"""The exact value of a divergence between two whole distributions, summed over the vocabulary."""

from math import isinf

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences.record import Divergence, Side, parts, weigh
from kleash.divergences.table import DIVERGENCES
from kleash.errors import ShapeError, VocabularyMismatchError
from kleash.precision import at_least_float32
from kleash.registry import look_up


@validated
def divergence(
    which: str | Divergence, logp: Float[Tensor, "*batch_p vocab_p"], logq: Float[Tensor, "*batch_q vocab_q"]
) -> Float[Tensor, "*batch_p"]:
    """D(p || q) for a name of ``DIVERGENCES``, or for a record of your own.

        D(p || q) = finish(sum_x p(x) f(log p(x) - log q(x)))

    Every token is counted from the side that gives it more mass, so nothing overflows unless the
    value does; the gradient is finite where the value is below a tenth of the largest number of its
    type, also at tokens that one side or both rule out (log-probability -inf). Derivatives of every
    order are right where log-probabilities are equal, in backward and forward mode. Half precision is
    computed and returned in float32.

    Args:
        which: "kl", "jensen_shannon" ..., or a ``Divergence``.
        logp: natural log-probabilities, normalised over the last axis.
        logq: the same tokens under the other distribution.

    Raises:
        UnknownNameError: if there is no such divergence.
        VocabularyMismatchError: if the last axes differ.
        ShapeError: if the others do, or there is none, or the numbers are not floating-point.
    """
    record = look_up(DIVERGENCES, which, "divergence") if isinstance(which, str) else which
    logp, logq = as_pair(logp, logq)
    return record.finish(contributions(record, logp, logq).sum(-1))


def as_pair(logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    """Both distributions in the wider of their types and at least float32, if they fit together."""
    if logp.shape[-1] != logq.shape[-1]:
        raise VocabularyMismatchError(
            f"logp covers {logp.shape[-1]} tokens and logq {logq.shape[-1]}; "
            "pad or project one onto the other's vocabulary first"
        )
    if logp.shape != logq.shape:
        raise ShapeError(
            f"logp is {tuple(logp.shape)} and logq {tuple(logq.shape)}; expand one to the other's shape first"
        )
    wider = torch.promote_types(at_least_float32(logp).dtype, at_least_float32(logq).dtype)
    p = logp.to(wider)
    # One tensor on both sides is converted once, so that its gradient is rounded once.
    return p, p if logq is logp else logq.to(wider)


def contributions(
    record: Divergence, logp: Float[Tensor, "*batch vocab"], logq: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch vocab"]:
    """What each token adds to the sum, none of it negative; the inputs as ``as_pair`` leaves them."""
    in_p, in_q = logp != -torch.inf, logq != -torch.inf
    both = in_p & in_q
    shared_p, shared_q = torch.where(both, logp, 0.0), torch.where(both, logq, 0.0)
    # One of the two gaps is 0, and f(0) is exactly 0: adding both sides selects the right one.
    ahead, behind = parts(shared_p - shared_q)
    shared = weigh(record.from_p, shared_p, ahead) + weigh(record.from_q, shared_q, behind)
    apart = torch.where(
        in_p, _alone(record.from_p, logp), torch.where(in_q, _alone(record.from_q, logq), 0.0)
    )
    return torch.where(both, shared, apart)


def _alone(side: Side, log_mass: Tensor) -> Tensor:
    """What mass adds where the other side has none; infinite also where the mass underflows."""
    return torch.full_like(log_mass, torch.inf) if isinf(side.alone) else log_mass.exp() * side.alone
