"""What can be loaded, what is said about it, and what is refused in a sentence."""

import json
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf_file import write_gguf
from safetensors.torch import load_file, save_file
from scipy.special import log_softmax
from scoring_cases import columns_by_enumeration, random_sequences
from tiny_models import double_logits, edit_json, save_tiny, tiny_tokenizer
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from kleash.checkpoints import files, resolution
from kleash.checkpoints.resolution import find_checkpoint
from kleash.engines.base_logits import base_logits_beside
from kleash.errors import CannotRunError, ModelError, OptionError, SourceError, UnknownNameError
from kleash.jobs import MeasureJob
from kleash.measuring.dry_run import dry_run
from kleash.models import Model, live_model, load_pair, read_prompts, score, tokenizers
from kleash.models.pair_loading import pair_models
from kleash.sources.documents import read_text
from kleash.sources.responses import read_responses


@pytest.fixture
def copied(folders, tmp_path):
    """A policy's folder that a test may spoil."""
    return shutil.copytree(folders("llama")[0], tmp_path / "policy")


def refuse(folder, match, error=ModelError, **options):
    with pytest.raises(error, match=match) as raised:
        load_pair(str(folder), str(folder), **options)
    message = str(raised.value)
    assert "\n" not in message
    assert not message.endswith(".")
    if not options:  # a dry run says the same of files, from headers alone
        with pytest.raises(error) as raised:
            dry_run(MeasureJob(policy=str(folder), reference=str(folder), text="shipped:text"))
        assert str(raised.value) == message


def test_a_model_records_its_name_size_and_dtype(folders):
    policy, reference = folders("llama")
    model = load_pair(str(policy), str(reference)).policy
    assert isinstance(model, Model)
    assert (model.role, model.path, model.revision) == ("policy", str(policy), None)
    assert (model.dtype, model.device.type) == (torch.float32, "cpu")
    assert (model.vocab_size, model.context_length, model.eos_token_ids) == (320, 128, (1,))
    stored = load_file(policy / "model.safetensors")
    assert model.parameters == sum(values.numel() for values in stored.values())
    assert not model.network.training


def test_settings_and_headers_are_read_once(folders, monkeypatch):
    opened: list[str] = []
    for module, name in ((resolution, "read_json"), (files, "open_safetensors")):
        read = getattr(module, name)
        monkeypatch.setattr(module, name, lambda path, read=read: opened.append(path.name) or read(path))
    policy, reference = folders("llama")
    load_pair(str(policy), str(reference))
    assert sorted(opened) == sorted(2 * ["config.json", "model.safetensors"])


def test_loading_prints_nothing_and_restores_logging(folders, capfd):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), list(warnings.filters)
    folder = str(folders("gpt2")[0])
    capfd.readouterr()
    with ThreadPoolExecutor(4) as threads:  # transformers leaves weights untied after loads that overlap
        list(threads.map(lambda _: load_pair(folder, folder), range(8)))
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), warnings.filters) == before


def test_models_load_in_the_requested_dtype_and_on_a_cpu_in_float32(tmp_path):
    folder = save_tiny(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    assert load_file(folder / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    for dtype, loaded in (("auto", torch.float32), ("float16", torch.float16), ("float64", torch.float64)):
        model = load_pair(str(folder), str(folder), device="cpu", dtype=dtype).policy
        assert model.dtype == model.hidden_states(torch.tensor([[3, 4]])).dtype == loaded


def test_padded_heads_of_different_sizes_are_truncated_to_the_tokens(folders, tmp_path):
    policy, _ = folders("llama")
    reference = save_tiny(tmp_path / "reference", vocab_size=305)
    pair = load_pair(str(policy), str(reference))
    (note,) = pair.notes
    assert note.startswith("the heads have 320 (policy) and 305 (reference) rows for 300 tokens; both")
    assert (pair.vocab_size, pair.reference.vocab_size) == (300, 300)
    one = random_sequences()[1]
    found = score(pair, [one])
    ids = [*one.prompt_ids, *one.response_ids]
    both = [double_logits(folder, ids).numpy() for folder in (policy, reference)]
    logp, logq = (log_softmax(z[:-1, :300], axis=-1) for z in both)
    wanted = (np.exp(logp) * (logp - logq)).sum(-1)
    np.testing.assert_allclose(found["kl_policy_reference"], wanted, rtol=3e-5, atol=3e-6)


def test_fewer_embeddings_or_logits_than_tokens_are_an_error(tmp_path, pair, unhooked):
    folder = save_tiny(tmp_path / "model", vocab_size=290)
    refuse(folder, "the policy .* has 290 embeddings for a tokenizer of 300 tokens, and none for 'at'; use")
    network = AutoModelForCausalLM.from_pretrained(pair.policy.path).eval()
    network.lm_head = torch.nn.Linear(network.config.hidden_size, 299, bias=False)
    with pytest.raises(ModelError, match=r"the policy .* has 299 logits"):
        live_model(network, pair.tokenizer)


def test_a_model_of_text_needs_no_rows_for_added_special_tokens_and_reads_none(tmp_path, unhooked):
    policy, larger = (save_tiny(tmp_path / str(rows), vocab_size=rows) for rows in (300, 305))
    with_image, with_padding, with_word = (tiny_tokenizer.__wrapped__() for _ in range(3))
    with_image.add_tokens(["<image>"], special_tokens=True)
    with_padding.add_special_tokens({"pad_token": "<padding>"})
    with_word.add_tokens(["<tool>"])
    for tokenizer, token in ((with_padding, "<padding>"), (with_word, "<tool>")):
        tokenizer.save_pretrained(policy)
        refuse(policy, f"has 300 embeddings for a tokenizer of 301 tokens, and none for '{token}'")
    for folder in (policy, larger):
        with_image.save_pretrained(folder)
    pair = load_pair(str(policy), str(write_gguf(policy, policy / "model.gguf")))
    assert (pair.vocab_size, pair.vocabulary, pair.policy.padding) == (300, "the whole vocabulary", None)
    logits = SimpleNamespace(vocab_size=300, context=8, path="base.kld", tokens=lambda chunk: [0])
    assert base_logits_beside(pair.policy, logits, "").vocab_size == 300
    assert "for 300 tokens; both are cut" in load_pair(str(policy), str(larger)).notes[0]
    record = {"messages": [{"role": "user", "content": "a <image>"}]}
    for read, fields in (
        (read_prompts, record),
        (read_prompts, {"prompt": "<image>"}),
        (read_responses, {"prompt": "a", "response": "<image>"}),
        (read_text, {"text": "a <image>"}),
    ):
        (path := tmp_path / "a.jsonl").write_text(json.dumps(fields))
        with pytest.raises(SourceError, match=r"line 1: .* token ids from 0 to 299 and found '300'"):
            list(read(str(path), pair))


def test_a_missing_model_is_an_error_that_names_the_revision(tmp_path, unhooked, folders):
    refuse(tmp_path / "missing", "there is no folder .*missing, and it cannot be a hub id either; .* two$")
    refuse("nobody/has-this", "nobody/has-this is not a folder here, and the hub did not give it out: ")
    (tmp_path / "file").write_text("x")
    refuse(tmp_path / "file", "is a file; give the folder")
    refuse(tmp_path, "has no config.json; give a folder in Hugging Face format")
    refuse(folders("llama")[0].parent, "has no config.json; give the folder of a model in it, such as .*/")
    (tmp_path / "reference.json").touch()
    refuse(tmp_path, "the hidden states of a reference, not its weights; give --reference-cache .* as well")
    refuse("shipped:nothing", "shipped model", error=UnknownNameError)
    refuse("nobody/has-this", "did not give it out at revision v2", revision_policy="v2")
    refuse(folders("llama")[0], "which has no revision 'main'", revision_policy="main")


def test_a_hub_id_resolves_to_the_downloaded_commit(folders, monkeypatch):
    import huggingface_hub

    asked = {}

    def snapshot_download(name, revision, **patterns):
        asked.update(name=name, revision=revision, **patterns)
        return str(folders("llama")[0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    checkpoint = find_checkpoint("some/model", "v2")
    assert (asked["name"], asked["revision"]) == ("some/model", "v2")
    assert checkpoint.revision == folders("llama")[0].name
    assert "*.bin" not in asked["allow_patterns"]


def test_pickled_weights_are_not_opened(copied, unhooked):
    (copied / "model.safetensors").unlink()
    refuse(copied, "no weights: there is no .safetensors file")
    (copied / "pytorch_model.bin").write_bytes(b"never read")
    refuse(copied, "pickled files, which can run code .* save_pretrained, which writes safetensors")


def test_damaged_files_are_errors(copied, unhooked):
    config = (copied / "config.json").read_text()
    (copied / "config.json").write_text("{")
    refuse(copied, r"config.json cannot be read as JSON: Expecting property name")
    (copied / "config.json").write_text("[]")
    refuse(copied, r"should hold a JSON object and holds a list")
    (copied / "config.json").write_text(config)
    weights = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(weights[:-100])
    refuse(copied, "model.safetensors is not a whole safetensors file .*not fully covered.; fetch or make it")


def test_missing_weights_are_an_error(copied, unhooked):
    stored = load_file(copied / "model.safetensors")
    stored["_orig_mod.norm"] = stored.pop("model.norm.weight")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, copied / "model.safetensors", metadata={"format": "pt"})
    refuse(copied, "lacks 2 of its weights, .*: model.*up_proj.weight, model.norm.*: _orig_mod.norm")


def shard(folder, stored):
    """Save tensors as two shards with an index."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    halves = [dict(list(stored.items())[part::2]) for part in (0, 1)]
    for name, half in zip(names, halves, strict=True):
        save_file(half, folder / name, metadata={"format": "pt"})
    places = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_shards_need_their_index_and_beside_one_file_have_the_same_tensors(copied, unhooked):
    stored = load_file(copied / "model.safetensors")
    shard(copied, stored)
    assert load_pair(str(copied), str(copied)).policy.parameters
    stored["model.norm.weight"] += 1
    shard(copied, stored)
    refuse(copied, "model.safetensors and model-0000.-of-00002.safetensors hold the tensor model.norm.weight")
    (copied / "model.safetensors").unlink()
    (copied / "model.safetensors.index.json").unlink()
    refuse(copied, "neither model.safetensors nor .*fetch the checkpoint again, or rename")


def test_a_class_of_own_code_that_is_not_run_and_unused_weights_give_notes(copied):
    own = {"auto_map": {"AutoModelForCausalLM": "modeling.MyModel"}, "architectures": ["MyModel"]}
    edit_json(copied / "config.json", **own)
    notes = load_pair(str(copied), str(copied)).notes
    assert any("class MyModel of its own code, and transformers' LlamaForCausalLM" in note for note in notes)
    stored = load_file(copied / "model.safetensors")
    stored["mtp.layers.0.weight"] = torch.zeros(2)
    save_file(stored, copied / "model.safetensors", metadata={"format": "pt"})
    edit_json(copied / "config.json", tie_word_embeddings=True)  # and the file has another head
    notes = load_pair(str(copied), str(copied)).notes
    assert any("1 tensors of the policy" in note and "mtp.layers.0.weight" in note for note in notes)
    assert any("has a head of its own in its files and is tied" in note for note in notes)


def test_a_missing_tokenizer_is_an_error(copied, unhooked, monkeypatch):
    for path in copied.glob("tokenizer*"):
        path.unlink()
    for kind in ("llama", "qwen2", "gemma"):  # transformers makes empty ones of the last two
        edit_json(copied / "config.json", model_type=kind)
        refuse(copied, "the policy .* has no tokenizer: there is no tokenizer.json in .*; copy")
    (copied / "tokenizer.json").write_text("{")
    refuse(copied, "the tokenizer of the policy .* cannot be loaded")
    (copied / "tokenizer.json").rename(copied / "tokenizer.model")
    monkeypatch.setattr(tokenizers, "find_spec", lambda name: None)
    refuse(copied, "cannot be loaded .*; a tokenizer.model .* needs: pip install sentencepiece")


def test_mismatched_shapes_and_architectures_that_do_not_fit_are_errors(copied, tmp_path, unhooked):
    edit_json(copied / "config.json", vocab_size=310)
    refuse(copied, "has 2 weights of other shapes than its configuration says, .*lm_head.weight.*; correct")
    edit_json(copied / "config.json", model_type="never-heard-of")
    refuse(copied, "the config.json of the policy .* cannot be loaded: .*never-heard-of")
    config = T5Config(vocab_size=320, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    tiny_tokenizer().save_pretrained(tmp_path / "t5")
    refuse(tmp_path / "t5", r"is an encoder-decoder \(t5\); kleash measures decoder-only models")


def test_remote_code_runs_only_with_trust_remote_code(copied, unhooked):
    own = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    edit_json(copied / "config.json", model_type="mine", auto_map=own)
    (copied / "mine.py").write_text(f"open({str(copied / 'ran')!r}, 'w')")
    refuse(copied, "cannot be loaded.*; add --trust-remote-code if you trust the code")
    assert not (copied / "ran").exists()


def test_unknown_dtypes_and_devices_are_errors(folders, unhooked, monkeypatch):
    policy, _ = folders("llama")
    refuse(policy, "dtype must be one of .*float64; it is 'int3'", error=OptionError, dtype="int3")
    refuse(policy, "device nowhere cannot be used here", error=CannotRunError, device="nowhere")
    refuse(policy, "cannot both be given", error=OptionError, device="cpu", device_map="auto")
    if not torch.cuda.is_available():
        refuse(policy, "device cuda cannot be used here", error=CannotRunError, device="cuda")

    def ones(*size, dtype=None, **_):  # of a device without float64, such as mps
        assert dtype is None, f"no {dtype}"
        return torch.zeros(size)

    monkeypatch.setattr(torch, "ones", ones)
    refuse(policy, "cannot be used here: .*no torch.float64", error=CannotRunError, device="cpu")


def test_a_device_map_gives_the_same_numbers(folders):
    policy, reference = folders("llama")
    found = score(load_pair(str(policy), str(reference), device_map="cpu"), random_sequences())
    wanted = columns_by_enumeration(policy, reference, random_sequences())["kl_policy_reference"]
    np.testing.assert_allclose(found["kl_policy_reference"], wanted, rtol=3e-5, atol=3e-6)


def test_different_dtypes_give_a_warning(pair, folders):
    doubles = load_pair(*map(str, folders("llama")), dtype="float64")
    (warning,) = pair_models(pair.policy, doubles.reference, ()).warnings
    assert warning == "the policy ran in torch.float32 and the reference in torch.float64; use one (--dtype)"
    assert pair.warnings == ()


def test_eos_token_ids_come_from_the_generation_config(copied):
    edit_json(copied / "generation_config.json", eos_token_id=[1, 7])
    assert load_pair(str(copied), str(copied)).policy.eos_token_ids == (1, 7)
    edit_json(copied / "tokenizer_config.json", eos_token="<pad>")
    assert "end tokens [1, 7], and its tokenizer 2: " in load_pair(str(copied), str(copied)).policy.notes[0]


def test_the_fingerprint_changes_with_any_tensor_only(folders, copied, tmp_path):
    policy, reference = folders("llama")
    print_of = find_checkpoint(str(policy)).fingerprint()
    assert print_of.startswith("sha256:") and len(print_of) == len("sha256:") + 32
    assert find_checkpoint(str(copied)).fingerprint() == print_of
    assert find_checkpoint(str(reference)).fingerprint() != print_of
    # Older versions of safetensors read where they are told to, when they are: from a file that is written over.
    stored = {name: tensor.clone() for name, tensor in load_file(copied / "model.safetensors").items()}
    for name in ("model.norm.weight", "lm_head.weight"):
        changed = {**stored, name: stored[name] + 1e-3}
        save_file(changed, copied / "model.safetensors", metadata={"format": "pt"})
        assert find_checkpoint(str(copied)).fingerprint() != print_of, name
    save_file(stored, copied / "model.safetensors", metadata={"format": "pt"})
    assert find_checkpoint(str(copied)).fingerprint() == print_of
    edit_json(copied / "config.json", rms_norm_eps=0.5)
    assert find_checkpoint(str(copied)).fingerprint() != print_of


def test_the_context_length_of_a_pair_is_the_shorter_one(pair):
    shorter = replace(pair, reference=replace(pair.reference, context_length=40))
    assert shorter.context_length == 40
    unlimited = replace(shorter, policy=replace(pair.policy, context_length=None))
    assert unlimited.context_length == 40
    assert replace(unlimited, reference=unlimited.policy).context_length is None


def test_weights_in_memory_do_not_change_with_their_file(tmp_path):
    """transformers leaves float32 weights mapped from a float32 file, which is then overwritten in place."""
    folder = save_tiny(tmp_path / "model")
    pair = load_pair(str(folder), str(folder), dtype="float32")
    ids = torch.tensor([[3, 4, 5, 6]])
    before = pair.policy.hidden_states(ids)
    with (folder / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(bytes(size - size // 2))
        file.flush()
        assert torch.equal(pair.policy.hidden_states(ids), before)
        file.truncate(100)  # a mapped weight would end the process
    assert torch.equal(pair.policy.hidden_states(ids), before)
