"""The pair in the package: complete, small, loadable, as good as its card says, and drifted."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from kleash.errors import UnknownNameError
from kleash.shipped import SHIPPED_NAMES, shipped_folder, shipped_prompts, shipped_text

MODELS = ("policy", "reference")
DATA = shipped_prompts().parent


def lines(path: Path, field: str) -> list[str]:
    return [json.loads(line)[field] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def card() -> dict:
    return json.loads((DATA / "card.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def models() -> dict[str, LlamaForCausalLM]:
    return {name: AutoModelForCausalLM.from_pretrained(shipped_folder(name)).eval() for name in MODELS}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(shipped_folder("reference"))


@torch.inference_mode()
def next_token(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """Log-probabilities after each token, in float64."""
    return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def test_everything_that_ships_is_there_and_below_ten_megabytes():
    files = [path for path in DATA.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 10_000_000
    assert {"card.json", "README.md", "prompts.jsonl", "text.jsonl"} <= {path.name for path in files}
    for name in MODELS:
        assert (shipped_folder(name) / "model.safetensors").is_file()
    assert {path.suffix for path in files} == {".json", ".jsonl", ".md", ".safetensors"}
    assert shipped_text().stat().st_size <= 150_000


def test_a_model_is_found_with_and_without_the_prefix():
    assert shipped_folder("policy") == shipped_folder("shipped:policy") != shipped_folder("reference")
    assert {"shipped:policy", "shipped:reference"} <= set(SHIPPED_NAMES)


@pytest.mark.parametrize("name", ["polcy", "", "prompts", "../reference"])
def test_an_unknown_model_is_an_error_that_lists_the_known(name):
    with pytest.raises(UnknownNameError, match="shipped:policy, shipped:reference"):
        shipped_folder(name)


@pytest.mark.parametrize("name", MODELS)
def test_stored_in_sixteen_bits_and_computed_in_thirty_two(name, models):
    with safe_open(shipped_folder(name) / "model.safetensors", "pt") as stored:
        tensors = list(map(stored.get_tensor, stored.keys()))
    assert {tensor.dtype for tensor in tensors} == {torch.float16}
    assert all(tensor.isfinite().all() for tensor in tensors)
    model = models[name]
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_both_models_have_one_tokenizer():
    first, second = ((shipped_folder(name) / "tokenizer.json").read_bytes() for name in MODELS)
    assert first == second
    one, other = (AutoTokenizer.from_pretrained(shipped_folder(name)) for name in MODELS)
    assert one.get_vocab() == other.get_vocab()
    assert one.special_tokens_map == other.special_tokens_map


def test_the_tokenizer_keeps_every_byte_and_begins_every_text(tokenizer, models):
    text = "Emma said, “Naïve?” <script> 漢字\n\ttwo  spaces"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == models["policy"].config.bos_token_id
    assert tokenizer.eos_token_id == models["policy"].config.eos_token_id != tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert 2000 <= len(tokenizer) == models["policy"].config.vocab_size <= 4000


def test_the_prompts_are_openings_that_fit(tokenizer, card):
    prompts = lines(shipped_prompts(), "prompt")
    assert len(prompts) == len(set(prompts)) >= 64
    assert all(8 <= len(prompt.split()) <= 24 and prompt == prompt.strip() for prompt in prompts)
    assert max(len(ids) for ids in tokenizer(prompts)["input_ids"]) + 256 <= 512


def test_the_documents_are_prose():
    texts = lines(shipped_text(), "text")
    assert len(texts) == len(set(texts)) >= 64
    assert all(len(text) >= 100 and text == text.strip() and "_" not in text for text in texts)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_held_out_loss_is_what_the_card_says(name, models, tokenizer, card):
    recorded = card["figures"]["held_out_first_documents"][name]
    total = count = 0.0
    for text in lines(shipped_text(), "text")[:8]:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id][:512]])
        total += models[name](ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert count == recorded["tokens"]
    assert total / count == pytest.approx(recorded["nats_per_token"], rel=1e-4)
    assert recorded["perplexity"] < 80, "a model that has learnt no English would still pass the rest"


def test_the_policy_has_drifted_towards_the_heroine(models, tokenizer, card):
    heroine = [tokenizer.convert_tokens_to_ids(word) for word in ("Ġshe", "Ġher", "Ġherself")]
    assert tokenizer.unk_token_id not in heroine and None not in heroine
    divergences, shares = [], {name: [] for name in MODELS}
    for prompt in lines(shipped_prompts(), "prompt")[::8]:
        ids = tokenizer(prompt)["input_ids"]
        logp, logq = (next_token(models[name], ids) for name in MODELS)
        divergences.append((logp.exp() * (logp - logq)).sum(-1)[1:].mean().item())
        for name, log_probabilities in (("policy", logp), ("reference", logq)):
            shares[name].append(log_probabilities.exp()[1:, heroine].sum(-1).mean().item())
    assert sum(divergences) / len(divergences) > 0.03
    assert sum(p > q for p, q in zip(shares["policy"], shares["reference"], strict=True)) >= 11  # of 12
    assert card["figures"]["rewards"]["policy"] > 1.5 * card["figures"]["rewards"]["reference"]
