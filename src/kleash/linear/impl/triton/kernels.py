# pyright: basic, reportInvalidTypeForm=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Triton kernels on logits that are there: a row to its numbers, and a row to its gradient where it lies.

A program has ``height`` rows, one on a GPU, and walks along them in tiles of ``width`` words. It takes the products
``hidden W^T`` and makes them logits as it reads them: ``outer tanh(inner (product + bias))``, or
``outer (product + bias)`` without a softcap. If ``apart``, q's products are by how much its logits are larger than p's.
"""

import triton
import triton.language as tl

from kleash.linear.impl.triton.arithmetic import (
    NEVER,
    both_logits,
    concluded,
    empty,
    expm1,
    joined,
    log1p,
    offset,
    phi_series,
    tile_sums,
)


@triton.jit
def read_tile(
    product_p, product_q, outer_p, outer_q, inner_p, inner_q, bias_p, bias_q, row, row_stride, columns, inside, used,
    apart: tl.constexpr,
):  # fmt: skip
    """Both models' logits of some words in some rows, and their difference; a row that is not used is not read."""
    where = row.to(tl.int64)[:, None] * row_stride + columns[None, :]
    there = inside[None, :] & (row >= 0)[:, None]
    return both_logits(
        tl.load(product_p + where, mask=there & used[:, None], other=0.0),
        tl.load(product_q + where, mask=there & used[:, None], other=0.0),
        offset(bias_p, columns, inside)[None, :], offset(bias_q, columns, inside)[None, :],
        there, inner_p, inner_q, outer_p[:, None], outer_q[:, None], apart,
    )  # fmt: skip


@triton.jit
def read_token(
    product_p, product_q, outer_p, outer_q, inner_p, inner_q, bias_p, bias_q, row, row_stride, token, used,
    apart: tl.constexpr,
):  # fmt: skip
    """Both models' logits of one word in each row, and their difference."""
    where = row.to(tl.int64) * row_stride + token
    return both_logits(
        tl.load(product_p + where, mask=used, other=0.0), tl.load(product_q + where, mask=used, other=0.0),
        offset(bias_p, token, used), offset(bias_q, token, used),
        used, inner_p, inner_q, outer_p, outer_q, apart,
    )  # fmt: skip


@triton.jit
def measure_kernel(
    product_p, product_q, outer_p, outer_q, inner_p, inner_q, bias_p, bias_q, tokens, found,
    rows, words, row_stride, found_stride, apart: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """KL, E_p d, by how much q's log-sum-exp is larger, p's entropy, tops and masses; log p and log q of the token."""
    row = tl.program_id(0) * height + tl.arange(0, height)
    used = row < rows
    of_p, of_q = tl.load(outer_p + row, mask=used, other=0), tl.load(outer_q + row, mask=used, other=0)
    top, s, c, a, y, below, top_q, s_q = empty(height)
    for start in range(0, words, width):
        columns = start + tl.arange(0, width)
        inside = columns < words
        zp, zq, d = read_tile(
            product_p, product_q, of_p, of_q, inner_p, inner_q, bias_p, bias_q, row, row_stride, columns, inside, used,
            apart,
        )  # fmt: skip
        top_t, s_t, c_t, a_t, y_t, below_t, top_qt, s_qt = tile_sums(zp, zq, d)
        top, s, c, a, y, below, top_q, s_q = joined(
            top, s, c, a, y, below, top_q, s_q, top_t, s_t, c_t, a_t, y_t, below_t, top_qt, s_qt
        )
    kl, mean, more, entropy, log_p, log_q = concluded(top, s, c, a, y, below, top_q, s_q)
    tl.store(found + row, kl, mask=used)
    tl.store(found + found_stride + row, mean, mask=used)
    tl.store(found + 2 * found_stride + row, more, mask=used)
    tl.store(found + 3 * found_stride + row, entropy, mask=used)
    tl.store(found + 4 * found_stride + row, top, mask=used)
    tl.store(found + 5 * found_stride + row, log_p, mask=used)
    tl.store(found + 6 * found_stride + row, top_q, mask=used)
    tl.store(found + 7 * found_stride + row, log_q, mask=used)
    if tokens is not None:
        token = tl.load(tokens + row, mask=used, other=0)
        zp, zq, d = read_token(
            product_p, product_q, of_p, of_q, inner_p, inner_q, bias_p, bias_q, row, row_stride, token, used, apart
        )  # fmt: skip
        logp, ahead = (zp - top) - log_p, d + more
        # Near p, log q is log p less the difference, which has more digits than the two; with no log p, it is not.
        logq = tl.where(logp == NEVER, (zq - top_q) - log_q, logp - ahead)
        tl.store(found + 8 * found_stride + row, logp, mask=used)
        tl.store(found + 9 * found_stride + row, logq, mask=used)


@triton.jit
def coefficient(pointer, row, here, height: tl.constexpr):
    """What a loss says about a term; 0 if it says nothing."""
    c = tl.zeros([height], tl.float32)
    if pointer is not None:
        c += tl.load(pointer + row, mask=here, other=0.0)
    return c


@triton.jit
def pulled_back(gradient, z, inner, outer):
    """From the gradient in a tile's logits to that in ``hidden W^T + bias``."""
    if inner is None:
        factor = outer
    else:
        t = z / outer[:, None]
        gradient = gradient * (1.0 - t * t)
        factor = outer * inner
    return gradient * factor[:, None]


@triton.jit
def gradient_kernel(
    product_p, product_q, outer_p, outer_q, inner_p, inner_q, bias_p, bias_q, tokens, found,
    c_kl, c_logp, c_logq, c_entropy, in_p, in_q,
    rows, words, row_stride, found_stride, stride_p, stride_q,
    apart: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """The gradient of ``sum c term`` in both products, where it is wanted, over the products or elsewhere.

        in p's logits: c_logp (1_x - p) + c_kl p (d - E_p d) - c_entropy p (log p + H)
        in q's:        c_logq (1_x - q) + c_kl (q - p)

    A row without a coefficient is not read, and its gradient is 0. A tile is read before any of it is written: a
    gradient half as wide as the products, whose row begins where theirs does, lies on what was read before.
    """
    row = tl.program_id(0) * height + tl.arange(0, height)
    here = row < rows
    kl_c, logp_c = coefficient(c_kl, row, here, height), coefficient(c_logp, row, here, height)
    logq_c, entropy_c = coefficient(c_logq, row, here, height), coefficient(c_entropy, row, here, height)
    used = (kl_c != 0.0) | (logp_c != 0.0) | (logq_c != 0.0) | (entropy_c != 0.0)
    mean = tl.load(found + found_stride + row, mask=here, other=0)[:, None]
    more = tl.load(found + 2 * found_stride + row, mask=here, other=0)[:, None]
    entropy = tl.load(found + 3 * found_stride + row, mask=here, other=0)[:, None]
    top_p = tl.load(found + 4 * found_stride + row, mask=here, other=0)[:, None]
    log_p = tl.load(found + 5 * found_stride + row, mask=here, other=0)[:, None]
    top_q = tl.load(found + 6 * found_stride + row, mask=here, other=0)[:, None]
    log_q = tl.load(found + 7 * found_stride + row, mask=here, other=0)[:, None]
    of_p, of_q = tl.load(outer_p + row, mask=here, other=0), tl.load(outer_q + row, mask=here, other=0)
    for start in range(0, words, width):
        columns = start + tl.arange(0, width)
        inside = columns < words
        there = inside[None, :]
        zp, zq, d = read_tile(
            product_p, product_q, of_p, of_q, inner_p, inner_q, bias_p, bias_q, row, row_stride, columns, inside, used,
            apart,
        )  # fmt: skip
        tl.debug_barrier()
        logp = (zp - top_p) - log_p
        p = tl.exp(logp)
        if in_p is not None:
            by = kl_c[:, None] * (d - mean) - logp_c[:, None]
            if c_entropy is not None:
                by -= tl.where(entropy_c[:, None] == 0.0, 0.0, entropy_c[:, None] * (logp + entropy))
            by = tl.where(p == 0.0, 0.0, p * by)
            if tokens is not None:
                by += tl.where(
                    columns[None, :] == tl.load(tokens + row, mask=here, other=0)[:, None],
                    logp_c[:, None],
                    0.0,
                )
            by = pulled_back(by, zp, inner_p, of_p)
            by = tl.where(used[:, None], by, 0.0).to(in_p.dtype.element_ty)
            tl.store(
                in_p + row.to(tl.int64)[:, None] * stride_p + columns[None, :], by, mask=there & here[:, None]
            )
        if in_q is not None:
            q = tl.exp((zq - top_q) - log_q)
            u = d + more
            # q - p from the larger of the two, which neither cancels nor overflows.
            change = expm1(-tl.abs(u))
            by = tl.where(u > 0.0, p * change, -q * change)
            by = tl.where((p == 0.0) & (q == 0.0), 0.0, kl_c[:, None] * by)
            if tokens is not None:
                by -= logq_c[:, None] * q
                by += tl.where(
                    columns[None, :] == tl.load(tokens + row, mask=here, other=0)[:, None],
                    logq_c[:, None],
                    0.0,
                )
            by = pulled_back(by, zq, inner_q, of_q)
            by = tl.where(used[:, None], by, 0.0).to(in_q.dtype.element_ty)
            tl.store(
                in_q + row.to(tl.int64)[:, None] * stride_q + columns[None, :], by, mask=there & here[:, None]
            )


@triton.jit
def likelier(best, where, z, columns):
    """The largest logit of a row so far and its first place, having seen a tile."""
    z = tl.where(z == z, z, NEVER)
    top = tl.max(z, 1)
    place = tl.argmax(z, 1) + tl.min(columns, 0)
    return tl.where(top > best, top, best), tl.where(top > best, place, where)


@triton.jit
def compare_kernel(
    product_p, product_q, outer_p, outer_q, inner_p, inner_q, bias_p, bias_q, tokens, found, numbers, places,
    rows, words, row_stride, found_stride, apart: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """What ``measure_kernel`` leaves over of a measurement, once the log-sum-exps are known.

    Numbers: KL(q || p), Jensen-Shannon, total variation, q's entropy. Places: of both largest logits, and how many
    of q's are greater than the token's.
    """
    row = tl.program_id(0) * height + tl.arange(0, height)
    used = row < rows
    more = tl.load(found + 2 * found_stride + row, mask=used, other=0)[:, None]
    top_p = tl.load(found + 4 * found_stride + row, mask=used, other=0)[:, None]
    log_p = tl.load(found + 5 * found_stride + row, mask=used, other=0)[:, None]
    top_q = tl.load(found + 6 * found_stride + row, mask=used, other=0)[:, None]
    log_q = tl.load(found + 7 * found_stride + row, mask=used, other=0)[:, None]
    of_p, of_q = tl.load(outer_p + row, mask=used, other=0), tl.load(outer_q + row, mask=used, other=0)
    token = tl.load(tokens + row, mask=used, other=0)
    _, of_token, _ = read_token(
        product_p, product_q, of_p, of_q, inner_p, inner_q, bias_p, bias_q, row, row_stride, token, used, apart
    )  # fmt: skip
    nothing = tl.zeros([height], tl.float32)
    kl, jensen_shannon, variation, entropy = nothing, nothing, nothing, nothing
    best_p, best_q, none = nothing + NEVER, nothing + NEVER, tl.zeros([height], tl.int32)
    where_p, where_q, rank = none, none, none
    for start in range(0, words, width):
        columns = start + tl.arange(0, width)
        inside = columns < words
        zp, zq, d = read_tile(
            product_p, product_q, of_p, of_q, inner_p, inner_q, bias_p, bias_q, row, row_stride, columns, inside, used,
            apart,
        )  # fmt: skip
        logq = (zq - top_q) - log_q
        p, q = tl.exp((zp - top_p) - log_p), tl.exp(logq)
        u = tl.where((zp == NEVER) & (zq == NEVER), 0.0, d + more)
        size = tl.abs(u)
        qu = tl.where(q == 0.0, 0.0, q * u)
        kl += tl.sum(tl.where(size < 0.3, q * phi_series(-u), p - q - qu), 1)
        variation += tl.sum(tl.where(u > 0.0, p, q) * -expm1(-size), 1)
        decay = tl.exp(-size)
        far = -tl.where(size > 80.0, 80.0, size) * decay / (1.0 + decay) - log1p((decay - 1.0) * 0.5)
        x = u * u
        close = x * (1 / 8 + x * (-1 / 64 + x * (1 / 576 + x * (-17 / 92160))))
        jensen_shannon += tl.sum(0.5 * (p + q) * tl.where(size < 0.3, close, far), 1)
        entropy -= tl.sum(tl.where(q == 0.0, 0.0, q * logq), 1)
        best_p, where_p = likelier(best_p, where_p, zp, columns)
        best_q, where_q = likelier(best_q, where_q, zq, columns)
        rank += tl.sum((zq > of_token[:, None]).to(tl.int32), 1)
    tl.store(numbers + row, kl, mask=used)
    tl.store(numbers + found_stride + row, jensen_shannon, mask=used)
    tl.store(numbers + 2 * found_stride + row, 0.5 * variation, mask=used)
    tl.store(numbers + 3 * found_stride + row, entropy, mask=used)
    tl.store(places + row, where_p, mask=used)
    tl.store(places + found_stride + row, where_q, mask=used)
    tl.store(places + 2 * found_stride + row, rank, mask=used)
