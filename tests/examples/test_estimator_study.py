"""The estimator study against published tables, closed forms, moments, scipy's quadrature, and its README."""

import math

import numpy as np
import pytest
from estimator_study.study import SHIFTS, noise_crossing, normal_case, tables, two_mode_cases, two_mode_fits
from scipy.integrate import quad, trapezoid
from scipy.optimize import brentq, minimize
from scipy.stats import norm

X = np.linspace(-14, 14, 40_001)
TARGET = 0.6 * norm.pdf(X, -2, 0.6) + 0.4 * norm.pdf(X, 2, 0.6)


@pytest.fixture(scope="module")
def fits():
    return two_mode_fits()


def test_every_table_of_the_readme_is_printed(fits, root):
    text = (root / "examples/estimator_study/README.md").read_text(encoding="utf-8")
    written, printed = (
        [line for line in each.splitlines() if line.startswith(("| ", "### "))]
        for each in (text, tables(fits))
    )
    assert written == printed and len(written) > 60
    assert f"{noise_crossing():.3f} nats" in " ".join(text.split())


# --- normals ---


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
    assert cases[m].weight == pytest.approx(a, rel=1e-9)
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


def test_bias_and_deviation_agree_with_the_tables_of_schulman(cases):
    """Published as sampled, and rounded to two or three digits."""
    published = {
        0.1: {"k1": (0, 20), "k2": (0.002, 1.42), "k3": (0, 1.42)},
        1.0: {"k1": (0, 2), "k2": (0.25, 1.73), "k3": (0, 1.7)},
    }
    for shift, rows in published.items():
        for name, expected in rows.items():
            row, kl = cases[shift].row(name), cases[shift].kl
            assert (row.bias / kl, row.standard_deviation / kl) == pytest.approx(expected, abs=6e-3)


def test_the_noise_of_k1_and_k3_crosses_where_the_variances_are_equal():
    at = brentq(lambda square: math.expm1(square) - 2 * square, 0.5, 3) / 2
    assert noise_crossing() == pytest.approx(at, rel=1e-12) == pytest.approx(0.628, abs=5e-4)


# --- two modes ---


def divergence(p, q):
    here = p > 0
    return trapezoid(p[here] * np.log(p[here] / q[here]), X[here])


def total_variation(parameters):
    return trapezoid(np.abs(norm.pdf(X, parameters[0], math.exp(parameters[1])) - TARGET), X)


def place(fit):
    return fit.mean, fit.standard_deviation


def test_averaging_over_the_target_matches_its_moments(fits):
    covering = fits[1]
    assert place(covering) == pytest.approx((-0.4, math.sqrt(0.36 + 4 - 0.16)), abs=1e-6)
    assert "KL(target ‖ fit)" in covering.name


def test_averaging_over_the_fit_seeks_the_larger_mode(fits):
    seeking = fits[2]

    def reverse_kl(x):
        return divergence(norm.pdf(X, x[0], math.exp(x[1])), TARGET)

    tolerance = {"xatol": 1e-8, "fatol": 1e-13}
    best = minimize(reverse_kl, [-1.8, -0.4], method="Nelder-Mead", options=tolerance)
    assert place(seeking) == pytest.approx((best.x[0], math.exp(best.x[1])), abs=1e-5)
    assert seeking.kl_fit_target == pytest.approx(best.fun, abs=1e-8)
    assert seeking.kl_fit_target == pytest.approx(-math.log(0.6), abs=2e-3)


def test_both_distances(fits):
    for fit in fits:
        density = norm.pdf(X, fit.mean, fit.standard_deviation)
        assert fit.kl_fit_target == pytest.approx(divergence(density, TARGET), rel=1e-5)
        assert fit.kl_target_fit == pytest.approx(divergence(TARGET, density), rel=1e-5)
    covering, seeking = fits[1:3]
    assert covering.kl_target_fit < seeking.kl_target_fit
    assert seeking.kl_fit_target < covering.kl_fit_target


def test_where_each_estimator_leads(fits):
    ends = {fit.name: place(fit) for fit in fits[3:]}
    covering, seeking = (place(fit) for fit in fits[1:3])
    assert ends["k1"] == place(fits[0]) == (-0.5, 1.0)
    for name in ("k2", "kl_loss", "exact"):
        assert ends[name] == pytest.approx(seeking, abs=1e-4)
    assert ends["k3"] == pytest.approx(covering, abs=1e-4)
    tolerance = {"xatol": 1e-7, "fatol": 1e-12}
    nearest = minimize(total_variation, [-1.0, 0.0], method="Nelder-Mead", options=tolerance)
    assert ends["abs"] == pytest.approx((nearest.x[0], math.exp(nearest.x[1])), abs=2e-3)


def test_estimators_before_the_fit_against_scipy(fits):
    start = two_mode_cases(fits)[0]

    def log_ratio(x):
        target = 0.6 * norm.pdf(x, -2, 0.6) + 0.4 * norm.pdf(x, 2, 0.6)
        return norm.logpdf(x, -0.5, 1.0) - math.log(target)

    def mean(function):
        return quad(lambda x: norm.pdf(x, -0.5, 1.0) * function(log_ratio(x)), -9, 9, limit=400)[0]

    kl = mean(lambda u: u)
    functions = {"k1": lambda u: u, "k2": lambda u: u * u / 2, "k3": lambda u: math.exp(-u) - 1 + u}
    assert start.kl == pytest.approx(kl, rel=1e-7)
    for name, function in functions.items():
        row, average = start.row(name), mean(function)
        assert row.value == pytest.approx(average, rel=1e-6)
        assert row.bias == pytest.approx(average - kl, abs=1e-6)
        spread = math.sqrt(mean(lambda u, f=function, m=average: (f(u) - m) ** 2))
        assert row.standard_deviation == pytest.approx(spread, rel=1e-5)
    probs = norm.pdf(X, -0.5, 1.0)
    u = np.log(probs / TARGET, where=probs > 0, out=np.zeros_like(X))
    assert start.row("k1").negative_share == pytest.approx(trapezoid(probs * (u < 0), X), abs=5e-4)


def test_where_the_kl_is_smallest_it_has_no_gradient_to_miss(fits):
    _, covering, seeking = two_mode_cases(fits)
    assert {row.gradient_error for row in seeking.rows} == {None}
    # Where KL(target ‖ fit) is smallest, k3 feels nothing, and misses all of the other gradient.
    assert covering.row("k3").gradient_error == pytest.approx(1, abs=1e-6)
    assert covering.row("k2").gradient_error == pytest.approx(0, abs=1e-9)
    assert seeking.row("k3").standard_deviation > 1e6 * seeking.row("k1").standard_deviation
