"""Case (a) against closed forms, scipy's quadrature and the published tables."""

import math

import pytest
from estimator_study.normals import SHIFTS, noise_crossing, normal_case
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm


@pytest.fixture(scope="module")
def cases():
    return {shift: normal_case(shift) for shift in SHIFTS}


def moments(row):
    return row.value, row.bias, row.standard_deviation


@pytest.mark.parametrize("m", SHIFTS)
def test_moments_against_the_closed_forms(cases, m):
    case, kl = cases[m], m * m / 2
    assert case.kl == pytest.approx(kl, rel=1e-12)
    assert moments(case.row("k1")) == pytest.approx((kl, 0, m), rel=1e-10, abs=1e-12)
    k2 = m**2 / 2 + m**4 / 8
    expected = k2, k2 - kl, math.sqrt((2 * m**4 + m**6) / 4)
    assert moments(case.row("k2")) == pytest.approx(expected, rel=1e-10)
    for name in ("k3", "kl_loss"):
        expected = kl, 0, math.sqrt(math.expm1(m * m) - m * m)
        assert moments(case.row(name)) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    # |u| of u ~ N(m²/2, m²) is a folded normal.
    folded = m * math.sqrt(2 / math.pi) * math.exp(-m * m / 8) + kl * (1 - 2 * norm.cdf(-m / 2))
    expected = folded, folded - kl, math.sqrt(kl**2 + m**2 - folded**2)
    assert moments(case.row("abs")) == pytest.approx(expected, rel=1e-10)
    assert moments(case.row("exact")) == pytest.approx((kl, 0, 0), rel=1e-12)
    assert case.row("k1").negative_share == pytest.approx(norm.cdf(-m / 2), rel=1e-10)
    assert not any(case.row(name).negative_share for name in ("abs", "k2", "k3", "kl_loss", "exact"))


@pytest.mark.parametrize("m", SHIFTS)
def test_the_controlled_estimate_is_the_best_of_its_kind(cases, m):
    row = cases[m].row("k1 + a(w − 1)")
    a = m * m / math.expm1(m * m)
    assert f"a = {a:.3f}" in cases[m].notes[0]
    spread = math.sqrt(m * m - m**4 / math.expm1(m * m))
    assert moments(row) == pytest.approx((m * m / 2, 0, spread), rel=1e-8, abs=1e-9)
    # With a below 1 it is negative between the other root of u + a (w - 1) and u = 0.
    root = brentq(lambda u: u + a * math.expm1(-u), math.log(a) - 60, math.log(a))
    share = norm.cdf((0 - m * m / 2) / m) - norm.cdf((root - m * m / 2) / m)
    assert row.negative_share == pytest.approx(share, rel=1e-8)


@pytest.mark.parametrize("m", SHIFTS)
def test_gradients_in_mean_and_log_scale(cases, m):
    """By hand: KL(p || q) has (-m, 0), KL(q || p) has (-m, -m^2), and E sign(u) score by scipy."""
    found = {row.name: row.gradient_error for row in cases[m].rows}
    assert found["k1"] == pytest.approx(1)
    assert found["k2"] == pytest.approx(0, abs=1e-12)
    assert found["kl_loss"] == pytest.approx(0, abs=1e-12)
    assert found["exact"] == 0
    assert found["k3"] == pytest.approx(m, rel=1e-9)
    scores = (lambda x: x * norm.pdf(x), lambda x: (x * x - 1) * norm.pdf(x))
    parts = [quad(score, -12, m / 2)[0] - quad(score, m / 2, 12)[0] for score in scores]
    assert found["abs"] == pytest.approx(math.hypot(parts[0] + m, parts[1]) / m, rel=1e-7)
    a = m * m / math.expm1(m * m)
    assert found["k1 + a(w − 1)"] == pytest.approx(math.hypot(1 - a, a * m), rel=1e-8)


def test_the_noise_of_k1_and_k3_crosses_where_the_variances_are_equal():
    at = brentq(lambda square: math.expm1(square) - 2 * square, 0.5, 3) / 2
    assert noise_crossing() == pytest.approx(at, rel=1e-12) == pytest.approx(0.628, abs=5e-4)
