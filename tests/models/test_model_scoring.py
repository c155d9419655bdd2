"""Scores against the models' own logits in float64, each sequence alone."""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from tiny_models import ARCHITECTURES, double_logits

from kleash.errors import NonFiniteError, OptionError
from kleash.models import (
    Pair,
    ReferenceCache,
    Sequence,
    load_pair,
    score,
    score_against_alone,
    score_in_float32,
)
from kleash.records.tables import TOKEN_COLUMNS


def given(lengths=((5, 7), (1, 12), (9, 1), (3, 3)), seed=0, vocabulary=300):
    """Random sequences of (prompt, response) lengths."""
    rng = np.random.default_rng(seed)
    return [
        Sequence(
            prompt_id=n,
            sample_id=0,
            prompt_ids=tuple(rng.integers(3, vocabulary, before).tolist()),
            response_ids=tuple(rng.integers(3, vocabulary, after).tolist()),
            prompt_text="",
            response_text="",
        )
        for n, (before, after) in enumerate(lengths)
    ]


def expected(policy, reference, sequences, temperature=1.0):
    """Every column by brute force over the whole vocabulary, with numpy."""
    rows = {name: [] for name in TOKEN_COLUMNS if name != "text"}
    for one in sequences:
        text = [*one.prompt_ids, *one.response_ids]
        both = [double_logits(folder, text).numpy() / temperature for folder in (policy, reference)]
        for position, token in enumerate(one.response_ids):
            at = len(one.prompt_ids) - 1 + position
            logp, logq = (log_softmax(z[at]) for z in both)
            p, q = np.exp(logp), np.exp(logq)
            logm = np.logaddexp(logp, logq) - math.log(2)
            found = {
                "prompt_id": one.prompt_id,
                "sample_id": one.sample_id,
                "position": position,
                "token_id": token,
                "logp_policy": logp[token],
                "logp_reference": logq[token],
                "logp_sampled": np.nan,
                "kl_policy_reference": p @ (logp - logq),
                "kl_reference_policy": q @ (logq - logp),
                "jensen_shannon": (p @ (logp - logm) + q @ (logq - logm)) / 2,
                "total_variation": np.abs(p - q).sum() / 2,
                "entropy_policy": -p @ logp,
                "entropy_reference": -q @ logq,
                "top1_policy": p.argmax(),
                "top1_reference": q.argmax(),
                "top1_probability_policy": p.max(),
                "top1_probability_reference": q.max(),
                "rank_reference": (logq > logq[token]).sum(),
            }
            for name, value in found.items():
                rows[name].append(value)
    return {name: np.array(values) for name, values in rows.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_column_is_that_of_the_models_own_logits_in_float64(folders, architecture):
    policy, reference = folders(architecture)
    sequences = given()
    found = score(load_pair(str(policy), str(reference)), sequences, batch_tokens=24)
    wanted = expected(policy, reference, sequences)
    assert set(found) == set(TOKEN_COLUMNS) - {"text"}
    assert wanted["kl_policy_reference"].mean() > 0.02
    for name, values in wanted.items():
        assert found[name].dtype == (np.int32 if TOKEN_COLUMNS[name] == "int32" else np.float32), name
        np.testing.assert_allclose(found[name], values, rtol=3e-5, atol=3e-6, err_msg=name)


def test_temperature_divides_the_logits_of_both(folders):
    policy, reference = folders("llama")
    sequences = given()
    found = score(load_pair(str(policy), str(reference)), sequences, temperature=0.7)
    for name, values in expected(policy, reference, sequences, temperature=0.7).items():
        np.testing.assert_allclose(found[name], values, rtol=3e-5, atol=3e-6, err_msg=name)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_neither_padding_nor_batch_mates_change_a_number(folders, architecture):
    policy, reference = folders(architecture)
    pair = load_pair(str(policy), str(reference))
    sequences = given(((5, 7), (1, 60), (30, 2), (3, 3), (2, 9)))
    alone = [score(pair, [one]) for one in sequences]
    for batch_tokens in (1, 70, 10_000):
        together = score(pair, sequences, batch_tokens=batch_tokens)
        for name in together:
            values = np.concatenate([part[name] for part in alone])
            np.testing.assert_allclose(together[name], values, rtol=3e-5, atol=3e-6, err_msg=name)
    backwards = score(pair, sequences[::-1])
    assert backwards["prompt_id"][0] == 4
    np.testing.assert_allclose(
        backwards["kl_policy_reference"].sum(), together["kl_policy_reference"].sum(), rtol=1e-5
    )


def test_a_model_against_itself_is_exactly_zero(folders):
    policy, _ = folders("llama")
    pair = load_pair(str(policy), str(policy))
    assert pair.policy.network is pair.reference.network
    found = score(pair, given())
    for name in ("kl_policy_reference", "kl_reference_policy", "jensen_shannon", "total_variation"):
        assert (found[name] == 0).all(), name
    assert (found["logp_policy"] == found["logp_reference"]).all()


def test_a_copy_of_a_model_and_a_cache_make_no_difference_to_that(folders, tmp_path):
    policy, _ = folders("llama")
    copy = shutil.copytree(policy, tmp_path / "copy")
    pair = load_pair(str(policy), str(copy))
    assert pair.policy.network is not pair.reference.network
    assert (score(pair, given())["kl_policy_reference"] == 0).all()
    itself = load_pair(str(policy), str(policy))
    cache = ReferenceCache(tmp_path / "cache", itself.reference)
    score(itself, given(), batch_tokens=1, cache=cache)
    assert (score(itself, given(), cache=cache)["kl_policy_reference"] == 0).all()


def test_logp_sampled_is_carried_along_in_the_order_of_the_input(pair: Pair):
    first, second, *_ = given()
    second = replace(second, logp_sampled=np.linspace(-2, -1, 12, dtype=np.float32))
    found = score(pair, [first, second])["logp_sampled"]
    assert np.isnan(found[:7]).all()
    np.testing.assert_array_equal(found[7:], second.logp_sampled)


def test_the_noise_floor_is_rounding_and_larger_in_bfloat16(folders):
    policy, reference = folders("llama")
    sequences = given(((5, 7), (1, 60), (30, 2), (3, 3), (2, 9)))
    exact = load_pair(str(policy), str(reference)).reference
    floor = score_against_alone(exact, sequences)
    assert set(floor) == set(TOKEN_COLUMNS) - {"text"}
    assert 0 <= floor["kl_policy_reference"].max() < 1e-9
    assert score_in_float32(exact, sequences) is None


def test_the_noise_floor_reads_each_sequence_alone(pair: Pair):
    rows = []

    def counting(**inputs):
        rows.append(len(inputs["input_ids"]))
        return pair.reference.body(**inputs)

    score_against_alone(replace(pair.reference, body=counting), given())
    assert sorted(rows) == [1, 1, 1, 1, 4]


def test_the_dtype_gap_of_a_cut_head_is_that_of_the_cut_head(folders):
    policy, reference = folders("llama")
    pair = load_pair(str(policy), str(reference), dtype="bfloat16")
    head = replace(pair.reference.head, weight=pair.reference.head.weight[:300])
    gap = score_in_float32(replace(pair.reference, head=head, vocabulary=300), given())
    assert gap is not None
    one = given()[0]
    z = double_logits(reference, [*one.prompt_ids, *one.response_ids])[4:-1, :300].numpy()
    wanted = log_softmax(z, axis=-1)[np.arange(7), one.response_ids]
    np.testing.assert_allclose(gap["logp_reference"][:7], wanted, rtol=3e-5)


def test_the_dtype_gap_compares_the_dtype_that_ran_with_float32(folders):
    policy, reference = folders("llama")
    sequences = given()
    rounded = load_pair(str(policy), str(reference), dtype="bfloat16")
    assert rounded.policy.dtype == torch.bfloat16
    gap = score_in_float32(rounded.reference, sequences)
    assert gap is not None
    truth = expected(reference, reference, sequences)
    np.testing.assert_allclose(gap["logp_reference"], truth["logp_reference"], rtol=3e-5)
    assert 1e-7 < gap["kl_policy_reference"].mean() < 0.05
    assert np.abs(gap["logp_policy"] - gap["logp_reference"]).max() > 1e-3


def test_float64_models_are_scored_in_float64(folders):
    policy, reference = folders("llama")
    sequences = given()
    found = score(load_pair(str(policy), str(reference), dtype="float64"), sequences)
    wanted = expected(policy, reference, sequences)["kl_policy_reference"]
    np.testing.assert_array_equal(found["kl_policy_reference"], wanted.astype(np.float32))


def test_nan_names_the_model_the_prompt_and_the_position(pair: Pair, unhooked):
    def spoilt(**inputs):
        out = pair.reference.body(**inputs)
        out.last_hidden_state[1, 6] = torch.nan
        return out

    broken = replace(pair, reference=replace(pair.reference, body=spoilt))
    sequences = [replace(one, where=f"rollouts.jsonl, line {one.prompt_id + 1}") for one in given()]
    message = (
        r"the reference gives NaN or infinite logits for prompt 0, sample 0 \(rollouts.jsonl, line 1\), "
        "response token 2"
    )
    with pytest.raises(NonFiniteError, match=message):
        score(broken, sequences[:2], batch_tokens=24)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_in_a_head_is_found_behind_finite_hidden_states(folders, value):
    policy, reference = folders("llama")
    pair = load_pair(str(policy), str(reference))
    with torch.no_grad():
        pair.policy.network.get_output_embeddings().weight[7, 3] = value
    with pytest.raises(
        NonFiniteError, match="the policy gives NaN or infinite logits for prompt 1, sample 0"
    ):
        score(pair, given()[1:])


def test_a_temperature_of_zero_is_no_distribution(pair: Pair):
    with pytest.raises(OptionError, match="temperature above 0, not at 0"):
        score(pair, given(), temperature=0.0)


def test_nothing_comes_of_nothing(pair: Pair):
    assert all(len(values) == 0 for values in score(pair, []).values())
