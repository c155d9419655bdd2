"""Models with vision, audio or video parts on text, against the composite class's own forward pass in float64."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.special import log_softmax
from scoring_cases import random_sequences
from tiny_towers import FAMILIES, load_composite, save_tower

from kleash.auditing.targets.packages import quiet
from kleash.errors import ModelError, SourceError
from kleash.models import Sampling, generate, live_model, load_pair, score, tokenise_prompts

SEQUENCES = random_sequences(((5, 7), (1, 12), (9, 1)))


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    """(policy, reference) folders of a family, made once."""
    made = {}

    def find(family: str) -> tuple[Path, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = tuple(
                save_tower(folder / role, family, apart=apart)
                for role, apart in (("policy", 0.1), ("reference", 0.0))
            )
        return made[family]

    return find


def logp_of(network, sequence):
    """Log-probabilities of the whole vocabulary at the scored positions of a sequence, by the network's own logits."""
    ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
    with torch.no_grad():
        logits = network(input_ids=ids).logits[0]
    return log_softmax(logits[len(sequence.prompt_ids) - 1 : -1].numpy(), axis=-1)


def exact_kl(policy, reference, sequences=SEQUENCES):
    """KL(policy || reference) of every response token, by sums over the vocabulary."""
    pairs = [(logp_of(policy, sequence), logp_of(reference, sequence)) for sequence in sequences]
    return np.concatenate([(np.exp(logp) * (logp - logq)).sum(-1) for logp, logq in pairs])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_measured_as_its_composite_class_reads_text(towers, family):
    policy, reference = towers(family)
    pair = load_pair(str(policy), str(reference), dtype="float64")
    assert not [note for note in pair.notes if "come apart" in note]
    assert pair.policy.context_length == 128
    kl = exact_kl(load_composite(policy), load_composite(reference))
    assert kl.max() > 0.01
    np.testing.assert_allclose(score(pair, SEQUENCES)["kl_policy_reference"], kl, rtol=1e-6, atol=1e-6)


# whole, text class, AutoModelForCausalLM
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3n", "llama4"])
def test_responses_of_a_composite_model_are_drawn_by_its_own_probabilities(towers, family):
    policy, _ = towers(family)
    pair = load_pair(str(policy), str(policy), dtype="float64")
    prompts = tokenise_prompts(["The sea", "A long road leads out of the town"], pair)
    for _, response in zip(prompts, generate(pair.policy, prompts, Sampling(max_new_tokens=5)), strict=True):
        places = np.arange(len(response.response_ids)), list(response.response_ids)
        logp = logp_of(load_composite(policy), response)[places]
        np.testing.assert_allclose(response.logp_sampled, logp, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_an_adapter_on_all_parts_is_measured_on_text(towers, family, tmp_path):
    policy, reference = towers(family)
    adapter, adapted = composite_adapter(tmp_path / "adapter", load_composite(reference), reference)
    kl = exact_kl(load_composite(policy), adapted)
    assert kl.max() > 0.01
    pair = load_pair(str(policy), str(adapter), dtype="float64")
    np.testing.assert_allclose(score(pair, SEQUENCES)["kl_policy_reference"], kl, rtol=1e-6, atol=1e-6)


def composite_adapter(folder, composite, base):
    """A LoRA adapter on all linear layers of a composite model, the vision part's too, and the model with it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    with quiet():  # peft still reads attributes that transformers has renamed
        settings = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = get_peft_model(composite, settings)
        with torch.no_grad():
            for weight in adapted.parameters():
                if weight.requires_grad:
                    weight.add_(0.1 * torch.randn_like(weight))
        adapted.peft_config["default"].base_model_name_or_path = str(base)
        adapted.save_pretrained(folder)
    return folder, adapted.eval()


def test_files_with_the_names_of_other_versions_are_read(towers, tmp_path):
    policy, _ = towers("llava")
    for prefix in ("model.language_model.", "model."):
        folder = shutil.copytree(policy, tmp_path / "llava", dirs_exist_ok=True)
        tensors = {
            name.replace("language_model.model.", prefix).replace("language_model.lm_head", "lm_head"): x
            for name, x in load_file(policy / "model.safetensors").items()
            if "vis" not in name
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        pair = load_pair(str(folder), str(policy), dtype="float64")
        np.testing.assert_array_equal(score(pair, SEQUENCES)["kl_policy_reference"], 0)


def test_a_text_part_without_one_of_its_weights_is_refused(towers, tmp_path):
    policy, reference = towers("llava")
    tensors = load_file(policy / "model.safetensors")
    for name in ("language_model.model.layers.1.self_attn.q_proj.weight", "language_model.lm_head.weight"):
        folder = shutil.copytree(policy, tmp_path / name)
        rest = {key: x for key, x in tensors.items() if key != name}
        save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match="lacks 1 of its weights, which would be"):
            load_pair(str(folder), str(reference))


def test_an_adapter_of_another_class_is_refused(towers, tmp_path):
    from transformers import LlamaForCausalLM

    _, reference = towers("llava")
    composite = load_composite(reference)
    text = LlamaForCausalLM._from_config(composite.config.text_config, dtype=torch.float64)
    folder, _ = composite_adapter(tmp_path / "adapter", text.eval(), reference)
    with pytest.raises(ModelError, match=r"does not fit|cannot be put on"):
        load_pair(str(folder), str(reference), dtype="float64")


def test_a_composite_model_in_memory_is_the_one_in_its_folder(towers):
    policy, reference = towers("llava")
    pair = load_pair(str(policy), str(reference), dtype="float64")
    live = live_model(load_composite(policy), pair.tokenizer)
    assert live.parameters == pair.policy.parameters and live.head.weight is not None
    np.testing.assert_array_equal(score(replace(pair, reference=live), SEQUENCES)["kl_policy_reference"], 0)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}], "holds 'image'"),
        ([{"role": "user", "content": [{"image_url": {"url": "x"}}]}], "holds 'image_url'"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "holds 'input_audio'"),
    ],
)
def test_a_prompt_with_an_image_is_refused(pair, prompt, message):
    words = rf"prompt 1: a message of 'messages' {message}, and kleash measures .* text alone"
    with pytest.raises(SourceError, match=words):
        tokenise_prompts([prompt], pair)
