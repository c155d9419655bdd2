"""Checkpoints of strangers: nothing of theirs runs, and loading them is bounded and ends in a number or a sentence."""

import copy
import json
import os
import shutil
import sys
import time
from pathlib import Path

import peft
import pytest
import torch
from checkpoint_mutations import mutated
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, save_tiny, tiny_tokenizer
from transformers import AutoModelForCausalLM

from kleash.checkpoints.files import SafetensorsFiles
from kleash.errors import KleashError, ModelError
from kleash.models import load_pair
from kleash.models.heads import head_logits
from kleash.sandbox import process
from kleash.sandbox.process import TemplateError, render_chat
from kleash.sources.prompts import tokenise_prompts

pytestmark = [
    pytest.mark.usefixtures("unhooked"),
    pytest.mark.filterwarnings("ignore"),  # what PEFT and transformers say of damaged settings
]
PLANTED = "import pathlib; pathlib.Path(__file__).with_name('it-ran').touch()"


@pytest.fixture
def model(base, tmp_path):
    return shutil.copytree(base, tmp_path / "model")


@pytest.fixture
def over(adapter, tmp_path):
    return shutil.copytree(adapter, tmp_path / "over")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder where the command stands, with modules in it that say when they are imported."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("planted", "megatron", "json", "re", "transformers"):
        (folder / f"{name}.py").write_text(PLANTED)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend("")
    yield folder
    assert not (folder / "it-ran").exists(), "code of the folder ran"


def refused(folder, match, other=None, error=ModelError, **options):
    with pytest.raises(error, match=match) as raised:
        load_pair(str(folder), str(other or folder), **options)
    message = str(raised.value)
    assert "\n" not in message and len(message) < 900


def test_an_adapter_cannot_import_modules_or_lie_over_another(over, adapter, base, here):
    edit_json(over / "adapter_config.json", megatron_core="planted")
    words = r"for which the module 'planted' would be imported and run; set megatron_config to null"
    refused(over, words, base)
    edit_json(over / "adapter_config.json", megatron_config={"tensor_model_parallel_size": 1})
    refused(over, words, base)
    shutil.copy(base / "config.json", adapter.parent / "config.json")
    shutil.copy(adapter / "adapter_config.json", over)
    edit_json(over / "adapter_config.json", base_model_name_or_path=str(adapter))
    refused(over, "is an adapter itself; merge that into its base", base)


def test_a_pickled_adapter_is_not_read(over, base):
    (over / "adapter_model.safetensors").rename(over / "another.safetensors")
    refused(over, r"has no adapter_model\.safetensors; where you trust it", base)
    (over / "adapter_model.bin").write_bytes(b"never read")
    refused(over, r"only adapter_model\.bin, a pickle that can run code", base)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"attn_implementation": "someone/kernel:run"}, "whose code would be fetched and run"),
        ({"_attn_implementation_internal": "someone/kernel"}, "whose code would be fetched"),
        ({"experts_implementation": {"": "someone/kernel"}}, "whose code would be fetched"),
        ({"transformers_weights": "adapter_model.bin"}, "takes its weights from"),
        ({"transformers_weights": "../else.safetensors"}, "takes its weights from"),
        ({"num_hidden_layers": 10**9}, "layers by its settings, and its files hold [0-9]+ tensors"),
        ({"vocab_size": 10**12}, "describes in its settings a network"),
        ({"hidden_size": 10**4}, "describes in its settings a network"),
        ({"head_dim": 0}, "cannot be|other shapes|lacks"),
        ({"pad_token_id": 10**9}, "cannot be loaded"),
        ({"num_attention_heads": 0}, "cannot be|other shapes"),
        ({"max_position_embeddings": "x"}, "max_position_embeddings"),
        ({"max_position_embeddings": -2}, "max_position_embeddings"),
    ],
)
def test_settings_that_fetch_code_or_name_other_files_or_sizes_are_refused(model, settings, reason):
    edit_json(model / "config.json", **settings)
    start = time.process_time()
    refused(model, reason)
    assert time.process_time() - start < 10


def test_python_files_of_a_checkpoint_are_not_executed(model, here):
    (model / "planted.py").write_text(PLANTED)
    (model / "custom_generate").mkdir()
    (model / "custom_generate" / "generate.py").write_text(PLANTED)
    edit_json(model / "generation_config.json", custom_generate="planted", use_cache=True)
    edit_json(model / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "planted.Tokenizer"]})
    load_pair(str(model), str(model))
    edit_json(model / "tokenizer_config.json", tokenizer_class="Planted")
    refused(model, "the tokenizer of the policy .*; add --trust-remote-code if you trust the code")
    assert not list(model.rglob("it-ran"))


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "../base/model.safetensors"}, "which is no .safetensors file in the same folder"),
        ({"a": "pytorch_model.bin"}, "which is no .safetensors file in the same folder"),
        ({"a": ["x"]}, "which is no .safetensors file in the same folder"),
        ({"a": "absent.safetensors"}, "which is no .safetensors file in the same folder"),
        ([], "has no weight_map"),
    ],
)
def test_shards_outside_the_folder_are_refused(model, weight_map, reason):
    (model / "model.safetensors").rename(model / "other.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (model / "model.safetensors.index.json").write_text(index)
    refused(model, reason)


def header(**entries):
    text = entries.pop("text", None) or json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
LATER = {**F32, "data_offsets": [8, 16]}
TWICE = f'{{"a":{json.dumps(F32)},"a":{json.dumps(LATER)}}}'.encode()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (header(a=F32) + bytes(8), None),
        (header(a=F32, b={"dtype": "F32", "shape": [0], "data_offsets": [8, 8]}) + bytes(8), None),
        (header(text=b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "recursion"),
        (header(text=b'{"a":{},"a":{}}'), "invalid JSON"),
        (header(text=TWICE) + bytes(16), "offset"),
        (header(a=F32, b=F32) + bytes(8), "invalid offset"),
        (header(a={**F32, "data_offsets": [-8, 0]}), "invalid value"),
        (header(a={**F32, "data_offsets": [8, 0]}) + bytes(8), "invalid offset"),
        (header(a=LATER) + bytes(16), "invalid offset"),
        (header(a={**F32, "shape": [3]}) + bytes(8), "invalid shape"),
        (header(a={**F32, "shape": [2**40, 2**40]}) + bytes(8), "overflow"),
        (header(a={**F32, "dtype": "F99"}) + bytes(8), "unknown variant"),
        (header(a={**F32, "shape": [-1, -2]}) + bytes(8), "invalid value"),
        (header(a=F32) + bytes(9), "not fully covered"),
        (header(a=F32) + bytes(7), "not fully covered"),
        ((2**63).to_bytes(8, "little") + b"{}", "too large"),
        (b"abc", "too small"),
        (header(text=b"[]"), "invalid JSON"),
    ],
)  # fmt: skip
def test_headers_of_safetensors_are_checked(tmp_path, raw, reason):
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    if reason is None:
        stored = SafetensorsFiles([path])
        assert load_file(path)["a"].tolist() == stored.read("a").tolist() == [0, 0]
        assert (stored["a"].kind, stored["a"].shape, stored["a"].num_bytes) == ("F32", (2,), 8)
        return
    with pytest.raises(ModelError, match=f"x.safetensors is not a whole safetensors file .*{reason}"):
        SafetensorsFiles([path])


def test_a_weights_file_is_a_file_and_bounds_the_computed_buffers(model, tmp_path):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").mkdir()
    refused(model, "is not a whole safetensors file")
    folder = save_tiny(tmp_path / "gpt2", "gpt2")
    stored = load_file(folder / "model.safetensors")
    stored["transformer.wpe.weight"] = torch.zeros(40_000, 32)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", n_positions=10**12)
    refused(folder, "describes in its settings a network of 3.* weights and tables of")


def test_a_context_length_of_minus_1_is_no_limit(model):
    edit_json(model / "config.json", max_position_embeddings=-1)
    assert load_pair(str(model), str(model)).policy.context_length is None


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        *(
            ("generation_config.json", {"eos_token_id": end}, "is no token id; correct|cannot be loaded")
            for end in ("x", 1.5, [[1]], True, [1, None])
        ),
        *(("tokenizer_config.json", {"model_max_length": n}, "cannot be loaded") for n in ("x", [1])),
    ],
)
def test_invalid_end_tokens_and_lengths_are_refused(model, name, settings, reason):
    edit_json(model / name, **settings)
    refused(model, reason)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("end", "kept", "named"), [(10**9, (), "1000000000"), (-1, (), "-1"), ([7, 320, 1], (7, 1), "320")]
)
def test_an_end_token_that_does_not_exist_is_a_note(model, name, end, kept, named):
    """transformers loads such a checkpoint and ends no response with it."""
    edit_json(model / name, eos_token_id=end)
    if name == "config.json":
        (model / "generation_config.json").unlink()
    assert AutoModelForCausalLM.from_pretrained(model).generation_config.eos_token_id == end
    pair = load_pair(str(model), str(model))
    assert pair.policy.eos_token_ids == kept
    (note,) = (note for note in pair.notes if "no response ends" in note)
    assert f"token {named}, and has the token ids 0 to 319" in note


def test_numbers_that_size_nothing_are_not_judged(model, over):
    settings = {"train_flops": 1e24, "training": {"tokens_seen": 1e15, "hidden_size": 10**12}}
    settings |= {"num_hidden_layers_of_teacher": 10**9, "bos_token_id": 10**9, "loss": float("nan")}
    before = load_pair(str(over), str(model))
    edit_json(model / "config.json", **settings)
    edit_json(over / "adapter_config.json", **settings)
    after = load_pair(str(over), str(model))
    ids = torch.tensor([[3, 4, 5]])
    for role in ("policy", "reference"):
        states = [getattr(pair, role).hidden_states(ids) for pair in (before, after)]
        assert torch.equal(*states)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * 10**10 }}", "it takes more than 1024 MiB of memory"),
        ("{{ 'a'.ljust(10**10) }}", "it takes more than 1024 MiB of memory"),
        ("{% for i in range(90000) %}{{ 'a' * 300 }}{% endfor %}", "its text is longer than 16777216"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for", "unexpected"),
    ],
)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited on Linux")
def test_chat_templates_have_limits_of_length_and_memory(template, reason):
    refuse_template(template, reason)


def refuse_template(template, reason):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    with pytest.raises(TemplateError, match=reason):
        render_chat(tokenizer, [{"role": "user", "content": "hello"}])


def test_sandboxed_templates_agree_with_transformers(base, here):
    process.SANDBOX.stop()  # so that it is started from a folder with modules in it
    tokenizer = tiny_tokenizer()
    talk = [
        {"role": "user", "content": "hello 🙂 é\n"},
        {"role": "assistant", "content": "good day", "tool_calls": None},
        {"role": "user", "content": "<s> 'quoted' {{ x }}"},
    ]
    for messages, options in (
        (talk, {"add_generation_prompt": True}),
        (talk[:1], {}),
        (talk[:2], {"continue_final_message": True}),
    ):
        wanted = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        assert render_chat(tokenizer, messages, **options) == wanted
    pair = load_pair(str(base), str(base))
    (prompt,) = tokenise_prompts([talk], pair)
    assert prompt.text == tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    module = sys.modules["transformers.tokenization_utils_base"]
    assert module.render_jinja_template is not process._render


@pytest.mark.parametrize("kind", ["base", "adapter"])
def test_random_damage_gives_an_error_or_the_correct_result(base, adapter, tmp_path, kind):
    """More of it: KLEASH_MUTATIONS=1000."""
    torch.manual_seed(0)
    ids = torch.randint(3, 300, (1, 30))
    numbers = 0
    for seed in range(int(os.environ.get("KLEASH_MUTATIONS", "14"))):
        source = {"base": base, "adapter": adapter}[kind]
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        what = mutated(source, tmp_path / "damaged", seed)
        try:
            pair = load_pair(str(tmp_path / "damaged"), str(base))
        except KleashError as error:
            assert "\n" not in str(error) and len(str(error)) < 900, what
            continue
        numbers += 1
        network = AutoModelForCausalLM.from_pretrained(base if kind == "adapter" else tmp_path / "damaged")
        if kind == "adapter":
            network = peft.PeftModel.from_pretrained(network, tmp_path / "damaged")
        with torch.no_grad():
            truth = network.float().eval()(input_ids=ids).logits[..., : pair.vocab_size].log_softmax(-1)
            found = head_logits(pair.policy.hidden_states(ids), pair.policy.head).log_softmax(-1)
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-3, equal_nan=True, msg=what)
    assert numbers


def test_a_chat_template_that_does_not_end_is_refused(monkeypatch):
    """By a worker that may compute for a second, since all else may take longer on a slow machine."""
    monkeypatch.setattr(process, "CPU_SECONDS", 1)
    process.SANDBOX.stop()
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    refuse_template(loop, "it does not end within 1 s")
    process.SANDBOX.stop()
