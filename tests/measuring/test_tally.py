"""Sums over shards, against sums over everything at once."""

from itertools import product

import numpy as np
import pytest
import torch

from kleash.measuring.cluster_sums import MOST_CLUSTERS, ClusterSums, sequence_terms, token_sums
from kleash.measuring.columns import CONFIDENCES, POSITIONS, quantities
from kleash.measuring.estimand import estimand_of, weight_warnings
from kleash.measuring.sequence_clusters import Ledger, sequence_starts
from kleash.records import MeasureJob


def test_sums_grow_with_the_clusters_and_end_up_where_they_belong() -> None:
    rng = np.random.default_rng(0)
    labels = np.sort(rng.integers(0, 1000, 5000))
    values = rng.normal(size=5000)
    sums = ClusterSums()
    for part in np.array_split(np.arange(5000), 17):
        sums.add(labels[part], {"x": values[part]})
    np.testing.assert_allclose(
        sums["x"], np.bincount(labels, weights=values, minlength=len(sums["x"])), atol=1e-12
    )
    assert "y" not in sums and (sums["y"] == 0).all()


def test_a_quantity_that_comes_late_counts_from_the_first_cluster() -> None:
    sums = ClusterSums()
    sums.add(np.array([0, 1, 2]), {"x": np.ones(3)})
    sums.add(np.array([2, 5]), {"x": np.ones(2), "late": np.ones(2)})
    assert sums["x"].tolist() == [1, 1, 2, 0, 0, 1]
    assert sums["late"].tolist() == [0, 0, 1, 0, 0, 1]


def test_too_many_clusters_become_neighbours_together_and_nothing_is_lost() -> None:
    count = 3 * MOST_CLUSTERS + 1
    values = np.random.default_rng(1).normal(size=count)
    sums = ClusterSums()
    for part in np.array_split(np.arange(count), 9):
        sums.add(part, {"x": values[part]})
    assert sums.together == 4 and len(sums["x"]) == -(-count // 4) <= MOST_CLUSTERS
    np.testing.assert_allclose(sums["x"][:-1], values[: count // 4 * 4].reshape(-1, 4).sum(1), atol=1e-12)
    assert sums["x"].sum() == pytest.approx(values.sum())


def test_nothing_is_nothing() -> None:
    sums = ClusterSums()
    sums.add(np.zeros(0, dtype=np.int64), {"x": np.zeros(0)})
    assert len(sums["x"]) == 0
    assert len(sequence_starts(np.zeros(0), np.zeros(0))) == 0


def test_sequences_begin_where_prompt_or_sample_changes() -> None:
    prompt, sample = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 1, 1])
    assert sequence_starts(prompt, sample).tolist() == [0, 2, 3, 5]


def part_of(rows: int = 400, seed: int = 0) -> dict[str, np.ndarray]:
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
    return columns | {"position": rng.integers(0, 6000, rows)}


def test_bins_cover_every_token_once() -> None:
    part = part_of()
    columns = token_sums(quantities(part, "none"))
    for kind, edges in (("position", (*POSITIONS, np.inf)), ("confidence", (*CONFIDENCES, np.inf))):
        named = part["position"] if kind == "position" else part["top1_probability_reference"]
        seen = np.zeros(len(named))
        for place in range(len(edges) - 1):
            inside = (named >= edges[place]) & (named < edges[place + 1])
            if not inside.any():
                assert f"{kind} {place} tokens" not in columns
                continue
            np.testing.assert_array_equal(columns[f"{kind} {place} tokens"], inside)
            np.testing.assert_array_equal(
                columns[f"{kind} {place} kl"], np.where(inside, part["kl_policy_reference"], 0)
            )
            seen += inside
        assert (seen == 1).all()


def test_estimators_are_weighted_by_what_the_tokens_were_drawn_from() -> None:
    part = part_of()
    p, q, mu = (part[f"logp_{name}"].astype(float) for name in ("policy", "reference", "sampled"))
    plain, weighted = quantities(part, "none").columns, quantities(part, "importance").columns
    np.testing.assert_allclose(plain["k1"], p - q)
    np.testing.assert_allclose(plain["k3"], np.exp(q - p) - 1 + p - q, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(weighted["k1"], np.exp(p - mu) * (p - q))
    np.testing.assert_allclose(
        weighted["k2 - exact"], np.exp(p - mu) * (p - q) ** 2 / 2 - part["kl_policy_reference"]
    )
    assert not any(name.startswith("k") and name[1].isdigit() for name in quantities(part, None).columns)


@pytest.mark.parametrize("weighting", ["none", "importance"])
def test_both_sums_over_a_response_have_the_sequence_kl_as_their_mean(weighting: str) -> None:
    """By enumeration: three tokens, three steps, drawn from p or from a third distribution."""
    torch.manual_seed(0)
    vocab, steps = 3, 3
    p, q, other = (
        torch.randn(steps, vocab, vocab, dtype=torch.float64).log_softmax(-1).numpy() for _ in "pqm"
    )
    drawn = p if weighting == "none" else other

    def rows_of(response: tuple[int, ...]) -> dict[str, np.ndarray]:
        before = (0, *response[:-1])
        steps_taken = list(zip(range(steps), before, response, strict=True))
        found = {
            "logp_policy": [p[s, b, x] for s, b, x in steps_taken],
            "logp_reference": [q[s, b, x] for s, b, x in steps_taken],
            "logp_sampled": [drawn[s, b, x] for s, b, x in steps_taken],
            "kl_policy_reference": [(np.exp(p[s, b]) * (p[s, b] - q[s, b])).sum() for s, b, _ in steps_taken],
        }
        filler = {name: values[:steps] for name, values in part_of(steps).items()}
        return (
            filler
            | {name: np.array(values) for name, values in found.items()}
            | {"prompt_id": np.zeros(steps)}
        )

    exact = sums = terms = weights = 0.0
    for response in product(range(vocab), repeat=steps):
        rows = rows_of(response)
        rows["sample_id"] = np.zeros(steps)
        chance, wanted = np.exp(rows["logp_sampled"].sum()), np.exp(rows["logp_policy"].sum())
        found = sequence_terms(rows, quantities(rows, weighting), weighting)
        sums += chance * found.log_ratio[0]
        terms += chance * found.exact[0]
        weights += chance * found.weight[0]
        exact += wanted * (rows["logp_policy"] - rows["logp_reference"]).sum()
    assert sums == pytest.approx(exact, rel=1e-12)
    assert terms == pytest.approx(exact, rel=1e-12)
    assert weights == pytest.approx(1.0)


def test_sequences_of_a_shard_are_summed_apart() -> None:
    part = part_of()
    found = quantities(part, "none")
    terms = sequence_terms(part, found, "none")
    by_hand = part["kl_policy_reference"].astype(float).reshape(20, 20).sum(1)
    np.testing.assert_allclose(terms.exact, by_hand)
    assert terms.weight.tolist() == [1.0] * 20


def test_an_exact_term_is_weighted_by_what_came_before_its_token() -> None:
    """Weighting it by its own token too would have the same mean and more variance."""
    part = part_of(3)
    p, mu = (part[f"logp_{name}"].astype(float) for name in ("policy", "sampled"))
    ratio, exact = np.exp(np.cumsum(p - mu)), part["kl_policy_reference"].astype(float)
    terms = sequence_terms(part, quantities(part, "importance"), "importance")
    assert terms.exact[0] == pytest.approx(exact[0] + ratio[0] * exact[1] + ratio[1] * exact[2])
    assert terms.weight[0] == pytest.approx(ratio[2])


def test_weights_that_overflow_leave_the_kl_between_responses_out_with_the_reason() -> None:
    part = part_of(3)
    part["logp_sampled"] = np.full_like(part["logp_policy"], -400.0)
    terms = sequence_terms(part, quantities(part, "importance"), "importance")
    weighted = estimand_of(MeasureJob(responses="r"), all_have_logprobs=True)
    (warning,) = weight_warnings(np.array([1.0, *terms.weight]), weighted)
    assert "1 of 2 responses are so much likelier" in warning


@pytest.mark.parametrize(
    ("weights", "warned"), [([1.0] * 8, False), ([1.0] * 5 + [3.0], False), ([1.0, 50.0, 1.0], True)]
)
def test_few_heavy_responses_are_a_warning(weights: list[float], warned: bool) -> None:
    weighted = estimand_of(MeasureJob(responses="r"), all_have_logprobs=True)
    found = weight_warnings(np.array(weights), weighted)
    assert bool(found) is warned
    if warned:
        assert "an effective sample of 1.1 out of 3" in found[0]
    assert weight_warnings(np.array(weights), estimand_of(MeasureJob(responses="r"))) == ()


def test_the_ledger_knows_the_mean_so_far_however_small() -> None:
    ledger = Ledger(on_text=False)
    kl = np.random.default_rng(2).lognormal(-20, 1, 60).astype(np.float32)
    for part in np.array_split(np.arange(60), 4):
        ledger.add({"prompt_id": part // 5, "sample_id": part // 3, "kl_policy_reference": kl[part]})
    found = ledger.kl()
    assert found.value == pytest.approx(kl.astype(float).mean(), rel=1e-9)
    assert found.clusters == 12 == ledger.clusters().count


def test_windows_of_few_documents_are_blocks_and_of_many_their_documents() -> None:
    few, many = Ledger(on_text=True), Ledger(on_text=True)
    few.add({"prompt_id": np.zeros(20), "sample_id": np.arange(20), "kl_policy_reference": np.ones(20)})
    many.add(
        {"prompt_id": np.arange(60) // 2, "sample_id": np.arange(60) % 2, "kl_policy_reference": np.ones(60)}
    )
    assert few.clusters().count == 3 and few.clusters().warnings
    assert many.clusters().count == 30 and not many.clusters().warnings
