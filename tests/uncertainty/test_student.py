"""Student's t against scipy."""

import math

import pytest
from scipy import stats

from kleash.errors import OptionError
from kleash.uncertainty import student_t_quantile

FREEDOM = [1, 1.5, 2, 3, 4, 7, 7.5, 15, 29, 63, 127, 199, 200, 201, 511, 4095, 1e5, 1e6]


@pytest.mark.parametrize("freedom", FREEDOM)
@pytest.mark.parametrize("probability", [0.0001, 0.025, 0.3, 0.51, 0.75, 0.95, 0.975, 0.995, 0.9999])
def test_agrees_with_scipy(probability: float, freedom: float) -> None:
    expected = float(stats.t.ppf(probability, freedom))
    assert student_t_quantile(probability, freedom) == pytest.approx(expected, rel=1e-9)


def test_the_median_is_exactly_zero() -> None:
    assert student_t_quantile(0.5, 7) == 0.0


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.1, math.nan])
def test_no_probability(probability: float) -> None:
    with pytest.raises(OptionError, match=r"probability is .*; give one between 0 and 1"):
        student_t_quantile(probability, 7)


@pytest.mark.parametrize("freedom", [0.0, 0.99, math.inf, math.nan])
def test_no_degrees_of_freedom(freedom: float) -> None:
    with pytest.raises(OptionError, match=r"degrees of freedom; give a finite number from 1 on"):
        student_t_quantile(0.975, freedom)
