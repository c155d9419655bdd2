"""Sums within clusters over shards, against sums over all tokens at once."""

from itertools import product

import numpy as np
import pytest
import torch

from kleash.measuring.cluster_sums import (
    BINNINGS,
    MAX_GROUPS,
    ClusterSums,
    SumKey,
    sequence_terms,
    token_quantities,
)
from kleash.measuring.estimand import estimand_of, weight_warning
from kleash.records import MeasureJob
from kleash.store.tables import TOKEN_COLUMNS

X, Y = SumKey("x"), SumKey("y")


def test_shards_add_up_within_clusters():
    rng = np.random.default_rng(0)
    labels = np.sort(rng.integers(0, 1000, 5000))
    values = rng.normal(size=5000)
    sums = ClusterSums(1000)
    for part in np.array_split(np.arange(5000), 17):
        sums.add(labels[part], {X: values[part]})
    np.testing.assert_allclose(
        sums[X], np.bincount(labels, weights=values, minlength=len(sums[X])), atol=1e-12
    )
    assert Y not in sums and (sums[Y] == 0).all()


def test_beyond_the_maximum_neighbouring_clusters_share_a_sum():
    count = 3 * MAX_GROUPS + 1
    values = np.random.default_rng(1).normal(size=count)
    sums = ClusterSums(count)
    for part in np.array_split(np.arange(count), 9):
        sums.add(part, {X: values[part]})
    assert sums.group_size == 4 and len(sums[X]) == -(-count // 4) <= MAX_GROUPS
    np.testing.assert_allclose(sums[X][:-1], values[: count // 4 * 4].reshape(-1, 4).sum(1), atol=1e-12)
    assert sums[X].sum() == pytest.approx(values.sum())


def part_of(rows=400, seed=0):
    rng = np.random.default_rng(seed)
    names = ("kl_policy_reference", "kl_reference_policy", "jensen_shannon", "total_variation")
    columns = {name: rng.random(rows).astype(np.float32) for name in names}
    columns |= {name: rng.random(rows).astype(np.float32) for name in ("entropy_policy", "entropy_reference")}
    columns |= {
        name: -rng.exponential(2, rows).astype(np.float32) for name in ("logp_policy", "logp_reference")
    }
    columns |= {"logp_sampled": -rng.exponential(2, rows).astype(np.float32)}
    columns |= {name: rng.integers(0, 3, rows) for name in ("top1_policy", "top1_reference")}
    columns |= {"top1_probability_reference": rng.random(rows).astype(np.float32)}
    columns |= {"prompt_id": np.arange(rows) // 40, "sample_id": np.arange(rows) // 20 % 2}
    columns |= {"position": rng.integers(0, 6000, rows)}
    others = [name for name, kind in TOKEN_COLUMNS.items() if kind != "string" and name not in columns]
    return columns | {name: rng.random(rows).astype(np.float32) for name in others}


def test_every_token_is_in_one_bin_of_each_binning():
    part = part_of()
    columns = token_quantities(part, "unweighted")
    for kind, (column, ends) in BINNINGS.items():
        edges, named = (*ends[:-1], np.inf), part[column]
        count = np.zeros(len(named))
        for place in range(len(edges) - 1):
            inside = (named >= edges[place]) & (named < edges[place + 1])
            if not inside.any():
                assert SumKey(kind, "tokens", place) not in columns
                continue
            np.testing.assert_array_equal(columns[SumKey(kind, "tokens", place)], inside)
            np.testing.assert_array_equal(
                columns[SumKey(kind, "kl", place)], np.where(inside, part["kl_policy_reference"], 0)
            )
            count += inside
        assert (count == 1).all()


def test_estimators_are_weighted_by_the_ratio_of_policy_to_sampling_probability():
    part = part_of()
    p, q, mu = (part[f"logp_{name}"].astype(float) for name in ("policy", "reference", "sampled"))
    plain, weighted = (token_quantities(part, how) for how in ("unweighted", "importance"))
    np.testing.assert_allclose(plain[SumKey("k1")], p - q)
    np.testing.assert_allclose(plain[SumKey("k3")], np.exp(q - p) - 1 + p - q, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(weighted[SumKey("k1")], np.exp(p - mu) * (p - q))
    np.testing.assert_allclose(
        weighted[SumKey("k2", "error")], np.exp(p - mu) * (p - q) ** 2 / 2 - part["kl_policy_reference"]
    )
    assert SumKey("k1") not in token_quantities(part, None)


@pytest.mark.parametrize("weighting", ["unweighted", "importance"])
def test_log_ratio_and_exact_sums_have_the_sequence_kl_as_their_mean(weighting):
    """By enumeration: three tokens, three steps, drawn from p or from a third distribution."""
    torch.manual_seed(0)
    vocab, steps = 3, 3
    p, q, other = (
        torch.randn(steps, vocab, vocab, dtype=torch.float64).log_softmax(-1).numpy() for _ in "pqm"
    )
    behaviour = p if weighting == "unweighted" else other

    def rows_of(response):
        before = (0, *response[:-1])
        steps_taken = list(zip(range(steps), before, response, strict=True))
        sequence_columns = {
            "logp_policy": [p[s, b, x] for s, b, x in steps_taken],
            "logp_reference": [q[s, b, x] for s, b, x in steps_taken],
            "logp_sampled": [behaviour[s, b, x] for s, b, x in steps_taken],
            "kl_policy_reference": [(np.exp(p[s, b]) * (p[s, b] - q[s, b])).sum() for s, b, _ in steps_taken],
        }
        filler = {name: values[:steps] for name, values in part_of(steps).items()}
        return (
            filler
            | {name: np.array(values) for name, values in sequence_columns.items()}
            | {"prompt_id": np.zeros(steps)}
        )

    exact = sums = terms = weights = largest = expected_largest = 0.0
    for response in product(range(vocab), repeat=steps):
        rows = rows_of(response)
        rows["sample_id"] = np.zeros(steps)
        chance, wanted = np.exp(rows["logp_sampled"].sum()), np.exp(rows["logp_policy"].sum())
        response_terms = sequence_terms(rows, rows["kl_policy_reference"].astype(float), weighting)
        sums += chance * response_terms.log_ratio[0]
        terms += chance * response_terms.exact[0]
        weights += chance * response_terms.weight[0]
        largest += chance * response_terms.weight[0] * response_terms.largest[0]
        exact += wanted * (rows["logp_policy"] - rows["logp_reference"]).sum()
        expected_largest += wanted * max(rows["kl_policy_reference"])
    assert sums == pytest.approx(exact, rel=1e-12)
    assert terms == pytest.approx(exact, rel=1e-12)
    assert weights == pytest.approx(1.0) and largest == pytest.approx(expected_largest, rel=1e-12)


def test_an_exact_term_is_weighted_by_the_ratio_of_its_prefix():
    """Including its own token in the weight would have the same mean and more variance."""
    part = part_of(3)
    p, mu = (part[f"logp_{name}"].astype(float) for name in ("policy", "sampled"))
    ratio, exact = np.exp(np.cumsum(p - mu)), part["kl_policy_reference"].astype(float)
    terms = sequence_terms(part, part["kl_policy_reference"].astype(float), "importance")
    assert terms.exact[0] == pytest.approx(exact[0] + ratio[0] * exact[1] + ratio[1] * exact[2])
    assert terms.weight[0] == pytest.approx(ratio[2])


def test_overflowing_weights_give_a_warning_with_their_number():
    part = part_of(3)
    part["logp_sampled"] = np.full_like(part["logp_policy"], -400.0)
    terms = sequence_terms(part, part["kl_policy_reference"].astype(float), "importance")
    weighted = estimand_of(MeasureJob(responses="r"), all_have_logprobs=True)
    warning = weight_warning(np.array([1.0, *terms.weight]), weighted)
    assert "1 of 2 responses are so much likelier" in warning


@pytest.mark.parametrize(
    ("weights", "warned"), [([1.0] * 8, False), ([1.0] * 5 + [3.0], False), ([1.0, 50.0, 1.0], True)]
)
def test_a_small_effective_sample_size_is_a_warning(weights, warned):
    weighted = estimand_of(MeasureJob(responses="r"), all_have_logprobs=True)
    warning = weight_warning(np.array(weights), weighted)
    assert bool(warning) is warned
    if warned:
        assert "an effective sample size of 1.1 out of 3" in warning
    assert weight_warning(np.array(weights), estimand_of(MeasureJob(responses="r"))) == ""
