"""Prompts, texts and responses: what is read, and where a source is wrong."""

import gzip
import json
import os
from dataclasses import replace
from hashlib import blake2b
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given as examples
from hypothesis import strategies as st
from source_files import jsonl
from tiny_models import SENTENCES, metaspace_tokenizer, tiny_tokenizer
from tokenizers import Regex, models, normalizers, pre_tokenizers

from kleash.engines.base_logits import chunk_sequence
from kleash.errors import OptionError, SourceError
from kleash.models import Prompt, read_prompts, read_responses, read_text
from kleash.models.generation import _Response
from kleash.sources.documents import count_documents, window_spans
from kleash.sources.sequences import hash_tokens


def ids(text, special=False):
    return tuple(tiny_tokenizer()(text, add_special_tokens=special)["input_ids"])


def test_prompts_of_jsonl_plain_text_and_messages(pair, write):
    lines = [{"prompt": "The sea"}, {"messages": [{"role": "user", "content": "Hi"}]}]
    first, second = read_prompts(write("a.jsonl", jsonl(*lines)), pair)
    assert (first.prompt_id, first.text, first.token_ids) == (0, "The sea", ids("The sea", special=True))
    assert first.token_ids[0] == 0
    assert second.text == "<s>user: Hi\nassistant: "
    assert second.token_ids == (0, *ids("user: Hi\nassistant: "))
    assert second.location.endswith("a.jsonl, line 2")
    plain = read_prompts(write("a.txt", "The sea\r\n\r\n  was \n"), pair)
    assert [one.text for one in plain] == ["The sea", "  was "]
    assert plain[0].token_ids == first.token_ids
    assert [one.location.rsplit(" ", 1)[1] for one in plain] == ["1", "3"]


def test_copies_of_a_prompt_are_counted_by_a_hash_that_is_the_same_on_every_machine(pair, write):
    prompts = read_prompts(write("a.txt", "a\nb\na\na\n"), pair)
    assert [one.copy for one in prompts] == [0, 0, 1, 2]
    assert len({one.prompt_hash for one in prompts}) == 2
    assert prompts[0].prompt_hash == prompts[3].prompt_hash == hash_tokens(prompts[0].token_ids)
    expected = blake2b(bytes([1, *[0] * 7, 2, *[0] * 7, 44, 1, *[0] * 6]), digest_size=8)
    assert hash_tokens((1, 2, 300)) == expected.hexdigest()


def test_an_appended_end_token_is_removed_from_a_prompt(pair, write):
    class Ending:
        eos_token_id = 1

        def __call__(self, text, add_special_tokens, verbose):
            return {"input_ids": [*ids(text), *([1] if add_special_tokens else [])]}

    ending = replace(pair, tokenizer=Ending())
    assert read_prompts(write("a.txt", "The sea"), ending)[0].token_ids == ids("The sea")


MESSAGE = {"role": "user", "content": "x"}
BAD_PROMPTS = {
    "no field": ('{"text": "x", "id": 3}',
        "line 1: expected a field 'prompt' or 'messages' and found 'text', 'id'"),
    "a number": ('{"prompt": 3}', "expected 'prompt' to be text or a list of messages and found '3'"),
    "empty": ('{"prompt": ""}', "line 1: the prompt is empty"),
    "both": (json.dumps({"prompt": "x", "messages": [MESSAGE]}), "'prompt' or 'messages' and found both"),
    "no messages": ('{"messages": []}', "'messages' is empty"),
    "not messages": ('{"messages": "x"}', "expected 'messages' to be a list of messages"),
    "unknown id": ('{"prompt_token_ids": [3, 320]}', "token ids from 0 to 319 and found '320'"),
    "no ids": ('{"prompt_token_ids": []}', "'prompt_token_ids' is empty"),
    "half": (r'{"prompt": "Oh \ud83d"}', r"line 1: 'prompt' holds half a character, .ud83d, at place 3"),
    "half in a message": (r'{"messages": [{"role": "user", "content": "\ude00"}]}',
        r"line 1: 'messages' holds half a character, .ude00"),
    "nested": ("[" * 100_000, "line 1: expected a JSON object and found .* nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_invalid_prompts_are_errors_with_their_line(pair, write, content, message, unhooked):
    with pytest.raises(SourceError, match=message):
        read_prompts(write("a.jsonl", content), pair)


def test_unreadable_files_are_errors(pair, write, unhooked):
    for name, message in (
        (
            write("a.jsonl.gz", gzip.compress(b'{"text": "x"}')[:-9]),
            "a.jsonl.gz cannot be read: Compressed file ended",
        ),
        (
            "What is the capital of France? " * 20,
            "'What is .*…' cannot be read .File name too long.*; texts themselves",
        ),
        ("a\0b", "cannot be read .*; give the name of a file"),
        (os.devnull, f"{os.devnull} is a pipe or device; give a file of"),
    ):
        for read in (read_prompts, read_text):
            with pytest.raises(SourceError, match=message):
                list(read(name, pair))


def test_messages_need_a_chat_template_that_accepts_them(pair, write, unhooked):
    name = write("a.jsonl", jsonl({"messages": [MESSAGE]}))
    bare = tiny_tokenizer.__wrapped__()
    bare.chat_template = None
    with pytest.raises(SourceError, match=r"line 1: a chat template renders its 'messages'.*template raw"):
        read_prompts(name, replace(pair, tokenizer=bare))
    bare.chat_template = "{# nothing #}"
    with pytest.raises(SourceError, match="makes nothing of the messages"):
        read_prompts(name, replace(pair, tokenizer=bare))


def test_documents_of_plain_text_end_at_a_blank_line(pair, write):
    windows = list(read_text(write("a.txt", "\n\nThe sea\nwas\n\n \ncalm and\n"), pair))
    assert [one.prompt_id for one in windows] == [0, 1]
    assert windows[0].prompt_ids + windows[0].response_ids == ids("The sea\nwas", special=True)
    assert windows[0].prompt_ids == (0,)
    assert windows[1].location.endswith("line 7")
    assert windows[1].response_text == "calm and"


def test_documents_of_jsonl(pair, write):
    records = [{"text": "The sea\n\nwas"}, {"text": ""}, {"text": "calm"}]
    windows = list(read_text(write("a.jsonl", jsonl(*records)), pair))
    assert [one.prompt_id for one in windows] == [0, 2]
    assert windows[0].response_text == "The sea\n\nwas"
    assert [one.prompt_id for one in read_text(write("a.jsonl", jsonl(*records)), pair, limit=2)] == [0]
    assert count_documents(write("a.jsonl", jsonl(*records))).total() == 3
    assert count_documents(write("a.jsonl", jsonl(*records)), limit=2).total() == 2
    assert count_documents(write("a.txt", "a\nb\n\nc")).total() == 2
    with pytest.raises(SourceError, match="line 1: expected a field 'text' and found 'prompt'"):
        list(read_text(write("b.jsonl", jsonl({"prompt": "x"})), pair))
    with pytest.raises(SourceError, match="holds no document of two tokens or more"):
        list(read_text(write("c.jsonl", jsonl({"text": ""})), pair))


@examples(st.integers(0, 60), st.integers(1, 12), st.integers(1, 12))
def test_every_token_but_the_first_is_scored_once(tokens, window, stride):
    stride = min(stride, window)
    found = list(window_spans(tokens, window, stride))
    scored = [token for _, first, stop in found for token in range(first, stop)]
    assert scored == list(range(1, tokens))
    for number, (start, first, stop) in enumerate(found):
        assert start == number * stride
        assert start < first < stop <= tokens
        assert stop - start - 1 <= window  # tokens that are read
        assert number == 0 or first - start >= window - stride + 1


@pytest.mark.parametrize("stride", [12, 1])
def test_windows_of_one_document(pair, write, stride):
    text = " ".join(SENTENCES[:2])
    tokens = ids(text, special=True)
    windows = list(read_text(write("a.txt", text), pair, window=16, stride=stride))
    assert [one.sample_id for one in windows] == list(range(len(windows)))
    assert sum((one.response_ids for one in windows), ()) == tokens[1:]
    for number, one in enumerate(windows):
        whole = one.prompt_ids + one.response_ids
        assert whole == tokens[stride * number : stride * number + 17]
        assert one.num_input_tokens <= 16
        assert one.prompt_hash == hash_tokens(whole)
        assert len(one.prompt_ids) == (17 - stride if number else 1)


def test_texts_of_tokens_join_where_the_tokenizer_drops_a_first_space(write):
    tokenizer = metaspace_tokenizer()
    tokenizer.backend_tokenizer.model = models.WordLevel({"▁The": 0, "▁sea": 1, "▁!": 2}, "▁!")
    tokenizer.clean_up_tokenization_spaces = True
    limits = SimpleNamespace(tokenizer=tokenizer, vocab_size=3, context_length=None, eos_token_ids=())
    record = {"prompt_token_ids": [0, 1], "response_token_ids": [2]}
    found = [*read_text(write("a.txt", "The sea !"), limits)]
    found += read_responses(write("a.jsonl", jsonl(record)), limits)
    found += [chunk_sequence(0, np.arange(3), None, tokenizer)]
    prompt = Prompt(prompt_id=0, token_ids=(0, 1), text="The sea", prompt_hash="")
    found += [_Response(prompt=prompt, sample=0, max_tokens=1, token_ids=[2]).as_sequence(tokenizer)]
    assert [one.prompt_text + one.response_text for one in found] == ["The sea !"] * 4


def test_a_response_has_no_space_that_only_the_tokenizer_puts_before_a_text(write):
    """Llama 2's puts one before each; where nothing separates it from its prompt, decoding dropped its space."""
    tokenizer = metaspace_tokenizer()
    backend, spaces = tokenizer.backend_tokenizer, [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(spaces)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[a-zA-Z]+|."), "isolated")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}?{% endfor %}"
    limits = SimpleNamespace(tokenizer=tokenizer, vocab_size=6, context_length=None, eos_token_ids=())
    texts = [("The", " was"), ("The", "was"), ("The?", "was"), ("The\n", " was"), ("The\n", "was")]
    records = [{"prompt": prompt, "response": response} for prompt, response in texts]
    records += [{"messages": [MESSAGE | {"content": "The"}, {"role": "assistant", "content": "was"}]}]
    found = read_responses(write("a.jsonl", jsonl(*records)), limits)
    assert [one.response_ids for one in found] == [(2,), (2,), (2,), (2,), (5,), (5, 3)]


def test_invalid_windows_are_errors_at_once_and_invalid_lines_when_they_are_read(pair, write, unhooked):
    name = write("a.txt", "The sea")
    for options, message in (
        ({"window": 129}, "a window of 129 tokens is more than the 128 that the models read"),
        ({"window": 8, "stride": 9}, "a stride of 9 tokens does not suit a window of 8; give 1 to 8"),
        ({"window": 8, "stride": 0}, "a stride of 0"),
    ):
        with pytest.raises(OptionError, match=message):
            read_text(name, pair, **options)
    windows = read_text(write("a.jsonl", '{"text": "The sea"}\nbroken'), pair)
    assert next(windows).response_text == "The sea"
    with pytest.raises(SourceError, match="line 2"):
        next(windows)


def test_responses_are_read_as_ids_and_as_text_with_the_ids_that_they_state(pair, write):
    sea = {"prompt_token_ids": ids("The sea", special=True), "prompt": "ignored"}
    records = [
        {"prompt": "The sea", "response": " was calm", "finish_reason": "stop", "temperature": 0.7},
        {**sea, "completion": " was calm", "finish_reason": "length"},
        {"prompt_token_ids": [0, 9], "prompt": "ignored", "response_token_ids": [5, 6], "response": "shown"},
        {"prompt": "The sea", "response_token_ids": [5, 6], "logprobs": [-85.0, -6.0]},
    ]
    one, two, three, four = read_responses(write("a.jsonl", jsonl(*records)), pair)
    assert one.prompt_ids == ids("The sea", special=True)
    assert one.response_ids == (*ids(" was calm"), 1)
    assert (one.retokenised, one.finish_reason, one.temperature) == (True, "stop", 0.7)
    assert two.response_ids == ids(" was calm")
    assert (three.prompt_ids, three.response_ids, three.response_text) == ((0, 9), (5, 6), "shown")
    assert (three.retokenised, three.logp_sampled, three.finish_reason) == (False, None, None)
    np.testing.assert_array_equal(four.logp_sampled, np.float32([-85.0, -6.0]))
    numbers = [(found.prompt_id, found.sample_id) for found in (one, two, three, four)]
    assert numbers == [(0, 0), (0, 1), (1, 0), (0, 2)]
    assert one.prompt_hash == hash_tokens(one.prompt_ids)
    base = {"prompt": "x", "response": "y"}
    records = [{**base, "prompt_id": 7, "sample_id": sample} for sample in (4, 0, None, 3)]
    found = list(read_responses(write("a.jsonl", jsonl(*records)), pair, limit=3))
    assert [(one.prompt_id, one.sample_id) for one in found] == [(7, 4), (7, 0), (7, 1)]


BASE = {"prompt": "The sea", "response_token_ids": [5, 6]}


def test_texts_as_prompt_ids_are_numbered(pair, write):
    """As data sets of preferences have them, whose prompt_id is a hash."""
    ids = ("b", "a", "b", "")
    records = [{**BASE, "prompt_id": each} for each in ids]
    found = read_responses(write("a.jsonl", jsonl(*records)), pair)
    assert [(one.prompt_id, one.sample_id) for one in found] == [(0, 0), (1, 0), (0, 1), (2, 0)]
    table = "prompt,response,prompt_id\nThe sea,was,b\nRain,was,a\nThe sea,is,b\n"
    found = read_responses(write("a.csv", table), pair)
    assert [(one.prompt_id, one.sample_id) for one in found] == [(0, 0), (1, 0), (0, 1)]
    records = [{**BASE, "prompt_id": 1}, {**BASE, "prompt": "Rain"}, {**BASE, "prompt": "Wind"}]
    assert [one.prompt_id for one in read_responses(write("a.jsonl", jsonl(*records)), pair)] == [1, 0, 2]


TURNS = [{"role": role, "content": "Yes"} for role in ("assistant", "user", "assistant")]
BAD_RESPONSES = {
    "no response": ([{"prompt": "x"}],
        "expected a field 'response' or 'response_token_ids' and found 'prompt'"),
    "no prompt": ([{"response": "x"}], "expected a field 'prompt' or 'messages' and found 'response'"),
    "half": ([{**BASE, "response": "Oh \ude00"}],
        r"line 1: 'response' holds half a character, .ude00, at place 3"),
    "unknown id": ([{**BASE, "response_token_ids": [5, -1]}], "from 0 to 319 and found '-1'"),
    "too long": ([{**BASE, "response_token_ids": [5] * 128}],
        "the prompt with its response is 13[0-9] tokens long and the models read at most 128"),
    "logprobs": ([{**BASE, "logprobs": [-1.0]}], "found 1; give one for each of 'response_token_ids'"),
    "one too low": ([{**BASE, "logprobs": [-86.0, 0.0]}], "too low to be of drawn tokens .down to -86, -86 in"),
    "low in all": ([{**BASE, "logprobs": [-50.0, -50.0]}], "too low to be of drawn .*down to -50, -100 in all"),
    "text": ([{**BASE, "logprobs": "x"}], "expected 'logprobs' to be a list of numbers"),
    "one id for two": ([{**BASE, "prompt_id": 1}, {**BASE, "prompt": "Rain", "prompt_id": 1}],
        r"line 2: 'prompt_id' '1' stands for another prompt at .*line 1"),
    "one id for two conversations": (
        [{"prompt": [TURNS[1]] * number, "completion": TURNS, "prompt_id": 1} for number in (1, 2)],
        r"line 2: 'prompt_id' '1' stands for another prompt at .*line 1"),
    "half an id": ([{**BASE, "prompt_id": "\ude00"}], "line 1: 'prompt_id' holds half a character"),
    "twice": ([{**BASE, "sample_id": 2}] * 2, "line 2: sample 2 of prompt 0 has been there before"),
    "finish": ([{**BASE, "finish_reason": 1}], "expected 'finish_reason' to be text"),
}  # fmt: skip


@pytest.mark.parametrize(("records", "message"), BAD_RESPONSES.values(), ids=BAD_RESPONSES)
def test_invalid_responses_are_errors_with_their_line(pair, write, records, message, unhooked):
    with pytest.raises(SourceError, match=message):
        list(read_responses(write("a.jsonl", jsonl(*records)), pair))


def test_responses_in_plain_text_are_an_error(pair, write, unhooked):
    with pytest.raises(SourceError, match="is read as plain text"):
        list(read_responses(write("a.txt", "hello"), pair))
    with pytest.raises(SourceError, match="entry 1: expected a field 'response'"):
        list(read_responses(write("a.json", '["hello"]'), pair))
    with pytest.raises(SourceError, match=r"holds no response$"):
        list(read_responses(write("a.jsonl", "\n"), pair))


def test_a_response_may_be_as_long_as_the_context_if_that_has_a_limit(pair, write):
    prompt = len(ids("The sea", special=True))
    record = {**BASE, "response_token_ids": [5] * (129 - prompt)}
    (one,) = read_responses(write("a.jsonl", jsonl(record)), pair)
    assert one.num_input_tokens == 128
    policy, reference = (replace(model, context_length=None) for model in (pair.policy, pair.reference))
    endless = replace(pair, policy=policy, reference=reference)
    (one,) = read_text(write("a.txt", " ".join(SENTENCES)), endless)
    assert len(one.response_ids) > 128


def test_padded_responses_are_refused_after_the_last(pair, write):
    """Padding would be scored like tokens that were drawn; the pad token here is one that ends responses."""
    pad = pair.tokenizer.pad_token_id
    rows = [
        {
            "prompt": "The sea",
            "response_token_ids": [5, 6, 7 + row, *[pad] * 4],
            "logprobs": [-1.5, -0.25 * row, -2.0, *[0.0] * 4],
        }
        for row in range(6)
    ]
    cut = [
        {**row, "response_token_ids": row["response_token_ids"][:3], "logprobs": row["logprobs"][:3]}
        for row in rows
    ]
    for path in (
        write("padded.jsonl", jsonl(*rows)),
        write("unknown.jsonl", jsonl(*({**row, "logprobs": None} for row in rows))),
        write("left.jsonl", jsonl({**rows[0], "prompt_token_ids": [*[pad] * 4, 5, 6], "response": " x"})),
        write("tenth.jsonl", jsonl(*rows[:2], *cut * 3)),
    ):
        with pytest.raises(SourceError, match="padding"):
            list(read_responses(path, pair))
    rare = write("rare.jsonl", jsonl(*rows[:2], *cut * 3, cut[0]))
    assert len(list(read_responses(rare, pair))) == 21
    loop = [{**row, "response_token_ids": [5, 6, 7 + index, *[9] * 4]} for index, row in enumerate(rows)]
    assert len(list(read_responses(write("loop.jsonl", jsonl(*loop)), pair))) == 6
