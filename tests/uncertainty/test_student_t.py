"""Quantiles of Student's t against scipy."""

import math
from itertools import product

import pytest
from scipy import stats

from kleash.errors import OptionError
from kleash.uncertainty import student_t_quantile

WHOLE = [1, 2, 3, 4, 7, 15, 29, 63, 127, 199, 200, 201, 511, 4095, 1e5, 1e6]
PROBABILITIES = [1e-8, 1e-4, 0.025, 0.3, 0.5, 0.51, 0.95, 0.975, 1 - 1e-4, 1 - 1e-7]
FRACTIONS = [*product([0.001, 0.025, 0.995, 0.999], [1.0001, 1.02, 1.2, 1.5, 2.7, 63.2])]


@pytest.mark.parametrize(("probability", "nu"), [*product(PROBABILITIES, WHOLE), *FRACTIONS])
def test_quantiles_agree_with_scipy(probability, nu):
    expected = float(stats.t.ppf(probability, nu))
    rel = 1e-9 if 1e-4 <= probability <= 1 - 1e-4 else 1e-6
    assert student_t_quantile(probability, nu) == pytest.approx(expected, rel=rel)


def test_invalid_arguments_raise():
    for probability in (0.0, 1.0, -0.1, math.nan, 1e-9, 1 - 1e-15):
        with pytest.raises(OptionError, match=r"probability is .*; give one from 1e-08 to 1 - 1e-08"):
            student_t_quantile(probability, 7)
    for degrees_of_freedom in (0.0, 0.99, 1.5, math.inf, math.nan):
        with pytest.raises(OptionError, match=r"degrees_of_freedom is .*; give a whole number from 1 on"):
            student_t_quantile(0.9995, degrees_of_freedom)
