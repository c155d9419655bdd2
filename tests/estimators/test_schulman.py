"""The tables of Schulman, "Approximating KL Divergence" (2020), by integration."""

import math

import pytest
import torch

from kleash.divergences import kl_gaussian
from kleash.estimators import sampled_kl


def relative_bias_and_deviation(shift, name):
    """Bias and standard deviation, each over the true KL, for x ~ N(0, 1) against N(shift, 1)."""
    x = torch.linspace(-16, 16, 64_001, dtype=torch.float64)
    logp = -x.square() / 2 - math.log(2 * math.pi) / 2
    logq = -(x - shift).square() / 2 - math.log(2 * math.pi) / 2
    values = sampled_kl(logp, logq, name)
    mean = torch.trapezoid(logp.exp() * values, x)
    variance = torch.trapezoid(logp.exp() * (values - mean).square(), x)
    true = kl_gaussian(torch.zeros(1), torch.zeros(1), torch.tensor([shift], dtype=torch.float64)).item()
    return (mean.item() - true) / true, variance.sqrt().item() / true


@pytest.mark.parametrize(
    ("shift", "name", "bias", "deviation", "published"),
    [
        (0.1, "k1", 0.0, 20.000, (0, 20)),
        (0.1, "k2", 0.0025, 1.41774, (0.002, 1.42)),
        (0.1, "k3", 0.0, 1.41657, (0, 1.42)),
        (1.0, "k1", 0.0, 2.000, (0, 2)),
        (1.0, "k2", 0.25, 1.73205, (0.25, 1.73)),
        (1.0, "k3", 0.0, 1.69503, (0, 1.7)),
    ],
)
def test_bias_and_deviation_agree_with_the_published_tables(shift, name, bias, deviation, published):
    got_bias, got_deviation = relative_bias_and_deviation(shift, name)
    assert got_bias == pytest.approx(bias, abs=1e-8)
    assert got_deviation == pytest.approx(deviation, abs=5e-6)
    # The published values were sampled and rounded to two or three digits.
    assert (got_bias, got_deviation) == pytest.approx(published, abs=6e-3)


def test_k3_has_the_smaller_deviation_only_for_close_distributions():
    at = math.sqrt(2 * 0.628)
    for shift, k3_is_better in ((at - 0.01, True), (at + 0.01, False)):
        of_k1, of_k3 = (relative_bias_and_deviation(shift, name)[1] for name in ("k1", "k3"))
        assert (of_k3 < of_k1) is k3_is_better
    assert math.sqrt(math.expm1(9) - 9) / 4.5 == pytest.approx(19.99, abs=6e-3)
    assert relative_bias_and_deviation(3.0, "k3")[1] == pytest.approx(19.99, abs=6e-3)
    assert relative_bias_and_deviation(3.0, "k1")[1] == pytest.approx(0.667, abs=5e-4)
