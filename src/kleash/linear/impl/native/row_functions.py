"""The row functions of ``rows.c``: ``kl_fast``, ``objective`` and ``row_statistics`` for float32 on a CPU."""

import ctypes
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kleash.linear.impl.native.building import library
from kleash.linear.types import INTEGER_FIELDS, TokenStatistics

Outs: TypeAlias = tuple[Tensor | None, Tensor | None]
"""The memory of the gradients in p's logits and in q's, None where not needed; each may be that of its logits."""
SUMMARY_FIELDS = 4
"""KL(p || q); log-sum-exp of p's logits; log-sum-exp of q's minus that of p's; p's entropy."""
NUM_INTEGERS = len(INTEGER_FIELDS)
"""The number of integer fields of TokenStatistics. ``rows.c`` has an enum of these and of the other fields, in the same
order."""
NUM_FLOATS = len(TokenStatistics._fields) - NUM_INTEGERS
"""The number of its floating-point fields."""
SCRATCH_ROWS = 2
"""Rows of the vocabulary's size in each thread's scratch memory."""


def threads_within(vocab_size: int, nbytes: int) -> int:
    """The number of threads whose scratch memory fits so many bytes; at least 1."""
    return max(1, min(torch.get_num_threads(), nbytes // (SCRATCH_ROWS * vocab_size * 4)))


def new_scratch(vocab_size: int, threads: int) -> Float[Tensor, "rows vocab"]:
    """Scratch memory for the threads."""
    return torch.empty(SCRATCH_ROWS * threads, vocab_size)


def kl_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    *,
    scratch: Tensor,
    q_is_delta: bool = False,
) -> tuple[Tensor]:
    """``kl_fast.kl_rows``."""
    return (row_summary(zp, zq, scratch, q_is_delta=q_is_delta)[:, 0].float(),)


def terms_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    tokens: Int[Tensor, " rows"],
    *,
    scratch: Tensor,
    q_is_delta: bool = False,
) -> tuple[Tensor, ...]:
    """``objective.terms_rows``."""
    kl, log_sum_p, log_sum_delta, entropies = row_summary(zp, zq, scratch, q_is_delta=q_is_delta).unbind(1)
    token_zp, token_zq = (z.gather(-1, tokens[:, None])[:, 0].double() for z in (zp, zq))
    token_logp = token_zp - log_sum_p
    token_logq = token_logp + ((token_zq if q_is_delta else token_zq - token_zp) - log_sum_delta)
    columns = token_logp, token_logq, kl, entropies, log_sum_p, log_sum_delta
    return tuple(x.float() for x in columns)


def statistics_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    tokens: Int[Tensor, " rows"],
    *,
    scratch: Tensor,
) -> tuple[Tensor, ...]:
    """``row_statistics.statistics_rows``."""
    floats = torch.empty((len(zp), NUM_FLOATS), dtype=torch.float64)
    integers = torch.empty((len(zp), NUM_INTEGERS), dtype=torch.int64)
    ids = tokens.to(torch.int64).contiguous()
    call("kleash_statistics", zp, zq, *zp.shape, scratch, threads_in(scratch), ids, floats, integers)
    float_fields, integer_fields = iter(floats.float().unbind(1)), iter(integers.unbind(1))
    return tuple(
        next(integer_fields if name in INTEGER_FIELDS else float_fields) for name in TokenStatistics._fields
    )


def row_summary(
    zp: Float[Tensor, "rows vocab"], zq: Float[Tensor, "rows vocab"], scratch: Tensor, *, q_is_delta: bool
) -> Float[Tensor, "rows fields"]:
    """The SUMMARY_FIELDS of each row, in float64; KL is NaN for a row that cannot be computed here."""
    summary = torch.empty((len(zp), SUMMARY_FIELDS), dtype=torch.float64)
    call("kleash_summary", zp, zq, int(q_is_delta), *zp.shape, scratch, threads_in(scratch), summary)
    return summary


def kl_gradient_(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    weight: Float[Tensor, " rows"],
    outs: Outs,
    scratch: Tensor,
    *,
    q_is_delta: bool,
) -> Float[Tensor, " rows"]:
    """KL(p || q) of each row; the gradients of ``weight KL`` in both logits are written to ``outs``.

    For a row that cannot be computed here, KL is NaN and nothing is written.
    """
    kl = torch.empty_like(weight)
    shape = (*zp.shape, scratch, threads_in(scratch))
    call("kleash_kl_gradient", zp, zq, int(q_is_delta), *shape, weight.contiguous(), kl, *outs)
    return kl


def objective_gradient_(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    tokens: Int[Tensor, " rows"],
    coefficients: Float[Tensor, "rows 4"],
    known: Float[Tensor, "rows 4"],
    outs: Outs,
    *,
    q_is_delta: bool,
    with_entropy: bool,
) -> Bool[Tensor, " rows"]:
    """Write the gradients of an objective in both logits to ``outs``; returns which rows could be computed.

    Args:
        zp: p's logits.
        zq: q's logits, or, if ``q_is_delta``, their difference from p's.
        tokens: the ids of the sampled tokens.
        coefficients: the derivatives of the losses in log p and log q of the token, in the KL, and in p's entropy.
        known: the KL, p's entropy, the log-sum-exp of p's logits, and that of q's minus that of p's.
        outs: memory other than that of the logits.
        q_is_delta: see ``zq``.
        with_entropy: whether any coefficient of the entropy is not 0.
    """
    done = torch.empty(len(zp), dtype=torch.bool)
    flags = int(q_is_delta), int(with_entropy)
    inputs = tokens.contiguous(), coefficients.contiguous(), known.contiguous()
    call(
        "kleash_objective_gradient", zp, zq, *flags, *zp.shape, torch.get_num_threads(), *inputs, *outs, done
    )
    return done


def threads_in(scratch: Float[Tensor, "rows vocab"]) -> int:
    """The number of threads that the scratch memory is for."""
    return len(scratch) // SCRATCH_ROWS


def call(name: str, *arguments: Tensor | int | None) -> None:
    """Call a function of the library; tensors have to be contiguous."""
    assert all(x.is_contiguous() for x in arguments if isinstance(x, Tensor))
    converted = [
        ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x if x is None else ctypes.c_int64(x)
        for x in arguments
    ]
    getattr(library(), name)(*converted)
