"""Case (d) against moments, scipy's minimisers and a fine grid."""

import math

import numpy as np
import pytest
from estimator_study.two_modes import two_mode_cases, two_modes
from scipy.integrate import quad, trapezoid
from scipy.optimize import minimize
from scipy.stats import norm

X = np.linspace(-14, 14, 40_001)
TARGET = 0.6 * norm.pdf(X, -2, 0.6) + 0.4 * norm.pdf(X, 2, 0.6)


@pytest.fixture(scope="module")
def found():
    return two_modes()


def divergence(p, q):
    here = p > 0
    return trapezoid(p[here] * np.log(p[here] / q[here]), X[here])


def total_variation(parameters):
    return trapezoid(np.abs(norm.pdf(X, parameters[0], math.exp(parameters[1])) - TARGET), X)


def place(fit):
    return fit.mean, fit.standard_deviation


def test_averaging_over_the_target_matches_its_moments(found):
    covering = found.projections[0]
    assert place(covering) == pytest.approx((-0.4, math.sqrt(0.36 + 4 - 0.16)), abs=1e-6)
    assert "KL(target ‖ fit)" in covering.name


def test_averaging_over_the_fit_seeks_the_larger_mode(found):
    seeking = found.projections[1]

    def reverse_kl(x):
        return divergence(norm.pdf(X, x[0], math.exp(x[1])), TARGET)

    tolerance = {"xatol": 1e-8, "fatol": 1e-13}
    best = minimize(reverse_kl, [-1.8, -0.4], method="Nelder-Mead", options=tolerance)
    assert place(seeking) == pytest.approx((best.x[0], math.exp(best.x[1])), abs=1e-5)
    assert seeking.kl_fit_target == pytest.approx(best.fun, abs=1e-8)
    assert seeking.kl_fit_target == pytest.approx(-math.log(0.6), abs=2e-3)


def test_both_distances(found):
    for fit in (found.start, *found.projections, *found.descents):
        density = norm.pdf(X, fit.mean, fit.standard_deviation)
        assert fit.kl_fit_target == pytest.approx(divergence(density, TARGET), rel=1e-5)
        assert fit.kl_target_fit == pytest.approx(divergence(TARGET, density), rel=1e-5)
    covering, seeking = found.projections
    assert covering.kl_target_fit < seeking.kl_target_fit
    assert seeking.kl_fit_target < covering.kl_fit_target


def test_where_each_estimator_leads(found):
    ends = {fit.name: place(fit) for fit in found.descents}
    covering, seeking = (place(fit) for fit in found.projections)
    assert ends["k1"] == place(found.start) == (-0.5, 1.0)
    for name in ("k2", "kl_loss", "exact"):
        assert ends[name] == pytest.approx(seeking, abs=1e-4)
    assert ends["k3"] == pytest.approx(covering, abs=1e-4)
    tolerance = {"xatol": 1e-7, "fatol": 1e-12}
    nearest = minimize(total_variation, [-1.0, 0.0], method="Nelder-Mead", options=tolerance)
    assert ends["abs"] == pytest.approx((nearest.x[0], math.exp(nearest.x[1])), abs=2e-3)


def test_estimators_before_the_fit_against_scipy(found):
    start = two_mode_cases(found)[0]

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


def test_where_the_kl_is_smallest_it_has_no_gradient_to_miss(found):
    _, covering, seeking = two_mode_cases(found)
    assert {row.gradient_error for row in seeking.rows} == {None}
    # Where KL(target ‖ fit) is smallest, k3 feels nothing, and misses all of the other gradient.
    assert covering.row("k3").gradient_error == pytest.approx(1, abs=1e-6)
    assert covering.row("k2").gradient_error == pytest.approx(0, abs=1e-9)
    assert seeking.row("k3").standard_deviation > 1e6 * seeking.row("k1").standard_deviation
