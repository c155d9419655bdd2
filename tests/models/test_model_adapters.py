"""LoRA adapters as policy, reference or both."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.special import log_softmax
from scoring_cases import random_sequences
from tiny_models import edit_json, tiny_adapter
from transformers import AutoModelForCausalLM

from kleash.auditing.targets.packages import quiet
from kleash.errors import ModelError
from kleash.models import Prompt, Sampling, generate, load_pair, score


@pytest.fixture(scope="module")
def another(base):
    return tiny_adapter(base.parent / "another", base, seed=5, target_modules=["k_proj", "lm_head"])


def logps(base, adapter, sequences):
    """Log-probabilities of the response tokens, by PEFT's own forward pass in float64."""
    from peft import PeftModel

    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64).eval()
    if adapter is not None:
        with quiet():
            network = PeftModel.from_pretrained(network, adapter).double().eval()
    found = []
    for one in sequences:
        with torch.no_grad():
            z = network(input_ids=torch.tensor([[*one.prompt_ids, *one.response_ids]])).logits[0].numpy()
        rows = log_softmax(z[len(one.prompt_ids) - 1 : -1], axis=-1)
        found.append(rows[np.arange(len(one.response_ids)), one.response_ids])
    return np.concatenate(found)


def agree(pair, base, adapters, **options):
    sequences = random_sequences()
    found = score(pair, sequences)
    for role, adapter in zip(("policy", "reference"), adapters, strict=True):
        wanted = logps(base, adapter, sequences)
        np.testing.assert_allclose(found[f"logp_{role}"], wanted, rtol=3e-5, atol=3e-6, **options)
    return found


def test_an_adapter_against_its_base_has_its_weights_beside_those_of_the_base(base, adapter):
    pair = load_pair(str(adapter), str(base))
    assert pair.notes[0] == f"the policy is the adapter {adapter} over {base}"
    found = agree(pair, base, (adapter, None))
    assert found["kl_policy_reference"].mean() > 1e-3
    rank, hidden, values = 4, 32, 16
    assert pair.policy.parameters - pair.reference.parameters == 2 * rank * (hidden * 3 + values)
    assert pair.policy.fingerprint != pair.reference.fingerprint
    stored = [load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")]
    sizes = [sum(tensor.numel() for tensor in tensors.values()) for tensors in stored]
    assert pair.reference.weights.bytes == 4 * sizes[0]
    assert pair.policy.weights.bytes == 4 * sum(sizes) and pair.policy.weights.bits_per_weight == 32


def test_two_adapters_over_one_base_one_of_them_on_the_head(base, adapter, another):
    pair = load_pair(str(adapter), str(another))
    assert "two adapters over one base, which is loaded once" in pair.notes[2]
    assert not torch.equal(pair.policy.head.weight, pair.reference.head.weight)
    agree(pair, base, (adapter, another))


def test_an_adapter_on_the_head_is_merged_in_float32_whatever_the_model_runs_in(base, another):
    pair = load_pair(str(another), str(base), dtype="bfloat16")
    assert pair.policy.head.weight.dtype == torch.float32
    assert pair.reference.head.weight.dtype == torch.bfloat16
    found = score(pair, random_sequences())
    assert np.abs(found["logp_policy"] - logps(base, another, random_sequences())).max() < 0.3


def test_the_same_adapter_on_both_sides_is_exactly_zero(base, adapter):
    pair = load_pair(str(adapter), str(adapter))
    assert pair.policy.is_same_as(pair.reference)
    assert (score(pair, random_sequences())["kl_policy_reference"] == 0).all()


def test_a_reference_with_another_base_gives_a_note(base, adapter, folders):
    reference, _ = folders("llama")
    pair = load_pair(str(adapter), str(reference))
    assert "different bases, which are both loaded" in pair.notes[1]
    found = score(pair, random_sequences())
    np.testing.assert_allclose(found["logp_policy"], logps(base, adapter, random_sequences()), rtol=3e-5)
    np.testing.assert_allclose(found["logp_reference"], logps(reference, None, random_sequences()), rtol=3e-5)


def test_generation_uses_the_adapter(base, adapter):
    prompts = [Prompt(prompt_id=0, token_ids=(0, 50, 60), text="", prompt_hash="1f")]
    pair = load_pair(str(base), str(adapter))
    sampling = Sampling(max_new_tokens=12, samples_per_prompt=4)
    for model, folder in ((pair.policy, None), (pair.reference, adapter), (pair.policy, None)):
        drawn = generate(model, prompts, sampling)
        told = np.concatenate([one.logp_sampled for one in drawn])
        np.testing.assert_allclose(told, logps(base, folder, drawn), rtol=3e-5, atol=3e-6)


def test_a_base_path_is_relative_to_the_adapter_or_the_current_directory(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # away from where the tests run: a folder ../base there would be another base
    beside = tiny_adapter(base.parent / "beside", base, base_name="../base")
    assert load_pair(str(beside), str(base)).policy.network is not None
    here = tiny_adapter(tmp_path / "here", base, base_name="base")
    monkeypatch.chdir(base.parent)
    pair = load_pair(str(here), "base")
    assert pair.policy.network is pair.reference.network


def test_an_adapter_with_unexpected_tensors_is_an_error(base, adapter, tmp_path, unhooked):
    stray = shutil.copytree(adapter, tmp_path / "stray")
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {name.replace("layers.1", "layers.9"): values for name, values in tensors.items()}
    save_file(renamed, stray / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"4 of its 8 tensors .* and 4 .*layers\.9.* and .*layers\.1"):
        load_pair(str(stray), str(base))


def test_settings_that_peft_does_not_know_give_a_note(base, adapter, tmp_path):
    copied = shutil.copytree(adapter, tmp_path / "adapter")
    more = {"a_new_option": True, "another": {"size": 2}, "one_that_is_off": False, "absent": None}
    edit_json(copied / "adapter_config.json", **more)
    (note,) = (note for note in load_pair(str(copied), str(base)).notes if "does not know" in note)
    assert "leaves out: a_new_option, another; with a newer PEFT" in note
    assert not [note for note in load_pair(str(adapter), str(base)).notes if "does not know" in note]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_model_name_or_path": "/nowhere/base"}, "lies over the base /nowhere/base, but there"),
        ({"base_model_name_or_path": None}, "does not name its base"),
        ({"r": 7}, r"cannot be put on .* state_dict for .*: size"),
        ({"modules_to_save": ["lm_head"]}, "KeyError: 'base_model.model.lm_head.weight'"),
    ],
)
def test_an_adapter_that_does_not_fit_its_base_is_an_error(base, adapter, tmp_path, change, words, unhooked):
    copied = shutil.copytree(adapter, tmp_path / "adapter")
    edit_json(copied / "adapter_config.json", **change)
    with pytest.raises(ModelError, match=words):
        load_pair(str(copied), str(base))
