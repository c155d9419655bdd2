"""The reference cache: hidden states on disk instead of a forward pass of the reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scoring_cases import random_sequences

from kleash.errors import ModelError, OptionError, RunFolderError
from kleash.linear import Head
from kleash.models import ReferenceCache, load_pair, score


def unasked(**_):
    raise AssertionError("the reference was asked")


def same(found, wanted):
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=3e-5, atol=3e-6, err_msg=name)


def test_cached_sequences_are_not_computed_again(pair, tmp_path):
    plain = score(pair, random_sequences())
    cache = ReferenceCache(tmp_path / "cache", pair.reference)
    same(score(pair, random_sequences(), cache=cache), plain)
    assert cache.hits == 0
    deaf = replace(pair, reference=replace(pair.reference, backbone=unasked))
    again = ReferenceCache(tmp_path / "cache", deaf.reference)
    same(score(deaf, random_sequences(), batch_tokens=11, cache=again), plain)
    assert again.hits == len(random_sequences())
    hotter = score(deaf, random_sequences()[::-1], temperature=2.0, cache=again)
    np.testing.assert_allclose(
        np.sort(hotter["logp_reference"]),
        np.sort(score(pair, random_sequences(), temperature=2.0)["logp_reference"]),
        rtol=1e-4,
    )


def test_only_missing_sequences_are_computed(pair, tmp_path):
    first, rest = random_sequences()[:2], random_sequences()[2:]
    cache = ReferenceCache(tmp_path, pair.reference)
    score(pair, first, cache=cache)
    read = []

    def counting(**inputs):
        read.append(len(inputs["input_ids"]))
        return pair.reference.backbone(**inputs)

    counted = replace(pair, reference=replace(pair.reference, backbone=counting))
    same(score(counted, random_sequences(), cache=cache), score(pair, random_sequences()))
    assert sum(read) == len(rest)
    assert cache.hits == 2
    score(counted, random_sequences(), cache=cache)
    assert sum(read) == len(rest)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_hidden_states_are_stored_in_the_models_dtype(folders, tmp_path):
    policy, reference = folders("llama")
    pair = load_pair(str(policy), str(reference), dtype="bfloat16")
    fresh = score(pair, random_sequences(), cache=ReferenceCache(tmp_path, pair.reference))
    (stored,) = tmp_path.glob("*.safetensors")
    tensors = load_file(stored)
    assert tensors["hidden"].dtype == torch.bfloat16
    assert tensors["hidden"].shape == (1 + 3 + 7 + 12, 32)
    assert sorted(tensors["lengths"].tolist()) == [1, 3, 7, 12]
    found = score(pair, random_sequences(), cache=ReferenceCache(tmp_path, pair.reference))
    for name, values in fresh.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_a_cache_of_another_model_is_an_error(folders, pair, tmp_path, unhooked):
    ReferenceCache(tmp_path, pair.reference)
    with pytest.raises(ModelError) as raised:
        ReferenceCache(tmp_path, pair.policy)
    assert pair.policy.fingerprint in str(raised.value)
    assert pair.reference.fingerprint in str(raised.value)
    rounded = load_pair(*map(str, folders("llama")), dtype="bfloat16").reference
    with pytest.raises(ModelError, match=r"float32\) and the reference is .*, bfloat16\)"):
        ReferenceCache(tmp_path, rounded)


def test_a_model_without_a_head_cannot_be_cached(pair, tmp_path, unhooked):
    with pytest.raises(OptionError, match="measured through its logits, which are too"):
        ReferenceCache(tmp_path, replace(pair.reference, head=Head(weight=None)))


def test_a_folder_that_cannot_be_created_is_an_error(pair, tmp_path, unhooked):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="file cannot be written: Not a directory"):
        ReferenceCache(tmp_path / "file", pair.reference)
    with pytest.raises(RunFolderError, match="within cannot be written: Not a directory"):
        ReferenceCache(tmp_path / "file" / "within", pair.reference)


def test_a_damaged_file_is_an_error_with_its_name(pair, tmp_path, unhooked):
    score(pair, random_sequences(), cache=ReferenceCache(tmp_path, pair.reference))
    (stored,) = tmp_path.glob("*.safetensors")
    stored.write_bytes(stored.read_bytes()[:-9])
    with pytest.raises(ModelError, match=r"not fully covered.* damaged; delete"):
        ReferenceCache(tmp_path, pair.reference)
