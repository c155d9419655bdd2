"""The reference cache: hidden states on disk instead of a forward pass of the reference."""

from dataclasses import replace

import numpy as np
import pytest
from scoring_cases import random_sequences

from kleash.errors import OptionError, RunFolderError
from kleash.linear import Head
from kleash.models import ReferenceCache, score


def test_only_missing_sequences_are_computed(pair, tmp_path):
    first, rest = random_sequences()[:2], random_sequences()[2:]
    cache = ReferenceCache(tmp_path, pair.reference)
    score(pair, first, cache=cache)
    read = []

    def counting(**inputs):
        read.append(len(inputs["input_ids"]))
        return pair.reference.backbone(**inputs)

    counted = replace(pair, reference=replace(pair.reference, backbone=counting))
    found = score(counted, random_sequences(), cache=cache)
    for name, values in score(pair, random_sequences()).items():
        np.testing.assert_allclose(found[name], values, rtol=3e-5, atol=3e-6, err_msg=name)
    assert sum(read) == len(rest)
    score(counted, random_sequences(), cache=cache)
    assert sum(read) == len(rest)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert cache.states.tokens == sum(len(each.response_ids) for each in random_sequences())


def test_a_model_without_a_head_cannot_be_cached(pair, tmp_path, unhooked):
    with pytest.raises(OptionError, match="measured through its logits, which are too"):
        ReferenceCache(tmp_path, replace(pair.reference, head=Head(weight=None)))


def test_a_folder_that_cannot_be_created_is_an_error(pair, tmp_path, unhooked):
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        RunFolderError, match="file is a file, and a reference cache is a folder; give another name"
    ):
        ReferenceCache(tmp_path / "file", pair.reference)
    with pytest.raises(RunFolderError, match="within cannot be written: Not a directory"):
        ReferenceCache(tmp_path / "file" / "within", pair.reference)
