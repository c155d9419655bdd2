"""A reference that is read from its cache: which one it is, what is in the folder, and the hub's word for it."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scoring_cases import random_sequences
from tiny_models import double_logits, save_tiny, tiny_adapter, tiny_tokenizer

from kleash.errors import ModelError
from kleash.jobs.measure import MeasureJob
from kleash.measuring import CacheJob, cache_reference
from kleash.measuring.shards import source_sequences
from kleash.models import (
    Loading,
    Pair,
    ReferenceCache,
    StoredReference,
    TokenSequence,
    load_beside,
    load_pair,
    load_reference,
    score,
)
from kleash.models.cache.hidden_states import HiddenStateStore, sequence_key
from kleash.models.cache.stored_reference import finish_cache, save_rounding_columns
from kleash.models.scoring import read_hidden_states
from kleash.records import CacheContents


def contents(**more: Any) -> CacheContents:
    plain = {"sequences": 4, "tokens": 23, "hidden_size": 32, "hidden_bytes": 1, "head_bytes": 1}
    rest = {"logits_bytes": 1, "context": 128, "scale": 1.0, "softcap": None, "notes": ()}
    return CacheContents(**{**plain, **rest, **more})


def made(folder: Path, reference: Path, sequences: list[TokenSequence]) -> StoredReference:
    pair = load_reference(str(reference), None, Loading())
    cache = ReferenceCache(folder, pair.reference)
    cache.fill(partial(read_hidden_states, pair.reference), sequences, 4096)
    finish_cache(folder, pair.reference, contents())
    return StoredReference(folder)


def beside(stored: StoredReference, policy: Path, reference: Path | str) -> Pair:
    return load_beside(stored, str(policy), str(reference), loading=Loading())


def test_a_stored_reference_scores_as_the_loaded_one(folders, pair, tmp_path):
    policy, reference = folders("llama")
    stored = made(tmp_path / "cache", reference, random_sequences())
    assert StoredReference.find(tmp_path / "cache") and not StoredReference.find(tmp_path)
    without = beside(stored, policy, tmp_path / "cache")
    assert without.reference.network is None and without.reference.backbone is None
    exact = score(pair, random_sequences())
    found = score(without, random_sequences())
    for name, values in exact.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    warm = score(without, random_sequences()[::-1], temperature=0.7, batch_tokens=9)
    longest = random_sequences()[1]
    logq = (double_logits(reference, [*longest.prompt_ids, *longest.response_ids])[:-1] / 0.7).log_softmax(-1)
    wanted = logq[range(12), list(longest.response_ids)]
    np.testing.assert_allclose(warm["logp_reference"][warm["prompt_id"] == 1], wanted, rtol=2e-5)
    assert without.reference.record() == pair.reference.record()
    assert without.context_length == pair.context_length


def test_a_missing_sequence_is_an_error_with_its_name(folders, tmp_path):
    stored = made(tmp_path, folders("llama")[1], random_sequences()[:3])
    where = replace(random_sequences()[3], location="file, line 7")
    (other,) = random_sequences(((2, 2),), seed=5)
    with pytest.raises(ModelError, match=r"lacks 2 of the 5 windows, .* prompt 3, .*line 7\); again"):
        stored.require_all([*random_sequences()[:3], where, other], "windows", "again")
    stored.require_all(random_sequences()[:3], "windows", "again")
    with pytest.raises(ModelError, match="holds no hidden states of prompt 3, sample 0"):
        stored.read([random_sequences()[0], where])


def test_a_larger_head_is_truncated_as_without_a_cache(folders, tmp_path):
    policy, _ = folders("llama")
    wide = save_tiny(tmp_path / "wide", vocab_size=340)
    cache = tmp_path / "cache"
    stored = made(cache, wide, random_sequences())
    assert load_file(cache / "head.safetensors")["weight"].shape == (340, 32)
    found, exact = beside(stored, policy, wide), load_pair(str(policy), str(wide))
    assert found.vocab_size == exact.vocab_size == 300
    assert any("340 (reference) rows" in note for note in found.notes)
    for name, values in score(exact, random_sequences()).items():
        np.testing.assert_array_equal(score(found, random_sequences())[name], values, err_msg=name)
    other = save_tiny(tmp_path / "other")
    tiny_tokenizer(290).save_pretrained(other)
    with pytest.raises(ModelError, match="the tokenizers differ in 10 tokens"):
        beside(stored, other, wide)


def test_a_stored_reference_may_be_an_adapter(folders, tmp_path):
    policy, base = folders("llama")
    adapter = tiny_adapter(tmp_path / "adapter", base, target_modules=["q_proj", "lm_head"])
    cache = tmp_path / "cache"
    kept = cache_reference(
        CacheJob(reference=str(adapter), responses=str(rollouts(tmp_path)), out=str(cache), batch_tokens=64)
    )
    assert kept.notes[0] == f"the reference is the adapter {adapter} over {base}"
    found = beside(StoredReference(cache), policy, adapter)
    exact = load_pair(str(policy), str(adapter))
    sequences = list(source_sequences(MeasureJob(policy="p", responses=str(rollouts(tmp_path))), exact))
    for name, values in score(exact, sequences).items():
        np.testing.assert_array_equal(score(found, sequences)[name], values, err_msg=name)
    with pytest.raises(ModelError, match="holds hidden states of"):
        beside(StoredReference(cache), policy, base)


def rollouts(folder: Path) -> Path:
    path = folder / "rollouts.jsonl"
    lines = [{"prompt_token_ids": [0, 9 + n], "response_token_ids": [50 + n, 60]} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_the_cache_has_the_tokenizer_but_no_weights_with_the_permissions_of_the_folder(folders, tmp_path):
    stored = made(tmp_path, folders("llama")[1], random_sequences())
    names = {path.name for path in (tmp_path / "tokenizer").iterdir()}
    assert {"tokenizer.json", "config.json"} <= names
    assert not any(name.endswith((".safetensors", ".index.json")) for name in names)
    tokenizer = stored.tokenizer(False)
    assert tokenizer("The sea")["input_ids"][0] == 0 and tokenizer.chat_template
    made(tmp_path, folders("llama")[1], random_sequences())
    modes = {
        path.stat().st_mode & 0o777 for path in tmp_path.iterdir() if path.suffix in (".json", ".safetensors")
    }
    assert modes == {(tmp_path / "reference.json").stat().st_mode & 0o777}


def test_rounding_columns_are_stored_by_temperature(folders, tmp_path):
    stored = made(tmp_path, folders("llama")[1], random_sequences())
    assert stored.rounding_columns("noise", 1.0) is None
    save_rounding_columns(tmp_path, "noise", 2.0, {"kl_policy_reference": np.array([0.25, 0.5])})
    assert stored.rounding_columns("noise", 2)["kl_policy_reference"].tolist() == [0.25, 0.5]
    assert stored.rounding_columns("noise", 1.0) is None and stored.rounding_columns("gap", 2.0) is None


@pytest.fixture
def from_hub(folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache of someone/reference at commit aaaa…, and a hub that says what it is told to say."""
    stored = made(tmp_path, folders("llama")[1], random_sequences())
    there = replace(stored.label.reference, path="someone/reference", revision="a" * 40)
    stored.label = replace(stored.label, reference=there)
    says: dict[str, Any] = {}

    class Api:
        def model_info(self, name: str, revision: str | None) -> Any:
            if says["commit"] is None:
                return unreachable.model_info(name, revision=revision)
            says["asked"] = name, revision
            return type("Info", (), {"sha": says["commit"]})

    def nothing_here(name: str, **options: Any) -> str:
        assert options["local_files_only"], "weights would have been fetched"
        if says.get("local"):
            return f"/hub/snapshots/{says['local']}"
        raise OSError("not here")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    unreachable = huggingface_hub.HfApi(endpoint="http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", nothing_here)
    return stored, says


def test_a_hub_id_is_compared_by_commit_without_a_download(from_hub):
    stored, says = from_hub
    says["commit"] = "a" * 40
    stored.check_reference("someone/reference", None, "auto")
    assert says["asked"] == ("someone/reference", None)
    says["commit"] = "b" * 40
    with pytest.raises(ModelError, match=f"at commit {'a' * 40} and the reference is at {'b' * 40}"):
        stored.check_reference("someone/reference", "main", "auto")
    says["commit"] = None
    stored.check_reference("someone/reference", "a" * 40, "float32")
    with pytest.raises(ModelError, match="does not say which commit someone/reference is at"):
        stored.check_reference("someone/reference", None, "auto")
    says["local"] = "a" * 40
    stored.check_reference("someone/reference", None, "auto")
    with pytest.raises(ModelError, match="bfloat16"):
        stored.check_reference("someone/reference", None, "bfloat16")


def test_hidden_states_are_read_as_written(tmp_path):
    rng = torch.Generator().manual_seed(0)
    parts = {bytes([n] * 16): torch.randn(n + 1, 8, generator=rng).to(torch.bfloat16) for n in range(5)}
    first = HiddenStateStore(tmp_path)
    first.write(dict(list(parts.items())[:2]))
    first.write(dict(list(parts.items())[2:]))
    for states in (first, HiddenStateStore(tmp_path)):
        assert len(states) == 5 and states.tokens == 15
        for key in [*parts, *reversed(parts)]:
            assert torch.equal(states.get(key, len(parts[key])), parts[key])
    assert bytes(16) in first and bytes([9] * 16) not in first
    assert first.size_bytes == sum(path.stat().st_size for path in tmp_path.glob("part-*"))


def test_a_key_depends_on_tokens_and_prompt_length():
    (one,) = random_sequences(((5, 7),))
    whole = one.prompt_ids + one.response_ids
    keys = {sequence_key(replace(one, prompt_ids=whole[:n], response_ids=whole[n:])) for n in range(1, 12)}
    assert len(keys) == 11
    assert sequence_key(one) == sequence_key(replace(one, prompt_id=9, location="elsewhere")) in keys


def test_bias_scale_and_softcap_are_restored(folders, tmp_path):
    model = load_reference(str(folders("llama")[1]), None, Loading()).reference
    bias = torch.linspace(-1, 1, model.vocab_size)
    odd = replace(model, head=replace(model.head, bias=bias))
    ReferenceCache(tmp_path, odd)
    finish_cache(tmp_path, odd, contents(scale=0.25, softcap=3.0))
    head = StoredReference(tmp_path).as_model(torch.device("cpu"), None).head
    assert head.bias is not None and torch.equal(head.bias, bias)
    assert (head.scale, head.softcap) == (0.25, 3.0)
    assert model.head.weight is not None and torch.equal(head.weight, model.head.weight)
