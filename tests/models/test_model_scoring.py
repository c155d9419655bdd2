"""Scores against the models' own logits in float64, each sequence alone."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from scoring_cases import columns_by_enumeration, random_sequences
from tiny_models import ARCHITECTURES, double_logits

from kleash.errors import NonFiniteError, OptionError
from kleash.models import ReferenceCache, load_pair, score
from kleash.models.scoring import score_against_float32, score_against_itself
from kleash.store.tables import PADDING_COLUMNS, TOKEN_COLUMNS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_column_agrees_with_the_models_logits_in_float64(folders, architecture):
    policy, reference = folders(architecture)
    sequences = random_sequences()
    found = score(load_pair(str(policy), str(reference)), sequences, batch_tokens=24)
    wanted = columns_by_enumeration(policy, reference, sequences)
    assert set(found) == {*TOKEN_COLUMNS, *PADDING_COLUMNS} - {"text"}
    assert wanted["kl_policy_reference"].mean() > 0.02
    for name, values in wanted.items():
        assert found[name].dtype == (np.int32 if TOKEN_COLUMNS[name] == "int32" else np.float32), name
        np.testing.assert_allclose(found[name], values, rtol=3e-5, atol=3e-6, err_msg=name)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_top_tokens_are_the_likeliest_of_both_models(folders, temperature):
    policy, reference = folders("llama")
    sequences = random_sequences()
    columns = score(load_pair(str(policy), str(reference)), sequences, temperature=temperature, top=5)
    for role, folder in (("policy", policy), ("reference", reference)):
        logits = [
            double_logits(folder, [*one.prompt_ids, *one.response_ids])[len(one.prompt_ids) - 1 : -1]
            for one in sequences
        ]
        best = [(z / temperature).softmax(-1).topk(5) for z in logits]
        token_ids = np.concatenate([part.indices for part in best])
        np.testing.assert_array_equal(columns[f"top_token_id_{role}"], token_ids)
        probability = np.concatenate([part.values for part in best])
        np.testing.assert_allclose(columns[f"top_probability_{role}"], probability, rtol=3e-5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_scores_do_not_depend_on_padding_or_batch(folders, architecture):
    policy, reference = folders(architecture)
    pair = load_pair(str(policy), str(reference))
    sequences = random_sequences(((5, 7), (1, 60), (30, 2), (3, 3), (2, 9)))
    alone = [score(pair, [one]) for one in sequences]
    for batch_tokens in (1, 70, 10_000):
        together = score(pair, sequences, batch_tokens=batch_tokens)
        for name in together:
            values = np.concatenate([part[name] for part in alone])
            np.testing.assert_allclose(together[name], values, rtol=3e-5, atol=3e-6, err_msg=name)
    backwards = score(pair, sequences[::-1])
    assert backwards["prompt_id"][0] == 4
    sums = (columns["kl_policy_reference"].sum() for columns in (backwards, together))
    np.testing.assert_allclose(*sums, rtol=1e-5)


def test_a_copied_model_and_a_cache_also_score_exactly_zero(folders, tmp_path):
    policy, _ = folders("llama")
    copy = shutil.copytree(policy, tmp_path / "copy")
    pair = load_pair(str(policy), str(copy))
    assert pair.policy.network is not pair.reference.network
    assert (score(pair, random_sequences())["kl_policy_reference"] == 0).all()
    itself = load_pair(str(policy), str(policy))
    cache = ReferenceCache(tmp_path / "cache", itself.reference)
    score(itself, random_sequences(), batch_tokens=1, cache=cache)
    assert (score(itself, random_sequences(), cache=cache)["kl_policy_reference"] == 0).all()


def test_logp_sampled_is_returned_in_the_order_of_the_input(pair):
    first, second, *_ = random_sequences()
    second = replace(second, logp_sampled=np.linspace(-2, -1, 12, dtype=np.float32))
    found = score(pair, [first, second])["logp_sampled"]
    assert np.isnan(found[:7]).all()
    np.testing.assert_array_equal(found[7:], second.logp_sampled)


def test_the_noise_floor_is_rounding_and_larger_in_bfloat16(folders):
    policy, reference = folders("llama")
    sequences = random_sequences(((5, 7), (1, 60), (30, 2), (3, 3), (2, 9)))
    exact = load_pair(str(policy), str(reference)).reference
    floor = score_against_itself(exact, sequences)
    assert set(floor) == {*TOKEN_COLUMNS, *PADDING_COLUMNS} - {"text"}
    assert 0 <= floor["kl_policy_reference"].max() < 1e-9
    assert score_against_float32(exact, sequences) is None


def test_the_noise_floor_scores_each_sequence_alone(pair):
    rows = []

    def counting(**inputs):
        rows.append(len(inputs["input_ids"]))
        return pair.reference.backbone(**inputs)

    score_against_itself(replace(pair.reference, backbone=counting), random_sequences())
    assert sorted(rows) == [1, 1, 1, 1, 4]


def test_the_dtype_gap_compares_the_dtype_and_the_head_that_ran_with_float32(folders):
    policy, reference = folders("llama")
    sequences = random_sequences()
    rounded = load_pair(str(policy), str(reference), dtype="bfloat16").reference
    assert rounded.dtype == torch.bfloat16
    gap = score_against_float32(rounded, sequences)
    truth = columns_by_enumeration(reference, reference, sequences)
    np.testing.assert_allclose(gap["logp_reference"], truth["logp_reference"], rtol=3e-5)
    assert 1e-7 < gap["kl_policy_reference"].mean() < 0.05
    assert np.abs(gap["logp_policy"] - gap["logp_reference"]).max() > 1e-3
    head = replace(rounded.head, weight=rounded.head.weight[:300])
    cut = score_against_float32(replace(rounded, head=head, vocab_size=300), sequences)
    one = sequences[0]
    z = double_logits(reference, [*one.prompt_ids, *one.response_ids])[4:-1, :300].numpy()
    wanted = log_softmax(z, axis=-1)[np.arange(7), one.response_ids]
    np.testing.assert_allclose(cut["logp_reference"][:7], wanted, rtol=3e-5)


def test_float64_models_are_scored_in_float64(folders):
    policy, reference = folders("llama")
    sequences = random_sequences()
    found = score(load_pair(str(policy), str(reference), dtype="float64"), sequences)
    wanted = columns_by_enumeration(policy, reference, sequences)["kl_policy_reference"]
    np.testing.assert_array_equal(found["kl_policy_reference"], wanted.astype(np.float32))


def test_nan_is_an_error_with_model_prompt_and_position(pair, unhooked):
    def spoilt(**inputs):
        out = pair.reference.backbone(**inputs)
        out.last_hidden_state[1, 6] = torch.nan
        return out

    broken = replace(pair, reference=replace(pair.reference, backbone=spoilt))
    sequences = [
        replace(one, location=f"rollouts.jsonl, line {one.prompt_id + 1}") for one in random_sequences()
    ]
    message = (
        r"the reference gives NaN or infinite hidden states for prompt 0, sample 0 \(rollouts.jsonl, line 1\), "
        "response token 2"
    )
    with pytest.raises(NonFiniteError, match=message):
        score(broken, sequences[:2], batch_tokens=24)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_in_a_head_is_detected(folders, value):
    policy, reference = folders("llama")
    pair = load_pair(str(policy), str(reference))
    with torch.no_grad():
        pair.policy.network.get_output_embeddings().weight[7, 3] = value
    with pytest.raises(NonFiniteError, match="the policy gives NaN or infinite logits"):
        score(pair, random_sequences()[1:])


def test_temperature_zero_is_an_error_and_no_sequences_give_empty_columns(pair):
    with pytest.raises(OptionError, match="temperature is 0"):
        score(pair, random_sequences(), temperature=0.0)
    assert all(len(values) == 0 for values in score(pair, []).values())
