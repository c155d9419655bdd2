# pyright: basic, reportInvalidTypeForm=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""KL in one kernel fused with the products of hidden states and weights, which are never written to memory.

A program processes a tile of tokens and a share of the vocabulary, and keeps a state of eight numbers for each token.
A second kernel combines the states of all shares. This is slower than the vendor's matmuls where those get enough
tokens at once, and faster where the memory is for fewer, since a weight is read once for ``HEIGHT`` tokens.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from kleash.linear.impl.base import HeadInputs, HeadPair
from kleash.linear.impl.triton.arithmetic import (
    both_logits,
    combine,
    empty_state,
    load_bias,
    summary,
    tile_sums,
)
from kleash.linear.impl.triton.launch import head_factors

HEIGHT, WIDTH, DEPTH = 128, 64, 64
"""Tokens, columns of the vocabulary and dimensions that a program multiplies at a time."""
SHARE = 4096
"""Columns of the vocabulary that a program processes."""
STATE = 8
"""Numbers of a token's state."""


@triton.jit
def product(
    hidden, weight, row, used, columns, inside, dim, hidden_stride, weight_stride,
    height: tl.constexpr, width: tl.constexpr, depth: tl.constexpr, widen: tl.constexpr,
):  # fmt: skip
    """A tile of ``hidden W^T``, summed in float32."""
    total = tl.zeros([height, width], tl.float32)
    rows_at = hidden + row.to(tl.int64)[:, None] * hidden_stride
    columns_at = weight + columns.to(tl.int64)[None, :] * weight_stride
    for start in range(0, dim, depth):
        k = start + tl.arange(0, depth)
        h = tl.load(rows_at + k[None, :], mask=used[:, None] & (k < dim)[None, :], other=0.0)
        w = tl.load(columns_at + k[:, None], mask=inside[None, :] & (k < dim)[:, None], other=0.0)
        if widen:
            h, w = h.to(tl.float32), w.to(tl.float32)
        total = tl.dot(h, w, total, input_precision="ieee")
    return total


@triton.jit
def share_kernel(
    hidden_p, hidden_q, weight_p, weight_q, outer_p, outer_q, inner_p, inner_q, bias_p, bias_q, states,
    rows, vocab_size, share, dim_p, dim_q, hidden_stride_p, hidden_stride_q, weight_stride_p, weight_stride_q,
    height: tl.constexpr, width: tl.constexpr, depth: tl.constexpr, widen: tl.constexpr,
):  # fmt: skip
    """The state of some tokens over a share of the vocabulary."""
    row = tl.program_id(0) * height + tl.arange(0, height)
    used = row < rows
    first = tl.program_id(1) * share
    last = min(first + share, vocab_size)
    of_p, of_q = tl.load(outer_p + row, mask=used, other=0), tl.load(outer_q + row, mask=used, other=0)
    top, s, c, a, y, below, top_q, s_q = empty_state(height)
    for start in range(first, last, width):
        columns = start + tl.arange(0, width)
        inside = columns < last
        zp, zq, d = both_logits(
            product(
                hidden_p, weight_p, row, used, columns, inside, dim_p, hidden_stride_p, weight_stride_p,
                height, width, depth, widen,
            ),
            product(
                hidden_q, weight_q, row, used, columns, inside, dim_q, hidden_stride_q, weight_stride_q,
                height, width, depth, widen,
            ),
            load_bias(bias_p, columns, inside)[None, :], load_bias(bias_q, columns, inside)[None, :],
            inside[None, :] & (row >= 0)[:, None], inner_p, inner_q, of_p[:, None], of_q[:, None], False,
        )  # fmt: skip
        top_t, s_t, c_t, a_t, y_t, below_t, top_qt, s_qt = tile_sums(zp, zq, d)
        top, s, c, a, y, below, top_q, s_q = combine(
            top, s, c, a, y, below, top_q, s_q, top_t, s_t, c_t, a_t, y_t, below_t, top_qt, s_qt
        )
    at = states + tl.program_id(1).to(tl.int64) * 8 * rows + row
    tl.store(at, top, mask=used)
    tl.store(at + rows, s, mask=used)
    tl.store(at + 2 * rows, c, mask=used)
    tl.store(at + 3 * rows, a, mask=used)
    tl.store(at + 4 * rows, y, mask=used)
    tl.store(at + 5 * rows, below, mask=used)
    tl.store(at + 6 * rows, top_q, mask=used)
    tl.store(at + 7 * rows, s_q, mask=used)


@triton.jit
def combine_kernel(states, values, rows, shares, height: tl.constexpr):
    """KL of some tokens from the states of all shares."""
    row = tl.program_id(0) * height + tl.arange(0, height)
    used = row < rows
    top, s, c, a, y, below, top_q, s_q = empty_state(height)
    for share in range(shares):
        at = states + tl.cast(share, tl.int64) * 8 * rows + row
        top, s, c, a, y, below, top_q, s_q = combine(
            top, s, c, a, y, below, top_q, s_q,
            tl.load(at, mask=used, other=0.0), tl.load(at + rows, mask=used, other=0.0),
            tl.load(at + 2 * rows, mask=used, other=0.0), tl.load(at + 3 * rows, mask=used, other=0.0),
            tl.load(at + 4 * rows, mask=used, other=0.0), tl.load(at + 5 * rows, mask=used, other=0.0),
            tl.load(at + 6 * rows, mask=used, other=0.0), tl.load(at + 7 * rows, mask=used, other=0.0),
        )  # fmt: skip
    kl, _, _, _, _, _ = summary(top, s, c, a, y, below, top_q, s_q)
    tl.store(values + row, kl, mask=used)


def supports(pair: HeadPair) -> bool:
    """Whether hidden states and weights of both models have one dtype, and there are weights."""
    weights = pair.p.head.weight, pair.q.head.weight
    tensors = (pair.p.hidden, pair.q.hidden, *weights)
    return len({None if x is None else x.dtype for x in tensors}) == 1


def kl_values(pair: HeadPair) -> Float[Tensor, " tokens"]:
    """KL of each token; it needs memory for a state for each token and share of the vocabulary."""
    count, vocab_size, device = pair.tokens, pair.local_vocab_size, pair.p.hidden.device
    values = torch.empty(count, dtype=torch.float32, device=device)
    if count == 0:
        return values
    shares = -(-vocab_size // SHARE)
    states = torch.empty((shares, STATE, count), dtype=torch.float32, device=device)
    p, q = head_factors(pair.p, count), head_factors(pair.q, count)
    (hidden_p, weight_p), (hidden_q, weight_q) = hidden_and_weight(pair.p), hidden_and_weight(pair.q)
    cast("Any", share_kernel)[(-(-count // HEIGHT), shares)](
        *(hidden_p, hidden_q, weight_p, weight_q, p.outer, q.outer, p.inner, q.inner, p.bias, q.bias, states),
        *(count, vocab_size, SHARE, hidden_p.shape[1], hidden_q.shape[1]),
        *(x.stride(0) for x in (hidden_p, hidden_q, weight_p, weight_q)),
        height=HEIGHT,
        width=WIDTH,
        depth=DEPTH,
        widen=device.type == "cpu",  # the interpreter's product of bfloat16 tiles is wrong
        num_warps=8,
        enable_fp_fusion=False,
    )
    cast("Any", combine_kernel)[(-(-count // HEIGHT),)](
        states, values, count, shares, height=HEIGHT, enable_fp_fusion=False
    )
    return values


def hidden_and_weight(model: HeadInputs) -> tuple[Tensor, Tensor]:
    """A model's hidden states and weight, copied where the entries of a row are not contiguous."""
    weight = model.head.weight
    assert weight is not None
    hidden, weight = (x if x.stride(1) == 1 else x.contiguous() for x in (model.hidden, weight))
    return hidden, weight
