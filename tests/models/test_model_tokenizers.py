"""When two tokenizers are the same, and what is said when they are not."""

import json
from copy import deepcopy

import pytest
from tiny_models import metaspace_tokenizer, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from kleash.checkpoints.resolution import Checkpoint
from kleash.errors import ModelError
from kleash.models.tokenizers import (
    compare_tokenizers,
    load_tokenizer,
    load_tokenizers,
    token_count,
    token_texts,
)


def changed(**parts):
    """The tiny tokenizer with some entries of its JSON's model replaced."""
    ours = tiny_tokenizer()
    content = json.loads(ours.backend_tokenizer.to_str())
    for name, change in parts.items():
        content[name] = change(content[name])
    return wrapped(Tokenizer.from_str(json.dumps(content)))


def wrapped(backend, **names):
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **names}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    tokenizer.chat_template = tiny_tokenizer().chat_template
    return tokenizer


@pytest.mark.parametrize("changed_file", [None, "config.json", "chat_template.jinja", "tokenizer.json"])
def test_a_tokenizer_of_equal_files_is_loaded_once(tmp_path, changed_file):
    checkpoints = {}
    for role in ("policy", "reference"):
        folder = tmp_path / role
        tiny_tokenizer(300 if role == "policy" or changed_file != "tokenizer.json" else 290).save_pretrained(
            folder
        )
        settings = {"model_type": "llama", "vocab_size": 300}
        if role == "reference" and changed_file == "config.json":
            settings["vocab_size"] = 320
        (folder / "config.json").write_text(json.dumps(settings))
        if role == "reference" and changed_file == "chat_template.jinja":
            (folder / "chat_template.jinja").write_text("{{ messages }}")
        checkpoints[role] = Checkpoint(role=role, name=role, folder=folder)
    if changed_file == "tokenizer.json":
        with pytest.raises(ModelError, match="differ in 10 tokens"):
            load_tokenizers(checkpoints, False)
        return
    tokenizers, notes = load_tokenizers(checkpoints, False)
    has_other_template = changed_file == "chat_template.jinja"
    assert (tokenizers["policy"] is tokenizers["reference"]) != has_other_template
    assert any("chat templates differ" in note for note in notes) == has_other_template


def test_an_adapter_without_a_vocabulary_has_the_tokenizer_of_its_base(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tiny_tokenizer().save_pretrained(base)
    adapter.mkdir()
    (adapter / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    loaded = load_tokenizer(Checkpoint(name="a", folder=base, adapter=adapter), False)
    assert loaded.get_vocab() == tiny_tokenizer().get_vocab()


def test_different_vocabularies_are_an_error_with_the_first_differences(unhooked):
    smaller = tiny_tokenizer(290)
    gone = sorted(
        set(tiny_tokenizer().get_vocab().items()) - set(smaller.get_vocab().items()), key=lambda x: x[1]
    )
    with pytest.raises(ModelError) as raised:
        compare_tokenizers(tiny_tokenizer(), smaller)
    message = str(raised.value)
    assert "differ in 10 tokens (the policy's has 300, the reference's 290)" in message
    for token, number in gone[:3]:
        assert f"{token!r} is {number} in the policy's and absent in the reference's" in message
    assert repr(gone[3][0]) not in message
    ids = tiny_tokenizer().get_vocab()
    swapped = ids | {"Ġthe": ids["Ġand"], "Ġand": ids["Ġthe"]}
    with pytest.raises(ModelError, match=r"differ in 2 tokens .*'Ġand' is [0-9]+ in the policy's and [0-9]"):
        compare_tokenizers(changed(model=lambda model: {**model, "vocab": swapped}), tiny_tokenizer())


def test_different_special_tokens_merges_and_another_tokenisation_of_a_probe_are_errors(unhooked):
    marked, plain = deepcopy(tiny_tokenizer()), deepcopy(tiny_tokenizer())
    marked.add_tokens([AddedToken("<tool>", special=True)])
    plain.add_tokens([AddedToken("<tool>", special=False)])
    with pytest.raises(ModelError, match=r"differ in 1 special tokens .*'<tool>' is 300"):
        compare_tokenizers(marked, plain)

    def turned(model):
        return {**model, "merges": [*model["merges"][:-2], model["merges"][-1], model["merges"][-2]]}

    with pytest.raises(ModelError, match="differ in 2 merges"):
        compare_tokenizers(tiny_tokenizer(), changed(model=turned))
    lower = deepcopy(tiny_tokenizer().backend_tokenizer)
    lower.normalizer = normalizers.Lowercase()
    with pytest.raises(ModelError, match=r"cut text differently: .The quick brown fox"):
        compare_tokenizers(tiny_tokenizer(), wrapped(lower))


def test_differences_that_do_not_matter_give_notes():
    backend = deepcopy(tiny_tokenizer(bos=False).backend_tokenizer)
    backend.normalizer = normalizers.Replace("never seen in any text", "x")
    other = wrapped(backend, eos_token="<pad>")
    other.chat_template = "{{ messages }}"
    idle, end, around, template = compare_tokenizers(tiny_tokenizer(), other)
    assert idle == "the tokenizers' normalizer are written differently, but cut 6 awkward texts alike"
    assert end == "the policy's eos_token is '</s>' and the reference's '<pad>'; the policy's is used"
    assert "special tokens around a text: 'a' is [0, 67] in the policy's and [67] in the" in around
    assert template == "the chat templates differ; messages are written with the policy's for both"


def test_a_class_that_cuts_texts_otherwise_than_the_file_gives_a_note(tmp_path):
    changed(pre_tokenizer=lambda part: {**part, "add_prefix_space": True}).save_pretrained(tmp_path)
    for kind, count in (("llama", 0), ("qwen2", 1)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        _, notes = load_tokenizers({"policy": Checkpoint(name=kind, folder=tmp_path)}, False)
        assert ["its class Qwen2Tokenizer, which cuts texts" in note for note in notes] == [True] * count


def test_token_texts_decode_single_tokens():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("The sea", add_special_tokens=False)["input_ids"]
    assert "".join(token_texts(tokenizer, ids)) == "The sea"
    assert token_texts(tokenizer, [1, 300, 319]) == ["</s>", "<token 300>", "<token 319>"]
    assert token_count(tokenizer) == 300
    assert token_texts(metaspace_tokenizer(), [0, 1, 2]) == [" The", " sea", " was"]
