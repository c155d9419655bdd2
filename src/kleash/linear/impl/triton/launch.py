"""Launches the row kernels on a chunk: their arguments, and the memory that they write to."""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.linear.impl.base import HeadInputs
from kleash.linear.impl.chunk_loop import Chunk
from kleash.linear.types import TokenStatistics, TokenTerms

WIDTH = 4096
"""Columns of the vocabulary that a program processes at a time."""
HEIGHTS = {"cuda": 1, "cpu": 16}
"""Rows of a program by device; many small programs are slow in triton's interpreter."""
FIELDS = 10
"""The fields of ``RowSummary.fields``."""


@cache
def kernel_module() -> Any:
    """The module of the row kernels; imports triton."""
    return import_module("kleash.linear.impl.triton.kernels")


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSummary:
    """A chunk with ``hidden W^T`` in its memory, and the numbers that the first kernel computes for each row."""

    chunk: Chunk
    fields: Float[Tensor, "fields chunk"]
    """KL; E_p[zp - zq]; log-sum-exp of q minus that of p; entropy of p; the largest logit and the log of the mass
    relative to it, of p and of q; log p and log q of the token."""
    tokens: Int[Tensor, " chunk"] | None

    @property
    def kl(self) -> Float[Tensor, " chunk"]:
        """KL(p || q)."""
        return self.fields[0]

    @property
    def terms(self) -> TokenTerms:
        """The terms of each row's token."""
        return TokenTerms(
            token_logp=self.fields[8], token_logq=self.fields[9], kl=self.kl, entropy=self.fields[3]
        )


def summarise(chunk: Chunk, tokens: Int[Tensor, " chunk"] | None = None) -> RowSummary:
    """The summary of each row, in one pass over the logits."""
    fields = chunk.zp.new_empty(FIELDS, len(chunk.zp))
    launch("summary_kernel", chunk, tokens, fields)
    return RowSummary(chunk=chunk, fields=fields, tokens=tokens)


def statistics(summary: RowSummary) -> TokenStatistics:
    """The statistics of each row, in a second pass over the logits."""
    floats, count = torch.empty_like(summary.fields), len(summary.chunk.zp)
    integers = torch.empty((FIELDS, count), dtype=torch.int32, device=floats.device)
    launch("statistics_kernel", summary.chunk, summary.tokens, summary.fields, floats, integers)
    kl_qp, jensen_shannon, total_variation, entropy_q = floats[:4]
    top1_p, top1_q, rank = integers[:3].to(torch.int64)
    log_mass_p, log_mass_q, terms = summary.fields[5], summary.fields[7], summary.terms
    return TokenStatistics(
        token_logp=terms.token_logp,
        token_logq=terms.token_logq,
        kl_pq=summary.kl,
        kl_qp=kl_qp,
        jensen_shannon=jensen_shannon,
        total_variation=total_variation,
        entropy_p=terms.entropy,
        entropy_q=entropy_q,
        top1_p=top1_p,
        top1_q=top1_q,
        top1_probability_p=log_mass_p.neg().exp(),
        top1_probability_q=log_mass_q.neg().exp(),
        rank_q=rank,
    )


def write_gradients(
    summary: RowSummary, coefficients: TokenTerms | Tensor, in_p: Tensor | None, in_q: Tensor | None
) -> None:
    """Write the gradients in both products: of ``sum c term``, or of ``sum c KL`` for a single tensor c."""
    if isinstance(coefficients, Tensor):
        pointers = (coefficients.contiguous(), None, None, None)
    else:
        c = (coefficients.kl, coefficients.token_logp, coefficients.token_logq, coefficients.entropy)
        pointers = tuple(x.contiguous() for x in c)
    strides = tuple(0 if x is None else x.stride(0) for x in (in_p, in_q))
    outputs = (*pointers, in_p, in_q)
    launch("gradient_kernel", summary.chunk, summary.tokens, summary.fields, *outputs, strides=strides)


def launch(
    kernel_name: str,
    chunk: Chunk,
    tokens: Tensor | None,
    fields: Tensor,
    *more: Tensor | None,
    strides: tuple[int, ...] = (),
) -> None:
    """Run a kernel on each row of a chunk.

    Fused multiply-adds are off: they skip one of two roundings, so that equal logits would give different results.
    """
    count, vocab_size = chunk.zp.shape
    if count == 0:
        return
    p, q = head_factors(chunk.pair.p, count), head_factors(chunk.pair.q, count)
    height = HEIGHTS[chunk.zp.device.type]
    getattr(kernel_module(), kernel_name)[(-(-count // height),)](
        *(chunk.zp, chunk.zq, p.outer, q.outer, p.inner, q.inner, p.bias, q.bias, tokens, fields, *more),
        *(count, vocab_size, chunk.zp.stride(0), fields.stride(0), *strides),
        q_is_delta=chunk.q_is_delta,
        height=height,
        width=min(WIDTH, next_power_of_two(vocab_size)),
        num_warps=8,
        enable_fp_fusion=False,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadFactors:
    """A head as the kernels apply it: ``outer (product + bias)``, or ``outer tanh(inner (product + bias))``."""

    outer: Float[Tensor, " rows"]
    inner: float | None
    bias: Float[Tensor, " vocab"] | None


def head_factors(model: HeadInputs, count: int) -> HeadFactors:
    """The factors of a head, with the temperature of each row."""
    head, temperature = model.head, model.temperature
    factor = head.scale if head.softcap is None else head.softcap
    outer = torch.full((count,), factor, dtype=torch.float32, device=model.hidden.device)
    bias = None if head.bias is None else head.bias.contiguous()
    return HeadFactors(
        outer=outer / temperature,
        inner=None if head.softcap is None else head.scale / head.softcap,
        bias=bias,
    )


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return 1 << (size - 1).bit_length()
