"""What a run says of its sampler: the acceptance rate under it, and a generation configuration that is not used."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from kleash.measuring import compare, measure
from kleash.reports.text_formats import model_card
from kleash.store.summary import summarize

PROMPTS = "The sea was calm\nShe counted the birds\nA long road\n"
CONFIGURATION = {"repetition_penalty": 1.1, "presence_penalty": 1.0, "temperature": 0.7, "top_k": 20}
CONFIGURATION |= {"top_p": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": [[5]]}
CONFIGURATION |= {"do_sample": True, "max_new_tokens": 7}


def with_bias_alone(folder, probabilities):
    """A GPT-J with a head of which only the bias is not 0."""
    from transformers import AutoModelForCausalLM, GPTJConfig

    save_tiny(folder)
    (folder / "model.safetensors").unlink()
    config = GPTJConfig(
        vocab_size=300, n_positions=128, n_embd=16, n_layer=1, n_head=2, rotary_dim=4,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    bias = torch.full((300,), -200.0)
    for token, probability in probabilities.items():
        bias[token] = torch.tensor(probability).log()
    weights |= {"lm_head.weight": torch.zeros(300, 16), "lm_head.bias": bias}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def measured(folder, policy, reference, **options):
    prompts = folder / "prompts.txt"
    prompts.write_text(PROMPTS)
    models = {"policy": policy, "reference": reference}
    return measure(**models, prompts=prompts, out=folder / "run", max_new_tokens=12, **options)


Q = {10: 0.5, 11: 0.3, 12: 0.15, 13: 0.05}
P = {10: 0.4, 11: 0.3, 12: 0.2, 13: 0.1}
FAR = {10: 0.15, 11: 0.3, 12: 0.5, 13: 0.05}


@pytest.mark.parametrize(
    ("policy", "options", "whole", "sampler"),
    [
        (P, {"top_k": 2}, 0.9, 1 - (0.5 / 0.8 - 0.4 / 0.7)),
        (FAR, {"top_k": 2}, 0.65, 0.375),
        (FAR, {"temperature": 0.0}, 0.65, 0.0),
        (P, {}, 0.9, None),
    ],
    ids=str,
)
def test_the_acceptance_rate_is_also_that_of_the_sampler(tmp_path, policy, options, whole, sampler):
    """Means over tokens of distributions that are the same everywhere: sums over four tokens by hand."""
    models = [with_bias_alone(tmp_path / name, each) for name, each in (("p", policy), ("q", Q))]
    measurement = measured(tmp_path, *models, **options)
    numbers = measurement.statistics()
    assert numbers["acceptance_rate"].value == pytest.approx(whole, abs=1e-6)
    rows = {row[0]: row[1] for row in summarize(measurement).tables[0].rows}
    assert float(rows["Expected acceptance rate, whole distributions"]) == pytest.approx(100 * whole)
    label = "Expected acceptance rate of the sampler"
    if sampler is None:
        assert "acceptance_rate_of_sampler" not in numbers and label not in rows
        return
    assert numbers["acceptance_rate_of_sampler"].value == pytest.approx(sampler, abs=1e-6)
    assert label in rows and label in model_card(measurement)


def test_compare_has_the_rate_of_the_sampler_of_runs_that_have_one(tmp_path):
    q = with_bias_alone(tmp_path / "q", Q)
    folders = []
    for name, policy, options in (("a", P, {"top_k": 2}), ("b", FAR, {"top_k": 2}), ("c", P, {})):
        (tmp_path / name).mkdir()
        measured(tmp_path / name, with_bias_alone(tmp_path / name / "model", policy), q, **options)
        folders.append(tmp_path / name / "run")
    second, third = compare(folders).differences
    difference = second.differences["acceptance_rate_of_sampler"].value
    assert difference == pytest.approx(0.375 - (1 - (0.5 / 0.8 - 0.4 / 0.7)), abs=1e-6)
    assert "acceptance_rate_of_sampler" not in third.differences and "acceptance_rate" in third.differences


def test_a_generation_configuration_changes_no_draw_and_is_named(tmp_path):
    plain = save_tiny(tmp_path / "model")
    reference = save_tiny(tmp_path / "reference")
    before = measured(tmp_path, plain, reference)
    path = plain / "generation_config.json"
    shutil.move(tmp_path / "run", tmp_path / "before")
    path.write_text(json.dumps({**json.loads(path.read_text()), **CONFIGURATION}))
    after = measured(tmp_path, plain, reference)
    assert after.statistics() == before.statistics() and after.counts == before.counts
    (note,) = (note for note in after.notes if "generation configuration" in note)
    assert not any("generation configuration" in note for note in before.notes)
    named = ("repetition_penalty 1.1", "presence_penalty 1", "temperature 0.7", "top_k 20", "bad_words_ids")
    for part in named:
        assert part in note
    for part in ("top_p", "no_repeat", "max_new_tokens", "do_sample"):
        assert part not in note.split(")")[0]
    assert "--temperature, --top-k" in note and "--responses" in note
    assert ("note", note) in summarize(after).facts
    assert "repetition\\_penalty 1.1" in model_card(after)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "presence_penalty 1" in page


def test_settings_that_the_run_has_too_are_not_named(tmp_path):
    model = save_tiny(tmp_path / "model")
    path = model / "generation_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "temperature": 0.7, "top_k": 20, "top_p": 0.9})
    )
    measurement = measured(tmp_path, model, model, temperature=0.7, top_k=20)
    (note,) = (note for note in measurement.notes if "generation configuration" in note)
    assert "(top_p 0.9)" in note
    shutil.rmtree(tmp_path / "run")
    measurement = measured(tmp_path, model, model, temperature=0.7, top_k=20, top_p=0.9)
    assert not any("generation configuration" in note for note in measurement.notes)
