"""Case (b) against numpy, position by position."""

import numpy as np
import pytest
from estimator_study.positions import perturbed_pair, position_case

FUNCTIONS = {
    "k1": (lambda u: u, np.ones_like),
    "abs": (np.abs, np.sign),
    "k2": (lambda u: u * u / 2, lambda u: u),
    "k3": (lambda u: np.exp(-u) - 1 + u, lambda u: 1 - np.exp(-u)),
    "kl_loss": (lambda u: np.exp(-u) - 1 + u, lambda u: u),
}


@pytest.fixture(scope="module")
def case():
    return position_case()


@pytest.fixture(scope="module")
def arrays():
    pair = perturbed_pair()
    logp = pair.logp.detach().numpy()
    return np.exp(logp), logp - pair.logq.numpy()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_moments_and_gradients_by_hand(case, arrays, name):
    probs, u = arrays
    function, derivative = FUNCTIONS[name]
    row = case.row(name)
    kl = np.mean([p @ r for p, r in zip(probs, u, strict=True)])
    means = np.array([p @ function(r) for p, r in zip(probs, u, strict=True)])
    variances = [p @ (function(r) - m) ** 2 for p, r, m in zip(probs, u, means, strict=True)]
    below = [p[function(r) < 0].sum() for p, r in zip(probs, u, strict=True)]
    assert case.kl == pytest.approx(kl, rel=1e-11)
    assert row.value == pytest.approx(means.mean(), rel=1e-9)
    assert row.bias == pytest.approx(means.mean() - kl, abs=1e-12)
    assert row.standard_deviation == pytest.approx(np.mean(variances) ** 0.5, rel=1e-9)
    assert row.negative_share == pytest.approx(np.mean(below), abs=1e-12)
    # In logits, the expected gradient of f(u) is p (f' - E f'), that of the KL p (u - KL).
    slope = derivative(u)
    found = probs * (slope - (probs * slope).sum(-1, keepdims=True))
    wanted = probs * (u - (probs * u).sum(-1, keepdims=True))
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert row.gradient_error == pytest.approx(error, rel=1e-7, abs=1e-9)


def test_the_controlled_one_varies_least(case, arrays):
    probs, u = arrays
    row, change = case.row("k1 + a(w − 1)"), np.expm1(-u)

    def spread(a):
        values = u + a * change
        means = (probs * values).sum(-1, keepdims=True)
        return ((probs * (values - means) ** 2).sum(-1).mean()) ** 0.5

    a = min(np.linspace(0.9, 1.1, 2001), key=spread)
    assert row.standard_deviation == pytest.approx(spread(a), rel=1e-6)
    assert f"a = {a:.3f}" in case.notes[0]
    assert row.negative_share == pytest.approx((probs * (u + a * change < 0)).sum(-1).mean(), abs=2e-3)
    assert row.gradient_error < case.row("k3").gradient_error
