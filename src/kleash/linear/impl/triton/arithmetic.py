# pyright: basic, reportInvalidTypeForm=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""The arithmetic of the Triton kernels: KL and entropies of a row, from tiles of both models' logits.

With ``d = zp - zq``, KL is a function of the mean of d under p and of the spread of d around it:

    c = E_p d        y = E_p phi(d - c)        KL(p || q) = log1p(y)        phi(r) = expm1(-r) + r

since ``E_p expm1(c - d) = y``, and the log-sum-exps differ by ``log1p(y) - c``. The sums of a tile are taken around the
tile's mean, and those of two tiles are combined as variances are, so that nothing cancels however near p and q are:

    Y' = sum e phi(r - s) = exp(s) Y + S phi(-s) - A expm1(s)        S = sum e, A = sum e r, Y = sum e phi(r)

A is 0 but for rounding. Where q exceeds p on a token so far that Y overflows, KL is ``c + lse_q - lse_p``.

The state of a row is the tuple (top, S, c, A, Y, sum of e (top - zp), top of q, sum of q's masses). All functions are
Triton functions. They avoid ``tl.minimum`` and ``tl.maximum``, which drop NaN.
"""

import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))


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
    """tanh(x) by expm1, accurate for small x and near 1."""
    size = tl.abs(x)
    twice = expm1(2.0 * tl.where(size > 10.0, 10.0, size))
    magnitude = tl.where(size < 0.5, twice / (twice + 2.0), 1.0 - 2.0 / (twice + 2.0))
    return tl.where(x < 0.0, -magnitude, magnitude)


@triton.jit
def load_bias(bias, columns, mask):
    """The bias of some columns; 0 without one."""
    value = tl.zeros(columns.shape, tl.float32)
    if bias is not None:
        value += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def finish_logits(product, bias, mask, inner, outer):
    """From a tile of ``hidden W^T`` to logits divided by the temperature; -inf outside of the vocabulary."""
    z = product + bias
    if inner is not None:
        z = tanh(z * inner)
    return tl.where(mask, z * outer, NEG_INF)


@triton.jit
def both_logits(
    product_p, product_q, bias_p, bias_q, mask, inner_p, inner_q, outer_p, outer_q, q_is_delta: tl.constexpr
):
    """A tile of both models' logits, and ``zp - zq``, which is NaN where both are -inf."""
    zp = finish_logits(product_p, bias_p, mask, inner_p, outer_p)
    if q_is_delta:
        d = tl.where(mask, -product_q * outer_q, 0.0)
        zq = zp - d
    else:
        zq = finish_logits(product_q, bias_q, mask, inner_q, outer_q)
        d = zp - zq
    return zp, zq, d


@triton.jit
def exp_above(z, top):
    """exp(z - top); 0 if top is -inf."""
    return tl.exp(z - tl.where(top == NEG_INF, 0.0, top)[:, None])


@triton.jit
def tile_sums(zp, zq, d):
    """The state of a tile."""
    top = tl.max(zp, 1)
    top_q = tl.max(zq, 1)
    top = tl.where(top == NEG_INF, top_q, top)
    e = exp_above(zp, top)
    total = tl.sum(e, 1)
    centre = tl.where(total == 0.0, 0.0, tl.sum(tl.where(e == 0.0, 0.0, e * d), 1) / total)
    r = d - centre[:, None]
    er = tl.where(e == 0.0, 0.0, e * r)
    mass_q = exp_above(zq + centre[:, None], top)
    terms = tl.where(tl.abs(r) < 0.3, e * phi_series(r), mass_q - e + er)
    below = tl.where(e == 0.0, 0.0, e * (top[:, None] - zp))
    total_q = tl.sum(exp_above(zq, top_q), 1)
    return top, total, centre, tl.sum(er, 1), tl.sum(terms, 1), tl.sum(below, 1), top_q, total_q


@triton.jit
def rescale(old, new):
    """exp(old - new): the factor of masses relative to ``old`` that makes them relative to ``new``."""
    return tl.where(old == new, 1.0, tl.exp(old - new))


@triton.jit
def shift_state(top, total, centre, a, y, below, new_top, new_centre):
    """S, A, Y and the entropy sum of a state, relative to another top and centre."""
    scale = rescale(top, new_top)
    shift = new_centre - centre
    scaled = tl.where(total == 0.0, 0.0, total * scale)
    a = tl.where(total == 0.0, 0.0, a * scale)
    y = tl.where(y == 0.0, 0.0, y * scale)
    y = tl.exp(shift) * y + scaled * phi(-shift) - a * expm1(shift)
    below = tl.where(total == 0.0, 0.0, below * scale + scaled * (new_top - top))
    return scaled, a - shift * scaled, y, below


@triton.jit
def combine(top_1, s_1, c_1, a_1, y_1, b_1, top_q1, s_q1, top_2, s_2, c_2, a_2, y_2, b_2, top_q2, s_q2):
    """The state of two tiles; a tile without mass under p does not change top and centre."""
    higher = tl.where(top_1 > top_2, top_1, top_2)
    top = tl.where(s_1 == 0.0, tl.where(s_2 == 0.0, higher, top_2), tl.where(s_2 == 0.0, top_1, higher))
    part_1 = tl.where(s_1 == 0.0, 0.0, s_1 * rescale(top_1, top))
    part_2 = tl.where(s_2 == 0.0, 0.0, s_2 * rescale(top_2, top))
    whole = part_1 + part_2
    mean_1 = tl.where(part_1 == 0.0, 0.0, c_1 * (part_1 / whole))
    mean_2 = tl.where(part_2 == 0.0, 0.0, c_2 * (part_2 / whole))
    centre = mean_1 + mean_2
    s_1, a_1, y_1, b_1 = shift_state(top_1, s_1, c_1, a_1, y_1, b_1, top, centre)
    s_2, a_2, y_2, b_2 = shift_state(top_2, s_2, c_2, a_2, y_2, b_2, top, centre)
    top_q = tl.where(top_q1 > top_q2, top_q1, top_q2)
    s_q = s_q1 * rescale(top_q1, top_q) + s_q2 * rescale(top_q2, top_q)
    return top, s_1 + s_2, centre, a_1 + a_2, y_1 + y_2, b_1 + b_2, top_q, s_q


@triton.jit
def empty_state(height: tl.constexpr):
    """The state of no columns."""
    zero = tl.zeros([height], tl.float32)
    return zero + NEG_INF, zero, zero, zero, zero, zero, zero + NEG_INF, zero


@triton.jit
def summary(top, total, centre, a, y, below, top_q, total_q):
    """KL, E_p d, log-sum-exp of q minus that of p, p's entropy and the logs of both total masses, from a state."""
    x = tl.where(tl.abs(a) < POS_INF, a / total, 0.0)
    y = y / total
    near = x + log1p(y - x)
    near = tl.where(near < 0.0, 0.0, near)  # p and q are equal then, and this is the rounding of y
    log_p, log_q = tl.log(total), tl.log(total_q)
    direct_delta = (top_q - top) + (log_q - log_p)
    mean = centre + x
    is_finite = near < POS_INF
    kl = tl.where(is_finite, near, mean + direct_delta)
    log_sum_delta = tl.where(is_finite, near - mean, direct_delta)
    return kl, mean, log_sum_delta, log_p + below / total, log_p, log_q
