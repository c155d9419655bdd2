"""Second and forward-mode derivatives of the exact functions against 50-digit arithmetic."""

from itertools import product

import pytest
import torch
from mpmath import mp, mpf
from torch.autograd import forward_ad

from kleash.divergences import (
    DIVERGENCES,
    alpha_divergence,
    cross_entropy,
    divergence,
    entropy,
    hellinger,
    jensen_shannon,
    kl,
    renyi,
    skew_kl,
    total_variation,
)

STEP = mpf(10) ** -12


def kl_of(p, q):
    return sum(a * mp.log(a / b) for a, b in zip(p, q, strict=True) if a)


def mixed(p, q, w):
    return [w * a + (1 - w) * b for a, b in zip(p, q, strict=True)]


def powers(p, q, a):
    return sum(x**a * y ** (1 - a) for x, y in zip(p, q, strict=True) if x and y)


def js_of(p, q, w):
    return w * kl_of(p, mixed(p, q, w)) + (1 - w) * kl_of(q, mixed(p, q, w))


def alpha_of(p, q, a):
    return (powers(p, q, a) - 1) / (a * (a - 1))


def renyi_of(p, q, a):
    return mp.log(powers(p, q, a)) / (a - 1)


TENTH, THIRD = mpf(0.1), mpf(0.3)
CASES = {
    "kl": (kl, kl_of),
    "reverse_kl": (lambda p, q: divergence("reverse_kl", p, q), lambda p, q: kl_of(q, p)),
    "jeffreys": (lambda p, q: divergence("jeffreys", p, q), lambda p, q: kl_of(p, q) + kl_of(q, p)),
    "jensen_shannon": (jensen_shannon, lambda p, q: js_of(p, q, mpf(0.5))),
    "jensen_shannon .1": (lambda p, q: jensen_shannon(p, q, 0.1), lambda p, q: js_of(p, q, TENTH)),
    "skew .1": (lambda p, q: skew_kl(p, q, 0.1), lambda p, q: kl_of(p, mixed(p, q, TENTH))),
    "skew .9": (lambda p, q: skew_kl(p, q, 0.9), lambda p, q: kl_of(p, mixed(p, q, mpf(0.9)))),
    "alpha .3": (lambda p, q: alpha_divergence(p, q, 0.3), lambda p, q: alpha_of(p, q, THIRD)),
    "alpha .7": (lambda p, q: alpha_divergence(p, q, 0.7), lambda p, q: alpha_of(p, q, mpf(0.7))),
    "alpha -.5": (lambda p, q: alpha_divergence(p, q, -0.5), lambda p, q: alpha_of(p, q, mpf(-0.5))),
    "alpha 3": (lambda p, q: alpha_divergence(p, q, 3.0), lambda p, q: alpha_of(p, q, mpf(3))),
    "renyi .3": (lambda p, q: renyi(p, q, 0.3), lambda p, q: renyi_of(p, q, THIRD)),
    "renyi 2": (lambda p, q: renyi(p, q, 2.0), lambda p, q: renyi_of(p, q, mpf(2))),
    "chi_squared": (
        lambda p, q: divergence("chi_squared", p, q),
        lambda p, q: sum((a - b) ** 2 / b for a, b in zip(p, q, strict=True) if b),
    ),
    "total_variation": (total_variation, lambda p, q: sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2),
    "hellinger": (
        hellinger,
        lambda p, q: mp.sqrt(sum((mp.sqrt(a) - mp.sqrt(b)) ** 2 for a, b in zip(p, q, strict=True)) / 2),
    ),
    "cross_entropy": (
        cross_entropy,
        lambda p, q: -sum(a * mp.log(b) for a, b in zip(p, q, strict=True) if a),
    ),
    "entropy": (lambda p, q: entropy(p), lambda p, q: -sum(a * mp.log(a) for a in p if a)),
}
KINKED = ("total_variation", "hellinger")
P = [-0.3, -1.7, -2.5]
PAIRS = {
    "tie": (P, P),
    "one token tied": ([-0.3, -1.7, -2.5], [-0.3, -2.5, -1.7]),
    "near": (P, [-0.3 + 3e-8, -1.7 - 2e-8, -2.5 + 1e-8]),
    "a shared zero": ([-0.3, -1.7, -torch.inf], [-0.3, -1.5, -torch.inf]),
}


def shifted(logp, by):
    """Log-probabilities with ``by`` added to the logits; equal to ``logp`` bit for bit where that is 0."""
    normaliser_shift = torch.logsumexp(logp + by, -1, keepdim=True)
    return logp + by - (normaliser_shift - normaliser_shift.detach())


def normalised(logp):
    logp = torch.tensor(logp, dtype=torch.float64)
    return logp - logp.logsumexp(-1)


def probabilities(logp, by):
    weights = [
        mp.exp(mpf(x) + d) if x > -torch.inf else mpf(0) for x, d in zip(logp.tolist(), by, strict=True)
    ]
    return [w / sum(weights) for w in weights]


def hessian_by_differences(function, logp, logq):
    """The Hessian in both logits by central differences of 50 digits."""
    n = len(logp)

    def at(*moves):
        by = [mpf(0)] * (2 * n)
        for place, step in moves:
            by[place] += step
        return function(probabilities(logp, by[:n]), probabilities(logq, by[n:]))

    hessian = torch.zeros(2 * n, 2 * n, dtype=torch.float64)
    for i, j in product(range(2 * n), repeat=2):
        if i <= j:
            signs = product((1, -1), repeat=2)
            total = sum(a * b * at((i, a * STEP), (j, b * STEP)) for a, b in signs)
            hessian[i, j] = hessian[j, i] = float(total / (4 * STEP**2))
    return hessian


def of_logits(function, logp, logq):
    return lambda by: function(shifted(logp, by[: len(logp)]), shifted(logq, by[len(logp) :]))


def pair_of(kind):
    logp, logq = (normalised(x) for x in PAIRS[kind])
    assert (logp == logq).any() == ("tie" in kind or "zero" in kind)
    return logp, logq


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_agree_with_50_digit_differences(name, pair):
    """At ties a sum of two clamps gave twice the second derivative, or 0, depending on torch's version."""
    if "tie" in pair and name in KINKED:
        return
    function, textbook = CASES[name]
    logp, logq = pair_of(pair)
    twice = torch.autograd.functional.hessian(
        of_logits(function, logp, logq), torch.zeros(6, dtype=torch.float64)
    )
    with mp.workdps(40):
        expected = hessian_by_differences(textbook, logp, logq)
    # The root of a small number magnifies the rounding of the log-probabilities themselves.
    rtol = 1e-7 if (name, pair) == ("hellinger", "near") else 1e-9
    torch.testing.assert_close(twice, expected, rtol=rtol, atol=1e-9 * min(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_agrees_with_backward_mode_in_any_nesting(name):
    """A custom autograd function with a jvp gave 0 for forward over forward mode."""
    logp = torch.stack([normalised([-0.3, -1.7, -2.5, x]) for x in (-2.0, -torch.inf)])
    logq = torch.stack([normalised([-0.3, -2.5, -1.7, x]) for x in (-2.0, -1.0)])
    logq[0, 0] = logp[0, 0]
    value = of_logits(CASES[name][0], logp, logq)

    def both(by):
        return value(by).sum()

    at = torch.zeros(2 * len(logp), 4, dtype=torch.float64)
    twice = torch.autograd.functional.hessian(both, at)
    for outer, inner in ((torch.func.jacfwd, torch.func.jacrev), (torch.func.jacfwd, torch.func.jacfwd)):
        torch.testing.assert_close(outer(inner(both))(at), twice, rtol=1e-11, atol=1e-12)
    way = torch.ones_like(at).cumsum(-1)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(both(forward_ad.make_dual(at, way))).tangent
    (slope,) = torch.func.jacrev(both)(at)[None]
    torch.testing.assert_close(tangent, (slope * way).sum(), rtol=1e-11, atol=1e-12)


def test_second_derivatives_at_the_kinks_of_total_variation_and_hellinger():
    """Total variation has derivative 0 at a tie, as torch.abs; Hellinger's second derivative there is NaN."""
    assert set(DIVERGENCES) <= set(CASES)
    logp, logq = pair_of("one token tied")
    at = torch.zeros(6, dtype=torch.float64)
    ours = torch.autograd.functional.hessian(of_logits(total_variation, logp, logq), at)
    plain = torch.autograd.functional.hessian(
        of_logits(lambda p, q: (p.exp() - q.exp()).abs().sum() / 2, logp, logq), at
    )
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-14)
    same = of_logits(hellinger, logp, logp)
    assert (torch.func.grad(same)(at) == 0).all()
    assert torch.func.jvp(same, (at,), (at + 1,))[1] == 0
    assert torch.autograd.functional.hessian(same, at).isnan().all()
