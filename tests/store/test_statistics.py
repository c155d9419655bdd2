"""The table of statistics against the columns on disk, the linear engine, and float64."""

import math

import numpy as np
import pytest

from kleash.linear import TokenStatistics
from kleash.models import scoring
from kleash.records import STATISTICS
from kleash.store.statistics import from_fields, log_ratio, stored_column, to_fields
from kleash.store.tables import TOKEN_COLUMNS


def distributions(count=50, vocab=7):
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.full(vocab, 0.3), size=(2, count))
    return p, q


def test_statistics_are_of_columns_of_the_token_table_and_columns_are_fields_of_the_engine():
    for name, statistic in STATISTICS.items():
        assert set(statistic.columns) <= set(TOKEN_COLUMNS), name
        if statistic.function is stored_column:
            assert statistic.columns == (name,)
    assert set(scoring.STATISTICS.values()) == set(TokenStatistics._fields)
    assert set(scoring.STATISTICS) <= set(TOKEN_COLUMNS)
    computed = {column for statistic in STATISTICS.values() for column in statistic.columns}
    assert computed <= set(scoring.STATISTICS)


def test_bounds_are_the_ends_of_all_values_and_identical_models_have_the_known_value():
    p, q = distributions()
    ends = np.pad(np.eye(7) + 1e-12, [(1, 1), (0, 0)], constant_values=1 / 7)  # one token, or all
    pairs = [columns_of_pair(*pair) for pair in ((p, q), (ends, ends[::-1]), (p, p))]
    for name, statistic in STATISTICS.items():
        missing = set(statistic.columns) - set(pairs[0])
        assert not missing, f"{name}: add the definition of {missing} to columns_of_pair"
        *_, same = values = [statistic.values(tokens) for tokens in pairs]
        for bound, end in ((statistic.lower, np.min), (statistic.upper, np.max)):
            extreme = end(np.concatenate(values))
            assert abs(extreme) > 1.9 if bound is None else extreme == pytest.approx(bound, abs=1e-7), name
        assert (np.ptp(same) < 1e-12) == (statistic.same_model_value is not None), name
        assert statistic.same_model_value in (None, pytest.approx(same[0], abs=1e-12)), name
        stored = {column: pairs[0][column].astype(np.float32) for column in statistic.columns}
        assert statistic.values(stored).dtype == np.float64


def columns_of_pair(p, q):
    """The columns of tokens/ by their definitions; the observed token is the first."""
    mean = (p + q) / 2

    def kl(a, b):
        return (a * np.log(a / b)).sum(-1)

    return {
        "kl_policy_reference": kl(p, q),
        "kl_reference_policy": kl(q, p),
        "jensen_shannon": (kl(p, mean) + kl(q, mean)) / 2,
        "total_variation": np.abs(p - q).sum(-1) / 2,
        "entropy_policy": -(p * np.log(p)).sum(-1),
        "entropy_reference": -(q * np.log(q)).sum(-1),
        "logp_policy": np.log(p[:, 0]),
        "logp_reference": np.log(q[:, 0]),
        "top1_policy": p.argmax(-1),
        "top1_reference": q.argmax(-1),
    }


def test_a_nan_in_a_column_is_a_nan_in_every_statistic_of_it():
    p, q = distributions(4)
    for name, statistic in STATISTICS.items():
        tokens = columns_of_pair(p, q)
        for column in statistic.columns:
            damaged = {**tokens, column: tokens[column].astype(np.float64)}
            damaged[column][2] = np.nan
            values = statistic.values(damaged)
            assert np.isnan(values[2]) and not np.isnan(values[[0, 1, 3]]).any(), (name, column)


def test_the_acceptance_rate_is_the_probability_that_speculative_sampling_accepts():
    """By enumeration of every drafted token x: p(x) min(1, q(x)/p(x)), in both directions, and the rejected rest."""
    p, q = distributions()
    expected = (p * np.minimum(1, q / p)).sum(-1)
    np.testing.assert_allclose((q * np.minimum(1, p / q)).sum(-1), expected, rtol=1e-12)
    # Speculative sampling draws from max(0, q - p), normalised, on rejection; accepted and resampled mass add up to q.
    residual = np.maximum(0, q - p)
    np.testing.assert_allclose(
        np.minimum(p, q) + (1 - expected)[:, None] * residual / residual.sum(-1, keepdims=True), q, atol=1e-12
    )
    rate = STATISTICS["acceptance_rate"].values(columns_of_pair(p, q))
    np.testing.assert_allclose(rate, expected, rtol=1e-12)
    assert 0.05 < rate.min() < rate.max() < 0.95


def test_reductions_have_their_derivative_and_log_ratios_of_zeros_are_0():
    reductions = {id(each.reduction): each.reduction for each in STATISTICS.values() if each.reduction}
    assert len(reductions) == 2, "a new reduction: count it here"
    for reduction in reductions.values():
        numeric = (reduction.function(0.3 + 1e-6) - reduction.function(0.3 - 1e-6)) / 2e-6
        assert reduction.derivative(0.3) == pytest.approx(numeric, rel=1e-6)
    assert log_ratio(np.array([-np.inf, -1.0]), np.array([-np.inf, -2.0])).tolist() == [0.0, 1.0]
    assert log_ratio(np.array([-1.0]), np.array([-np.inf])).tolist() == [math.inf]


def test_fields_of_the_file_and_names_in_the_table_are_inverse():
    numbers = {name: place for place, name in enumerate(STATISTICS)}
    fields = to_fields(numbers)
    assert fields["perplexity"] == {
        name: numbers[f"perplexity_{name}"] for name in ("policy", "reference", "ratio")
    }
    assert fields["top1_agreement"] == numbers["top1_agreement"]
    assert from_fields(fields) == numbers
