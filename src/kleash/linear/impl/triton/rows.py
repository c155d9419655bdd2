"""The row kernels as functions of a chunk: what they are given, and where they write."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.linear.impl.loop import Chunk
from kleash.linear.impl.pair import HeadInputs
from kleash.linear.impl.triton import kernels
from kleash.linear.statistics import TokenStatistics, TokenTerms

WIDTH = 4096
"""Words that a program takes at a time."""
HEIGHTS = {"cuda": 1, "cpu": 16}
"""Rows that a program takes at a time; triton's interpreter has no use for many programs."""
KERNELS = cast("Any", kernels)
FIELDS = 10
"""Numbers of a row that the first kernel finds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """A chunk whose products are there, and what has been found about each of its rows."""

    chunk: Chunk
    found: Float[Tensor, "fields chunk"]
    """KL, E_p[zp - zq], by how much q's log-sum-exp is larger than p's, p's entropy; the largest logit and the log
    of the mass relative to it, of p and of q; log p and log q of the token."""
    tokens: Int[Tensor, " chunk"] | None

    @property
    def kl(self) -> Float[Tensor, " chunk"]:
        """KL(p || q)."""
        return self.found[0]

    @property
    def terms(self) -> TokenTerms:
        """What an objective is made of."""
        return TokenTerms(
            token_logp=self.found[8], token_logq=self.found[9], kl=self.kl, entropy=self.found[3]
        )


def measured(chunk: Chunk, tokens: Int[Tensor, " chunk"] | None = None) -> Rows:
    """What there is to know about each row, in one pass over the logits."""
    found = chunk.zp.new_empty(FIELDS, len(chunk.zp))
    launch(KERNELS.measure_kernel, chunk, tokens, found)
    return Rows(chunk=chunk, found=found, tokens=tokens)


def statistics(rows: Rows) -> TokenStatistics:
    """The rest of a measurement, in a second pass."""
    numbers, count = torch.empty_like(rows.found), len(rows.chunk.zp)
    places = torch.empty((FIELDS, count), dtype=torch.int32, device=numbers.device)
    launch(KERNELS.compare_kernel, rows.chunk, rows.tokens, rows.found, numbers, places)
    kl_qp, jensen_shannon, total_variation, entropy_q = numbers[:4]
    top1_p, top1_q, rank = places[:3].to(torch.int64)
    log_p, log_q, terms = rows.found[5], rows.found[7], rows.terms
    return TokenStatistics(
        token_logp=terms.token_logp,
        token_logq=terms.token_logq,
        kl_pq=rows.kl,
        kl_qp=kl_qp,
        jensen_shannon=jensen_shannon,
        total_variation=total_variation,
        entropy_p=terms.entropy,
        entropy_q=entropy_q,
        top1_p=top1_p,
        top1_q=top1_q,
        top1_probability_p=log_p.neg().exp(),
        top1_probability_q=log_q.neg().exp(),
        rank_q=rank,
    )


def turned(rows: Rows, coefficients: TokenTerms | Tensor, in_p: Tensor | None, in_q: Tensor | None) -> None:
    """Write the gradients in both products: of ``sum c term``, or of ``sum c KL`` if there is but one c."""
    if isinstance(coefficients, Tensor):
        given = (coefficients.contiguous(), None, None, None)
    else:
        c = (coefficients.kl, coefficients.token_logp, coefficients.token_logq, coefficients.entropy)
        given = tuple(x.contiguous() for x in c)
    strides = (0 if room is None else room.stride(0) for room in (in_p, in_q))
    more = (*given, in_p, in_q)
    launch(KERNELS.gradient_kernel, rows.chunk, rows.tokens, rows.found, *more, strides=tuple(strides))


def launch(
    kernel: Any,
    chunk: Chunk,
    tokens: Tensor | None,
    found: Tensor,
    *more: Tensor | None,
    strides: tuple[int, ...] = (),
) -> None:
    """Run a kernel on each row of a chunk.

    Without fused multiply-adds: one of the two roundings that they save would make equal logits differ.
    """
    count, words = chunk.zp.shape
    if count == 0:
        return
    p, q = factors(chunk.pair.p, count), factors(chunk.pair.q, count)
    height = HEIGHTS[chunk.zp.device.type]
    kernel[(-(-count // height),)](
        *(chunk.zp, chunk.zq, p.outer, q.outer, p.inner, q.inner, p.bias, q.bias, tokens, found, *more),
        *(count, words, chunk.zp.stride(0), found.stride(0), *strides),
        apart=chunk.apart,
        height=height,
        width=min(WIDTH, power_of_two(words)),
        num_warps=8,
        enable_fp_fusion=False,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Factors:
    """How products become logits: ``outer (product + bias)``, or ``outer tanh(inner (product + bias))``."""

    outer: Float[Tensor, " rows"]
    inner: float | None
    bias: Float[Tensor, " vocab"] | None


def factors(model: HeadInputs, count: int) -> Factors:
    """A head and a temperature for each row, as a kernel takes them."""
    head, time = model.head, model.temperature
    over = head.scale if head.softcap is None else head.softcap
    outer = torch.full((count,), over, dtype=torch.float32, device=model.hidden.device)
    bias = None if head.bias is None else head.bias.contiguous()
    return Factors(
        outer=outer / time, inner=None if head.softcap is None else head.scale / head.softcap, bias=bias
    )


def power_of_two(words: int) -> int:
    """The least power of two that is enough."""
    return 1 << (words - 1).bit_length()
