"""The upper bound of the KL of best of n against its integral and against every n-tuple of draws there is."""

import itertools
import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import rel_entr

from kleash.errors import OptionError
from kleash.leash import best_of_n_bound


def by_enumeration(probs, n):
    """The KL of the winner of every tuple of draws; the last outcome has the largest reward."""
    won = np.zeros(len(probs))
    for drawn in itertools.product(range(len(probs)), repeat=n):
        won[max(drawn)] += np.prod([probs[j] for j in drawn])
    return rel_entr(won, probs).sum()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_bound_is_above_the_kl_and_near_for_many_outcomes(n):
    for outcomes, gap in ((4, math.inf), (40, 0.04)):
        exact = by_enumeration(np.full(outcomes, 1 / outcomes), n)
        assert exact - 1e-12 <= best_of_n_bound(n) <= exact + gap


@pytest.mark.parametrize("n", [1, 2, 16, 1000])
def test_the_bound_is_the_integral(n):
    def density_times_its_log(x):
        return n * x ** (n - 1) * (math.log(n) + (n - 1) * math.log(x))

    integral = quad(density_times_its_log, 0, 1, limit=500, points=[1 - 5 / n])[0]
    assert best_of_n_bound(n) == pytest.approx(integral, abs=1e-7)
    with pytest.raises(OptionError, match="n is 0"):
        best_of_n_bound(0)
