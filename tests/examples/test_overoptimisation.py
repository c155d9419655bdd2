"""Gao's curves: against scipy's fit, formulas of the peak found by search, and how often intervals cover."""

import math

import numpy as np
import pytest
from overoptimisation import CURVES, fit_overoptimisation
from scipy.optimize import curve_fit, minimize_scalar
from scipy.stats import t as student

from kleash.errors import OptionError, ShapeError, UnknownNameError

FORMS = {
    "best_of_n": lambda kl, a, b: np.sqrt(kl) * (a - b * np.sqrt(kl)),
    "rl": lambda kl, a, b: np.sqrt(kl) * (a - b * np.log(np.sqrt(kl))),
}
KLS = np.array([0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0])
TRUTH = {"best_of_n": (1.2, 0.18), "rl": (1.0, 0.5)}


def measured(curve, seed=0, noise=0.1, kls=KLS):
    return FORMS[curve](kls, *TRUTH[curve]) + noise * np.random.default_rng(seed).normal(size=len(kls))


def highest(curve, a, b):
    found = minimize_scalar(
        lambda d: -FORMS[curve](d * d, a, b), bounds=(1e-6, 100), method="bounded", options={"xatol": 1e-10}
    )
    return found.x**2, -found.fun


@pytest.mark.parametrize("curve", FORMS)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_fit_agrees_with_scipy(curve, weighted):
    rewards = measured(curve)
    errors = np.linspace(0.02, 0.5, len(KLS)) if weighted else None
    got = fit_overoptimisation(KLS, rewards, curve=curve, standard_errors=errors)
    (a, b), covariance = curve_fit(FORMS[curve], KLS, rewards, p0=(1, 0.1), sigma=errors)
    assert (got.a.value, got.b.value) == pytest.approx((a, b), rel=1e-6)
    assert got.a.standard_error == pytest.approx(math.sqrt(covariance[0, 0]), rel=1e-4)
    assert got.b.standard_error == pytest.approx(math.sqrt(covariance[1, 1]), rel=1e-4)
    assert got.covariance == pytest.approx(covariance[0, 1], rel=1e-4)
    half = student.ppf(0.975, len(KLS) - 2) * got.a.standard_error
    assert got.a.ci95 == pytest.approx((got.a.value - half, got.a.value + half))
    assert (got.a.clusters, got.curve) == (8, curve)


@pytest.mark.parametrize("curve", FORMS)
def test_the_peak_agrees_with_a_numerical_search(curve):
    got = fit_overoptimisation(KLS, measured(curve), curve=curve)
    kl, reward = highest(curve, got.a.value, got.b.value)
    assert got.peak_kl_nats.value == pytest.approx(kl, rel=1e-6)
    assert got.peak_reward.value == pytest.approx(reward, rel=1e-9)
    assert (got.peak_kl_nats.unit, got.peak_reward.unit) == ("nats", "none")
    low, high = got.peak_kl_nats.ci95
    assert low < got.peak_kl_nats.value < high < math.inf
    assert got.peak_reward.standard_error == pytest.approx(
        (got.reward(np.array([kl])).high - got.reward(np.array([kl])).low)[0] / 2 / student.ppf(0.975, 6)
    )


@pytest.mark.parametrize("curve", FORMS)
def test_the_error_of_the_peak_is_the_delta_method(curve):
    got = fit_overoptimisation(KLS, measured(curve), curve=curve)
    a, b, step = got.a.value, got.b.value, 1e-4
    slope = np.array(
        [
            (highest(curve, a + step, b)[0] - highest(curve, a - step, b)[0]) / (2 * step),
            (highest(curve, a, b + step)[0] - highest(curve, a, b - step)[0]) / (2 * step),
        ]
    )
    off = got.covariance
    spread = np.array([[got.a.standard_error**2, off], [off, got.b.standard_error**2]])
    assert got.peak_kl_nats.standard_error == pytest.approx(math.sqrt(slope @ spread @ slope), rel=1e-3)


def errors_off(got, kl):
    """How many t quantiles a - ratio b is from 0, for the ratio that peaks at this KL."""
    ratio = 2 * math.sqrt(kl) if got.curve == "best_of_n" else 1 + math.log(kl) / 2
    error = got.a.standard_error**2 - 2 * ratio * got.covariance + ratio**2 * got.b.standard_error**2
    quantile = student.ppf(0.975, got.a.clusters - 2)
    return abs(got.a.value - ratio * got.b.value) / math.sqrt(error) / quantile


@pytest.mark.parametrize("curve", FORMS)
def test_the_peaks_interval_inverts_a_t_test(curve):
    got = fit_overoptimisation(KLS, measured(curve, noise=0.2), curve=curve)
    for end in got.peak_kl_nats.ci95:
        assert errors_off(got, end) == pytest.approx(1, rel=1e-6)
    assert errors_off(got, got.peak_kl_nats.value) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("curve", FORMS)
def test_intervals_have_their_nominal_coverage(curve):
    kls = KLS[2:]
    (a, b), hits = TRUTH[curve], np.zeros(5)
    peak = highest(curve, a, b)
    for seed in range(400):
        got = fit_overoptimisation(kls, measured(curve, seed, noise=0.15, kls=kls), curve=curve)
        at = got.reward(np.array([10.0]))
        ends = [got.a.ci95, got.b.ci95, got.peak_kl_nats.ci95, got.peak_reward.ci95, (at.low[0], at.high[0])]
        truths = [a, b, *peak, FORMS[curve](10.0, a, b)]
        hits += [low <= truth <= high for (low, high), truth in zip(ends, truths, strict=True)]
    assert (np.abs(hits / 400 - 0.95) < 0.035).all(), hits / 400


@pytest.mark.parametrize("curve", FORMS)
def test_the_curve_starts_at_zero_and_points_there_have_no_effect(curve):
    rewards = measured(curve)
    got = fit_overoptimisation(KLS, rewards, curve=curve)
    start = got.reward(np.array([0.0]))
    assert (start.reward[0], start.low[0], start.high[0]) == (0.0, 0.0, 0.0)
    more = fit_overoptimisation(np.append(KLS, 0.0), np.append(rewards, 0.0), curve=curve)
    assert (more.a.value, more.b.value) == pytest.approx((got.a.value, got.b.value))
    assert got.reward(KLS).reward == pytest.approx(FORMS[curve](KLS, got.a.value, got.b.value))


def test_a_fit_without_a_peak():
    rising = np.sqrt(KLS) * (1 + 0.1 * np.sqrt(KLS)) + 0.05 * np.cos(10 * KLS)
    for curve in FORMS:
        got = fit_overoptimisation(KLS, rising, curve=curve)
        assert got.b.ci95[1] < 0
        assert got.peak_kl_nats.value == math.inf and got.peak_kl_nats.ci95 == (math.inf, math.inf)
        assert got.peak_reward.value == math.inf and math.isnan(got.peak_reward.standard_error)
        assert "the fit has no peak: its b is not above 0" in got.peak_kl_nats.warnings


@pytest.mark.parametrize("seed", range(6))
def test_data_that_do_not_exclude_a_missing_peak_give_a_warning(seed):
    """b about 0: the interval reaches to infinity, on whichever side of 0 the estimate falls."""
    straight = np.sqrt(KLS) + 0.2 * np.random.default_rng(seed).normal(size=len(KLS))
    got = fit_overoptimisation(KLS, straight, curve="best_of_n")
    low, high = got.peak_kl_nats.ci95
    assert (got.b.ci95[0] <= 0) == (high == math.inf)
    assert got.b.ci95[0] < 0 < got.b.ci95[1]
    assert errors_off(got, low) == pytest.approx(1, rel=1e-6) and errors_off(got, 1.1 * low) < 1
    wanted = "do not exclude that there is no peak" if got.b.value > 0 else "the fit has no peak"
    assert any(wanted in warning for warning in got.peak_kl_nats.warnings)


def test_a_decreasing_reward_peaks_at_zero():
    falling = -np.sqrt(KLS) - 0.3 * KLS + 0.02 * np.cos(10 * KLS)
    got = fit_overoptimisation(KLS, falling, curve="best_of_n")
    assert got.peak_kl_nats.value == 0 and got.peak_kl_nats.ci95 == (0, 0) and got.peak_reward.value == 0
    barely = fit_overoptimisation(KLS[:4], -np.sqrt(KLS[:4]) + [0.1, -0.2, 0.1, 0.0], curve="rl")
    assert barely.b.ci95[0] < 0 < barely.b.ci95[1]
    low, high = barely.peak_kl_nats.ci95
    assert low == 0 and errors_off(barely, high) == pytest.approx(1) and errors_off(barely, 0.9 * high) < 1


def test_few_points_and_extrapolated_peaks_give_warnings():
    few = fit_overoptimisation(KLS[:4], measured("best_of_n", kls=KLS[:4], noise=0.001), curve="best_of_n")
    assert few.a.warnings == ("only 4 points for two parameters",)
    assert any("lies beyond the largest KL measured, 2" in warning for warning in few.peak_kl_nats.warnings)
    nearly = fit_overoptimisation(KLS[:6], measured("best_of_n", kls=KLS[:6], noise=0.001), curve="best_of_n")
    assert any(
        "lies beyond the largest KL measured, 8" in warning for warning in nearly.peak_kl_nats.warnings
    )
    assert fit_overoptimisation(KLS, measured("rl", noise=0.01), curve="rl").peak_kl_nats.warnings == ()


@pytest.mark.parametrize("name", CURVES)
def test_the_curves_have_the_published_forms(name):
    d, step = np.array([0.3, 2.0, 5.0]), 1e-6
    assert d * (1.5 - 0.4 * CURVES[name].bend(d)) == pytest.approx(FORMS[name](d * d, 1.5, 0.4))
    slope = (CURVES[name].peak(1.3 + step) - CURVES[name].peak(1.3 - step)) / (2 * step)
    assert CURVES[name].peak_slope(1.3) == pytest.approx(slope, rel=1e-6)
    assert CURVES["rl"].peak(1e4) == math.inf and CURVES["rl"].peak(-1e4) == 0


def fit(kls, rewards, curve="rl", errors=None):
    return fit_overoptimisation(
        np.array(kls),
        np.array(rewards),
        curve=curve,
        standard_errors=None if errors is None else np.array(errors),
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: fit([1, 2], [1, 2]),
            ShapeError,
            "there are 2 points; two parameters and their error need at least 3",
        ),
        (lambda: fit([1, 2, 3], [1, 2]), ShapeError, r"kl_nats are \(3,\), rewards \(2,\)"),
        (lambda: fit([1, 2, 3], [1, 2, 3], errors=[1.0]), ShapeError, r"standard_errors \(1,\)"),
        (lambda: fit([1, -0.2, 3], [1, 2, 3]), OptionError, "kl_nats reach -0.2; no KL is below 0"),
        (lambda: fit([1, 2, 3], [1, 2, 4]).reward(np.array([-1.0])), OptionError, "kl_nats reach -1; no KL"),
        (lambda: fit([1, math.nan, 3], [1, 2, 3]), OptionError, "kl_nats hold nan; leave out points"),
        (lambda: fit([1, 2, 3], [1, math.inf, 3]), OptionError, "rewards hold inf"),
        (lambda: fit([2, 2, 2, 0], [1, 2, 3, 0]), OptionError, "there are 1 different KLs above 0"),
        (lambda: fit([0, 0, 0], [1, 2, 3]), OptionError, "there are 0 different KLs"),
        (lambda: fit([1, 2, 3], [1, 2, 3], errors=[1, 0, 1]), OptionError, "standard_errors reach 0; give"),
        (lambda: fit([1, 2, 3], [1, 2, 3], errors=[1, math.nan, 1]), OptionError, "standard_errors hold nan"),
        (lambda: fit([1, 2, 3], [1, 2, 3], curve="bon"), UnknownNameError, "no curve is called 'bon'"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_invalid_overoptimisation_arguments_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
