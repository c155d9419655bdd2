# pyright: basic, reportInvalidTypeForm=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""The arithmetic that the Triton kernels share: one row's two distributions, from tiles of their logits.

With ``d = zp - zq`` on a row's tokens, KL needs the mean of d under p and how d spreads around it:

    c = E_p d        y = E_p phi(d - c)        KL(p || q) = log1p(y)        phi(r) = expm1(-r) + r

for ``E_p expm1(c - d) = y``, and the log-sum-exps differ by ``log1p(y) - c``. A tile's sums are taken around the
tile's own mean, and two tiles' sums join as variances do, so that nothing cancels however near p and q are:

    Y' = sum e phi(r - s) = exp(s) Y + S phi(-s) - A expm1(s)        S = sum e, A = sum e r, Y = sum e phi(r)

A is 0 but for rounding. Where q is so far ahead of p on a token that Y overflows, ``c + lse_q - lse_p`` is taken.

Everything is a function of Triton: no reduction may drop a NaN, and ``tl.minimum`` and ``tl.maximum`` do.
"""

import triton
import triton.language as tl

NEVER = tl.constexpr(float("-inf"))
ALWAYS = tl.constexpr(float("inf"))


@triton.jit
def expm1(x):
    """exp(x) - 1, by its series where that would cancel."""
    series = 1.0 + x / 5.0 * (1.0 + x / 6.0 * (1.0 + x / 7.0 * (1.0 + x / 8.0)))
    series = x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0 * series)))
    return tl.where(tl.abs(x) < 0.3, series, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x), by the series of 2 artanh(x / (2 + x)) where that would cancel."""
    t = x / (2.0 + x)
    u = t * t
    series = 2.0 * t * (1.0 + u * (1.0 / 3.0 + u * (1.0 / 5.0 + u * (1.0 / 7.0 + u / 9.0))))
    return tl.where(tl.abs(x) < 0.3, series, tl.log(1.0 + x))


@triton.jit
def phi_series(x):
    """expm1(-x) + x for |x| < 0.3."""
    inner = 1.0 - x / 5.0 * (1.0 - x / 6.0 * (1.0 - x / 7.0 * (1.0 - x / 8.0)))
    return x * x * 0.5 * (1.0 - x / 3.0 * (1.0 - x / 4.0 * inner))


@triton.jit
def phi(x):
    """expm1(-x) + x."""
    return tl.where(tl.abs(x) < 0.3, phi_series(x), tl.exp(-x) - 1.0 + x)


@triton.jit
def tanh(x):
    """By expm1, which keeps the digits of small x, and of what is left to 1 where x is large."""
    size = tl.abs(x)
    twice = expm1(2.0 * tl.where(size > 10.0, 10.0, size))
    found = tl.where(size < 0.5, twice / (twice + 2.0), 1.0 - 2.0 / (twice + 2.0))
    return tl.where(x < 0.0, -found, found)


@triton.jit
def offset(bias, columns, inside):
    """The bias of some words; 0 without one."""
    found = tl.zeros(columns.shape, tl.float32)
    if bias is not None:
        found += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return found


@triton.jit
def logits_of(product, bias, there, inner, outer):
    """From a tile of ``hidden W^T`` to logits over the temperature; -inf where the vocabulary has ended."""
    z = product + bias
    if inner is not None:
        z = tanh(z * inner)
    return tl.where(there, z * outer, NEVER)


@triton.jit
def both_logits(
    product_p, product_q, bias_p, bias_q, there, inner_p, inner_q, outer_p, outer_q, apart: tl.constexpr
):
    """A tile of both models' logits, and zp - zq, which is NaN where both are -inf."""
    zp = logits_of(product_p, bias_p, there, inner_p, outer_p)
    if apart:
        d = tl.where(there, -product_q * outer_q, 0.0)
        zq = zp - d
    else:
        zq = logits_of(product_q, bias_q, there, inner_q, outer_q)
        d = zp - zq
    return zp, zq, d


@triton.jit
def exp_above(z, top):
    """exp(z - top), where a top of -inf stands for no mass at all."""
    return tl.exp(z - tl.where(top == NEVER, 0.0, top)[:, None])


@triton.jit
def tile_sums(zp, zq, d):
    """A tile's state: p's top, S, c, A, Y and sum of e (top - zp); q's top and sum of masses."""
    top = tl.max(zp, 1)
    top_q = tl.max(zq, 1)
    top = tl.where(top == NEVER, top_q, top)
    e = exp_above(zp, top)
    total = tl.sum(e, 1)
    centre = tl.where(total == 0.0, 0.0, tl.sum(tl.where(e == 0.0, 0.0, e * d), 1) / total)
    r = d - centre[:, None]
    er = tl.where(e == 0.0, 0.0, e * r)
    of_q = exp_above(zq + centre[:, None], top)
    terms = tl.where(tl.abs(r) < 0.3, e * phi_series(r), of_q - e + er)
    below = tl.where(e == 0.0, 0.0, e * (top[:, None] - zp))
    total_q = tl.sum(exp_above(zq, top_q), 1)
    return top, total, centre, tl.sum(er, 1), tl.sum(terms, 1), tl.sum(below, 1), top_q, total_q


@triton.jit
def rise(old, new):
    """exp(old - new): what masses measured from ``old`` are measured from ``new``."""
    return tl.where(old == new, 1.0, tl.exp(old - new))


@triton.jit
def moved(top, total, centre, a, y, below, new_top, new_centre):
    """One state's S, A, Y and entropy sum, measured from another top and centre."""
    scale = rise(top, new_top)
    shift = new_centre - centre
    scaled = tl.where(total == 0.0, 0.0, total * scale)
    a = tl.where(total == 0.0, 0.0, a * scale)
    y = tl.where(y == 0.0, 0.0, y * scale)
    y = tl.exp(shift) * y + scaled * phi(-shift) - a * expm1(shift)
    below = tl.where(total == 0.0, 0.0, below * scale + scaled * (new_top - top))
    return scaled, a - shift * scaled, y, below


@triton.jit
def joined(top_1, s_1, c_1, a_1, y_1, b_1, top_q1, s_q1, top_2, s_2, c_2, a_2, y_2, b_2, top_q2, s_q2):
    """The state of two tiles together; a side without mass under p has no say in top and centre."""
    higher = tl.where(top_1 > top_2, top_1, top_2)
    top = tl.where(s_1 == 0.0, tl.where(s_2 == 0.0, higher, top_2), tl.where(s_2 == 0.0, top_1, higher))
    part_1 = tl.where(s_1 == 0.0, 0.0, s_1 * rise(top_1, top))
    part_2 = tl.where(s_2 == 0.0, 0.0, s_2 * rise(top_2, top))
    whole = part_1 + part_2
    mean_1 = tl.where(part_1 == 0.0, 0.0, c_1 * (part_1 / whole))
    mean_2 = tl.where(part_2 == 0.0, 0.0, c_2 * (part_2 / whole))
    centre = mean_1 + mean_2
    s_1, a_1, y_1, b_1 = moved(top_1, s_1, c_1, a_1, y_1, b_1, top, centre)
    s_2, a_2, y_2, b_2 = moved(top_2, s_2, c_2, a_2, y_2, b_2, top, centre)
    top_q = tl.where(top_q1 > top_q2, top_q1, top_q2)
    s_q = s_q1 * rise(top_q1, top_q) + s_q2 * rise(top_q2, top_q)
    return top, s_1 + s_2, centre, a_1 + a_2, y_1 + y_2, b_1 + b_2, top_q, s_q


@triton.jit
def empty(height: tl.constexpr):
    """The state of no token at all."""
    nothing = tl.zeros([height], tl.float32)
    return nothing + NEVER, nothing, nothing, nothing, nothing, nothing, nothing + NEVER, nothing


@triton.jit
def concluded(top, total, centre, a, y, below, top_q, total_q):
    """KL, E_p d, by how much q's log-sum-exp is larger, p's entropy, and the logs of both masses over their tops."""
    x = tl.where(tl.abs(a) < ALWAYS, a / total, 0.0)
    y = y / total
    near = x + log1p(y - x)
    near = tl.where(near < 0.0, 0.0, near)  # p and q are the same then, and this is y's rounding
    log_p, log_q = tl.log(total), tl.log(total_q)
    larger = (top_q - top) + (log_q - log_p)
    mean = centre + x
    is_finite = near < ALWAYS
    kl = tl.where(is_finite, near, mean + larger)
    more = tl.where(is_finite, near - mean, larger)
    return kl, mean, more, log_p + below / total, log_p, log_q
