# pyright: basic, reportInvalidTypeForm=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Triton kernels on products in memory: from a row to its summary, its statistics, and its gradient in place.

A program processes ``height`` rows, one on a GPU, in tiles of ``width`` columns. It reads the products ``hidden W^T``
and turns them into logits: ``outer tanh(inner (product + bias))``, or ``outer (product + bias)`` without a softcap. If
``q_is_delta``, q's products are the difference of its logits from p's. ``used`` rows exist; ``inside`` columns exist.
"""

import triton
import triton.language as tl

from kleash.linear.impl.triton.arithmetic import (
    NEG_INF,
    both_logits,
    combine,
    empty_state,
    expm1,
    load_bias,
    log1p,
    phi_series,
    summary,
    tile_sums,
)


@triton.jit
def read_tile(
    product_p, product_q, outer_p, outer_q, inner_p, inner_q, bias_p, bias_q, row, row_stride, columns, inside, used,
    q_is_delta: tl.constexpr,
):  # fmt: skip
    """Both models' logits of a tile, and ``zp - zq``; a row that is not used is not read."""
    where = row.to(tl.int64)[:, None] * row_stride + columns[None, :]
    mask = inside[None, :] & (row >= 0)[:, None]
    return both_logits(
        tl.load(product_p + where, mask=mask & used[:, None], other=0.0),
        tl.load(product_q + where, mask=mask & used[:, None], other=0.0),
        load_bias(bias_p, columns, inside)[None, :], load_bias(bias_q, columns, inside)[None, :],
        mask, inner_p, inner_q, outer_p[:, None], outer_q[:, None], q_is_delta,
    )  # fmt: skip


@triton.jit
def read_token(
    product_p, product_q, outer_p, outer_q, inner_p, inner_q, bias_p, bias_q, row, row_stride, token, used,
    q_is_delta: tl.constexpr,
):  # fmt: skip
    """Both models' logits of one token in each row, and ``zp - zq``."""
    where = row.to(tl.int64) * row_stride + token
    return both_logits(
        tl.load(product_p + where, mask=used, other=0.0), tl.load(product_q + where, mask=used, other=0.0),
        load_bias(bias_p, token, used), load_bias(bias_q, token, used),
        used, inner_p, inner_q, outer_p, outer_q, q_is_delta,
    )  # fmt: skip


@triton.jit
def summary_kernel(
    product_p, product_q, outer_p, outer_q, inner_p, inner_q, bias_p, bias_q, tokens, fields,
    rows, vocab_size, row_stride, fields_stride, q_is_delta: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write the fields of ``RowSummary`` for each row."""
    row = tl.program_id(0) * height + tl.arange(0, height)
    used = row < rows
    of_p, of_q = tl.load(outer_p + row, mask=used, other=0), tl.load(outer_q + row, mask=used, other=0)
    top, s, c, a, y, below, top_q, s_q = empty_state(height)
    for start in range(0, vocab_size, width):
        columns = start + tl.arange(0, width)
        inside = columns < vocab_size
        zp, zq, d = read_tile(
            product_p, product_q, of_p, of_q, inner_p, inner_q, bias_p, bias_q, row, row_stride, columns, inside, used,
            q_is_delta,
        )  # fmt: skip
        top_t, s_t, c_t, a_t, y_t, below_t, top_qt, s_qt = tile_sums(zp, zq, d)
        top, s, c, a, y, below, top_q, s_q = combine(
            top, s, c, a, y, below, top_q, s_q, top_t, s_t, c_t, a_t, y_t, below_t, top_qt, s_qt
        )
    kl, mean, delta, entropy, log_p, log_q = summary(top, s, c, a, y, below, top_q, s_q)
    tl.store(fields + row, kl, mask=used)
    tl.store(fields + fields_stride + row, mean, mask=used)
    tl.store(fields + 2 * fields_stride + row, delta, mask=used)
    tl.store(fields + 3 * fields_stride + row, entropy, mask=used)
    tl.store(fields + 4 * fields_stride + row, top, mask=used)
    tl.store(fields + 5 * fields_stride + row, log_p, mask=used)
    tl.store(fields + 6 * fields_stride + row, top_q, mask=used)
    tl.store(fields + 7 * fields_stride + row, log_q, mask=used)
    if tokens is not None:
        token = tl.load(tokens + row, mask=used, other=0)
        zp, zq, d = read_token(
            product_p, product_q, of_p, of_q, inner_p, inner_q, bias_p, bias_q, row, row_stride, token, used, q_is_delta
        )  # fmt: skip
        logp, log_ratio = (zp - top) - log_p, d + delta
        # Near p, log p - log_ratio has more digits than the direct log q; where log p is -inf, it is undefined.
        logq = tl.where(logp == NEG_INF, (zq - top_q) - log_q, logp - log_ratio)
        tl.store(fields + 8 * fields_stride + row, logp, mask=used)
        tl.store(fields + 9 * fields_stride + row, logq, mask=used)


@triton.jit
def coefficient(pointer, row, used_rows, height: tl.constexpr):
    """The coefficient of a term in each row; 0 without one."""
    c = tl.zeros([height], tl.float32)
    if pointer is not None:
        c += tl.load(pointer + row, mask=used_rows, other=0.0)
    return c


@triton.jit
def logits_backward(gradient, z, inner, outer):
    """The gradient in ``hidden W^T + bias`` from that in a tile's logits."""
    if inner is None:
        factor = outer
    else:
        t = z / outer[:, None]
        gradient = gradient * (1.0 - t * t)
        factor = outer * inner
    return gradient * factor[:, None]


@triton.jit
def gradient_kernel(
    product_p, product_q, outer_p, outer_q, inner_p, inner_q, bias_p, bias_q, tokens, fields,
    c_kl, c_logp, c_logq, c_entropy, in_p, in_q,
    rows, vocab_size, row_stride, fields_stride, stride_p, stride_q,
    q_is_delta: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write the gradient of ``sum c term`` in both products, where needed; over the products or elsewhere.

        in p's logits: c_logp (1_x - p) + c_kl p (d - E_p d) - c_entropy p (log p + H)
        in q's:        c_logq (1_x - q) + c_kl (q - p)

    A row whose coefficients are 0 is not read, and its gradient is 0. A tile is read before any of it is written: a
    bfloat16 gradient, whose rows start where those of the products do, only overwrites what was read before.
    """
    row = tl.program_id(0) * height + tl.arange(0, height)
    used_rows = row < rows
    kl_c, logp_c = coefficient(c_kl, row, used_rows, height), coefficient(c_logp, row, used_rows, height)
    logq_c, entropy_c = (
        coefficient(c_logq, row, used_rows, height),
        coefficient(c_entropy, row, used_rows, height),
    )
    used = (kl_c != 0.0) | (logp_c != 0.0) | (logq_c != 0.0) | (entropy_c != 0.0)
    mean = tl.load(fields + fields_stride + row, mask=used_rows, other=0)[:, None]
    delta = tl.load(fields + 2 * fields_stride + row, mask=used_rows, other=0)[:, None]
    entropy = tl.load(fields + 3 * fields_stride + row, mask=used_rows, other=0)[:, None]
    top_p = tl.load(fields + 4 * fields_stride + row, mask=used_rows, other=0)[:, None]
    log_p = tl.load(fields + 5 * fields_stride + row, mask=used_rows, other=0)[:, None]
    top_q = tl.load(fields + 6 * fields_stride + row, mask=used_rows, other=0)[:, None]
    log_q = tl.load(fields + 7 * fields_stride + row, mask=used_rows, other=0)[:, None]
    of_p, of_q = (
        tl.load(outer_p + row, mask=used_rows, other=0),
        tl.load(outer_q + row, mask=used_rows, other=0),
    )
    for start in range(0, vocab_size, width):
        columns = start + tl.arange(0, width)
        inside = columns < vocab_size
        mask = inside[None, :]
        zp, zq, d = read_tile(
            product_p, product_q, of_p, of_q, inner_p, inner_q, bias_p, bias_q, row, row_stride, columns, inside, used,
            q_is_delta,
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
                    columns[None, :] == tl.load(tokens + row, mask=used_rows, other=0)[:, None],
                    logp_c[:, None],
                    0.0,
                )
            by = logits_backward(by, zp, inner_p, of_p)
            by = tl.where(used[:, None], by, 0.0).to(in_p.dtype.element_ty)
            tl.store(
                in_p + row.to(tl.int64)[:, None] * stride_p + columns[None, :],
                by,
                mask=mask & used_rows[:, None],
            )
        if in_q is not None:
            q = tl.exp((zq - top_q) - log_q)
            u = d + delta
            # q - p from the larger of the two: neither cancels nor overflows.
            change = expm1(-tl.abs(u))
            by = tl.where(u > 0.0, p * change, -q * change)
            by = tl.where((p == 0.0) & (q == 0.0), 0.0, kl_c[:, None] * by)
            if tokens is not None:
                by -= logq_c[:, None] * q
                by += tl.where(
                    columns[None, :] == tl.load(tokens + row, mask=used_rows, other=0)[:, None],
                    logq_c[:, None],
                    0.0,
                )
            by = logits_backward(by, zq, inner_q, of_q)
            by = tl.where(used[:, None], by, 0.0).to(in_q.dtype.element_ty)
            tl.store(
                in_q + row.to(tl.int64)[:, None] * stride_q + columns[None, :],
                by,
                mask=mask & used_rows[:, None],
            )


@triton.jit
def update_argmax(best, where, z, columns):
    """The largest logit of a row and its first index, after one more tile."""
    z = tl.where(z == z, z, NEG_INF)
    top = tl.max(z, 1)
    place = tl.argmax(z, 1) + tl.min(columns, 0)
    return tl.where(top > best, top, best), tl.where(top > best, place, where)


@triton.jit
def statistics_kernel(
    product_p, product_q, outer_p, outer_q, inner_p, inner_q, bias_p, bias_q, tokens, fields, floats, integers,
    rows, vocab_size, row_stride, fields_stride, q_is_delta: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write the other statistics of each row, from the fields of its summary.

    Floats: KL(q || p), Jensen-Shannon, total variation, q's entropy. Integers: the indices of both largest logits, and
    the number of q's logits greater than the token's.
    """
    row = tl.program_id(0) * height + tl.arange(0, height)
    used = row < rows
    delta = tl.load(fields + 2 * fields_stride + row, mask=used, other=0)[:, None]
    top_p = tl.load(fields + 4 * fields_stride + row, mask=used, other=0)[:, None]
    log_p = tl.load(fields + 5 * fields_stride + row, mask=used, other=0)[:, None]
    top_q = tl.load(fields + 6 * fields_stride + row, mask=used, other=0)[:, None]
    log_q = tl.load(fields + 7 * fields_stride + row, mask=used, other=0)[:, None]
    of_p, of_q = tl.load(outer_p + row, mask=used, other=0), tl.load(outer_q + row, mask=used, other=0)
    token = tl.load(tokens + row, mask=used, other=0)
    _, of_token, _ = read_token(
        product_p, product_q, of_p, of_q, inner_p, inner_q, bias_p, bias_q, row, row_stride, token, used, q_is_delta
    )  # fmt: skip
    zero = tl.zeros([height], tl.float32)
    kl, jensen_shannon, variation, entropy = zero, zero, zero, zero
    best_p, best_q, none = zero + NEG_INF, zero + NEG_INF, tl.zeros([height], tl.int32)
    where_p, where_q, rank = none, none, none
    for start in range(0, vocab_size, width):
        columns = start + tl.arange(0, width)
        inside = columns < vocab_size
        zp, zq, d = read_tile(
            product_p, product_q, of_p, of_q, inner_p, inner_q, bias_p, bias_q, row, row_stride, columns, inside, used,
            q_is_delta,
        )  # fmt: skip
        logq = (zq - top_q) - log_q
        p, q = tl.exp((zp - top_p) - log_p), tl.exp(logq)
        u = tl.where((zp == NEG_INF) & (zq == NEG_INF), 0.0, d + delta)
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
        best_p, where_p = update_argmax(best_p, where_p, zp, columns)
        best_q, where_q = update_argmax(best_q, where_q, zq, columns)
        rank += tl.sum((zq > of_token[:, None]).to(tl.int32), 1)
    tl.store(floats + row, kl, mask=used)
    tl.store(floats + fields_stride + row, jensen_shannon, mask=used)
    tl.store(floats + 2 * fields_stride + row, 0.5 * variation, mask=used)
    tl.store(floats + 3 * fields_stride + row, entropy, mask=used)
    tl.store(integers + row, where_p, mask=used)
    tl.store(integers + fields_stride + row, where_q, mask=used)
    tl.store(integers + 2 * fields_stride + row, rank, mask=used)
