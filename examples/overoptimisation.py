"""Over-optimisation of a proxy reward: Gao et al.'s curves of gold reward against KL, fitted with intervals."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Real
from numpy.typing import NDArray

from kleash.errors import OptionError, ShapeError
from kleash.registry import look_up
from kleash.uncertainty import Estimate, student_t_quantile

Array = NDArray[np.float64]
LARGEST_EXPONENT = 700.0
Interval = tuple[float, float]
NO_PEAK = "the fit has no peak: its b is not above 0"
FEWEST_POINTS = 3
FEW_POINTS = 8


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A form of the reward: ``d (a - b bend(d))`` with ``d = sqrt(KL)``."""

    bend: Callable[[Array], Array]
    """The factor of b; increases with d."""
    peak: Callable[[float], float]
    """The d with the highest reward, at least 0, as a function of a / b, for b above 0."""
    peak_slope: Callable[[float], float]
    """The derivative of ``peak``."""


def _capped_exp(x: float) -> float:
    return math.exp(x) if x < LARGEST_EXPONENT else math.inf


CURVES: Mapping[str, Curve] = MappingProxyType(
    {
        "best_of_n": Curve(
            bend=lambda d: d,
            peak=lambda ratio: max(ratio, 0.0) / 2,
            peak_slope=lambda ratio: 0.5 if ratio > 0 else 0.0,
        ),
        "rl": Curve(
            bend=lambda d: np.log(np.where(d > 0, d, 1.0)),
            peak=lambda ratio: _capped_exp(ratio - 1),
            peak_slope=lambda ratio: _capped_exp(ratio - 1),
        ),
    }
)
"""Name -> form: those of Gao et al. for best-of-n sampling and for reinforcement learning."""


class RewardAt(NamedTuple):
    """The fitted curve and its 95 % confidence limits at each point."""

    reward: Float64[np.ndarray, "points"]
    low: Float64[np.ndarray, "points"]
    high: Float64[np.ndarray, "points"]


@dataclass(frozen=True, kw_only=True)
class Overoptimisation:
    """A fitted curve of reward against KL, and its peak."""

    curve: str
    """"best_of_n" or "rl"."""
    a: Estimate
    """Initial slope of the reward, per sqrt(nat)."""
    b: Estimate
    """Rate at which the slope declines; the curve has a peak if it is above 0."""
    covariance: float
    """Covariance of a and b."""
    peak_kl_nats: Estimate
    """The KL with the highest reward; inf if the fit has no peak."""
    peak_reward: Estimate
    """The reward at the peak, minus that of the initial policy."""

    def reward(self, kl_nats: Real[np.ndarray, "points"]) -> RewardAt:
        """The curve at the given KLs, with 95 % confidence limits of the curve (not of a new measurement).

        Raises:
            OptionError: if a KL is negative.
        """
        kls = _float64(kl_nats)
        _require_none_negative(kls)
        d = np.sqrt(kls)
        design = _design(CURVES[self.curve], d)
        value = design @ np.array([self.a.value, self.b.value])
        covariance = self.covariance
        matrix = np.array([[self.a.standard_error**2, covariance], [covariance, self.b.standard_error**2]])
        half = _student_factor(self.a.clusters) * np.sqrt(np.einsum("ni,ij,nj->n", design, matrix, design))
        return RewardAt(value, value - half, value + half)


def fit_overoptimisation(
    kl_nats: Real[np.ndarray, "points_k"],
    rewards: Real[np.ndarray, "points_r"],
    *,
    curve: str,
    standard_errors: Real[np.ndarray, "points_e"] | None = None,
) -> Overoptimisation:
    """Fit reward against KL by least squares, with Student t intervals and an interval for the peak.

        best_of_n    R = d (a - b d)          peak at d = a / 2b          d = sqrt(KL)
        rl           R = d (a - b log d)      peak at d = exp(a / b - 1)

    R is the *true* (gold) reward minus that of the initial policy, so R is 0 at KL 0; points there have no effect. Both
    forms are linear in a and b. The variance is estimated from the residuals with points - 2 degrees of freedom;
    ``standard_errors`` only set the relative weights of the points (1 / error^2). The interval of the peak is Fieller's
    interval of the ratio a / b: it is not symmetric, and unbounded if the data do not exclude b = 0. Points of one
    training run are not independent measurements, so their intervals are too narrow.

    Args:
        kl_nats: KL(policy || initial policy), at least 0; for best-of-n, at most ``best_of_n_bound``.
        rewards: the true reward at each KL, minus that of the initial policy.
        curve: "best_of_n" or "rl".
        standard_errors: of the rewards, above 0; None for equal weights.

    Raises:
        UnknownNameError: if the curve is unknown.
        ShapeError: if the arrays do not have one number per point, or there are fewer than 3 points.
        OptionError: if a KL is negative, a number is not finite, an error is not above 0, or fewer than two
            different KLs are above 0.

    References:
        Gao et al., "Scaling Laws for Reward Model Overoptimization" (2022), https://arxiv.org/abs/2210.10760
        Fieller, "Some Problems in Interval Estimation" (1954).
    """
    fitted_curve = look_up(CURVES, curve, "curve")
    kls, heights = _float64(kl_nats), _float64(rewards)
    errors = np.ones_like(kls) if standard_errors is None else _float64(standard_errors)
    _require_points(kls, heights, errors)
    d = np.sqrt(kls)
    design = _design(fitted_curve, d) / errors[:, None]
    fit = _least_squares(design, heights / errors)
    return Overoptimisation(
        curve=curve,
        a=_estimate(fit, fit.a, "none", math.sqrt(fit.covariance[0, 0])),
        b=_estimate(fit, fit.b, "none", math.sqrt(fit.covariance[1, 1])),
        covariance=float(fit.covariance[0, 1]),
        peak_kl_nats=_peak_kl(fitted_curve, fit, float(kls.max())),
        peak_reward=_peak_reward(fitted_curve, fit),
    )


class _Fit(NamedTuple):
    """Least-squares estimates of a and b, with their covariance."""

    a: float
    b: float
    covariance: Array
    points: int


def _least_squares(design: Array, heights: Array) -> _Fit:
    """Fit a and b by the pseudo-inverse, whose product with its transpose is their covariance per unit of variance."""
    root = np.asarray(np.linalg.pinv(design), np.float64)
    a, b = (float(x) for x in root @ heights)
    residuals = heights - design @ np.array([a, b])
    covariance = np.einsum("in,jn->ij", root, root) * (residuals @ residuals) / (len(heights) - 2)
    return _Fit(a, b, covariance, len(heights))


def _design(curve: Curve, d: Array) -> Array:
    """The design matrix: the derivatives of the reward in a and b at each point."""
    return np.stack([d, -d * curve.bend(d)], axis=-1)


def _student_factor(points: int) -> float:
    """Half the width of a 95 % interval in standard errors."""
    return student_t_quantile(0.975, points - 2)


def _estimate(
    fit: _Fit, value: float, unit: str, error: float, ci95: Interval | None = None, *warnings: str
) -> Estimate:
    """An ``Estimate`` with Student's t interval unless ``ci95`` is given, and a warning about few points."""
    half = _student_factor(fit.points) * error
    few = (f"only {fit.points} points for two parameters",) if fit.points < FEW_POINTS else ()
    return Estimate(
        value=value,
        unit=unit,
        standard_error=error,
        clusters=fit.points,
        ci95=(value - half, value + half) if ci95 is None else ci95,
        warnings=(*warnings, *few),
    )


def _peak_kl(curve: Curve, fit: _Fit, max_kl: float) -> Estimate:
    """The KL at the peak of the reward, in nats, with Fieller's interval.

    ``d`` is sqrt(KL); a and b are those of ``fit_overoptimisation``.

    Args:
        curve: the curve that was fitted.
        fit: a and b with their covariance.
        max_kl: the largest measured KL, in nats.
    """
    low, high = (curve.peak(end) * curve.peak(end) for end in _ratio_interval(fit))
    if fit.b <= 0:
        return _estimate(fit, math.inf, "nats", math.nan, (low, high), NO_PEAK)
    ratio = fit.a / fit.b
    d, gradient = curve.peak(ratio), np.array([1.0, -ratio]) / fit.b
    error = 2 * d * curve.peak_slope(ratio) * math.sqrt(gradient @ fit.covariance @ gradient)
    warnings: list[str] = []
    if fit.b**2 <= _student_factor(fit.points) ** 2 * fit.covariance[1, 1]:
        warnings.append("the data do not exclude that there is no peak: the interval of b reaches 0")
    if d * d > max_kl:
        warnings.append(f"the peak at {d * d:.3g} nats lies beyond the largest KL measured, {max_kl:.3g}")
    return _estimate(fit, d * d, "nats", error, (low, high), *warnings)


def _peak_reward(curve: Curve, fit: _Fit) -> Estimate:
    """The reward at the peak. The curve is flat there, so its error is that of the curve at a fixed KL."""
    d = curve.peak(fit.a / fit.b) if fit.b > 0 else math.inf
    if math.isinf(d):
        return _estimate(fit, math.inf, "none", math.nan, (-math.inf, math.inf), NO_PEAK)
    design = _design(curve, np.array([d]))[0]
    value = float(design @ np.array([fit.a, fit.b]))
    return _estimate(fit, value, "none", math.sqrt(design @ fit.covariance @ design))


def _ratio_interval(fit: _Fit) -> Interval:
    """Fieller's interval of a / b, restricted to b above 0.

    All ratios r for which a - r b is within its Student t error of 0: ``second r^2 - 2 first r + constant <= 0``. If
    the interval of b contains 0 it is unbounded, on the side given by the sign of a at b = 0.
    """
    factor = _student_factor(fit.points) ** 2
    second = fit.b**2 - factor * fit.covariance[1, 1]
    first = fit.a * fit.b - factor * fit.covariance[0, 1]
    constant = fit.a**2 - factor * fit.covariance[0, 0]
    discriminant = first**2 - second * constant
    if second > 0:
        root = math.sqrt(max(discriminant, 0.0))
        interval = (first - root) / second, (first + root) / second
        return interval if fit.b > 0 else (math.inf, math.inf)
    if second == 0 or discriminant <= 0:
        return -math.inf, math.inf
    root = math.sqrt(discriminant)
    a_without_b = fit.a - fit.b * fit.covariance[0, 1] / fit.covariance[1, 1]
    return ((first - root) / second, math.inf) if a_without_b > 0 else (-math.inf, (first + root) / second)


def _float64(values: NDArray[np.generic]) -> Array:
    return np.asarray(values, np.float64)


def _require_points(kls: Array, rewards: Array, errors: Array) -> None:
    """Raise ShapeError or OptionError unless the points suffice for a fit."""
    if kls.ndim != 1 or not kls.shape == rewards.shape == errors.shape:
        raise ShapeError(
            f"kl_nats are {kls.shape}, rewards {rewards.shape} and standard_errors {errors.shape}; "
            "give one number per point"
        )
    if len(kls) < FEWEST_POINTS:
        raise ShapeError(
            f"there are {len(kls)} points; two parameters and their error need at least {FEWEST_POINTS}"
        )
    for name, numbers in (("kl_nats", kls), ("rewards", rewards), ("standard_errors", errors)):
        if not np.isfinite(numbers).all():
            raise OptionError(
                f"{name} hold {numbers[~np.isfinite(numbers)][0]}; leave out points that are not finite"
            )
    _require_none_negative(kls)
    if errors.min() <= 0:
        raise OptionError(f"standard_errors reach {errors.min():g}; give numbers above 0")
    num_different = len(np.unique(kls[kls > 0]))
    if num_different < 2:
        raise OptionError(
            f"there are {num_different} different KLs above 0; a curve of two parameters needs at least 2"
        )


def _require_none_negative(kls: Array) -> None:
    if kls.min(initial=0.0) < 0:
        raise OptionError(f"kl_nats reach {kls.min():g}; no KL is below 0: average k3 or the exact KL")
