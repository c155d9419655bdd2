"""What chat templates make of conversations: the form of contents, ShareGPT's names, and refused contents."""

import copy
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from source_files import jsonl

from kleash.errors import SourceError
from kleash.jobs.reading import ReadOptions
from kleash.models import read_prompts, read_responses
from kleash.sources.chat_rendering import form_of_text, turn_end
from kleash.sources.prompts import describe_forms, tokenise_prompts

TEXT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
CONCATENATED = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
PARTS = (
    "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}"
    "{% endfor %}{{ '\n' }}{% endfor %}"
)
ATTRIBUTES = (
    "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}{{ part.text + '' }}{% endfor %}{{ '\n' }}"
    "{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if 'image' in part %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ '\n' }}{% endfor %}"
)
TEMPLATES = {
    "text": TEXT,
    "concatenated": CONCATENATED,
    "parts": PARTS,
    "attributes": ATTRIBUTES,
    "both": BOTH,
}
END = "{% if add_generation_prompt %}assistant: {% endif %}"


def part(text, **keys):
    return {"type": "text", "text": text, **keys}


def said(content, role="user", **keys):
    return {"role": role, "content": content, **keys}


@pytest.fixture
def read(pair, write):
    """Reads a record as prompts or responses, with a chat template."""

    def of(record, template=TEXT, kind=read_prompts):
        tokenizer = copy.copy(pair.tokenizer)
        tokenizer.chat_template = template + END
        return list(kind(write("a.jsonl", record), replace(pair, tokenizer=tokenizer)))

    return of


@pytest.mark.parametrize("name", TEMPLATES)
def test_contents_are_given_in_the_form_that_the_template_takes(read, name):
    """As text, as parts, or as both in one conversation, the same text is rendered."""
    conversations = (
        [said("Be kind", "system"), said("Hi there")],
        [said([part("Be kind")], "system"), said([part("Hi "), part("there", image=None)])],
        [said("Be kind", "system"), said([part("Hi there")])],
    )
    for messages in conversations:
        (prompt,) = read({"messages": messages}, TEMPLATES[name])
        assert prompt.text == "system: Be kind\nuser: Hi there\nassistant: ", messages


def test_errors_are_about_the_messages_as_they_are_and_printed_parts_are_refused(read):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEXT
    with pytest.raises(SourceError, match="line 1: the chat template refuses"):
        read({"messages": [said([part("Be")], "system"), said("Hi")]}, template)
    template = "{% for m in messages %}{% if m['content'] is not string %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    with pytest.raises(SourceError, match="line 1: the chat template prints the parts"):
        read({"messages": [said([part("Hi")])]}, template)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (said({"parts": ["Hi"]}), "expected the content of each message of 'messages' to be text, or a list"),
        (said(3), "to be text, or a list of parts such as .* and found '3'"),
        (said(["Hi"]), "and found '\"Hi\"'"),
        (said([part("Hi"), None]), "and found 'null'"),
        (said(None), "expected each message to have a 'role' and 'content'"),
        ({"role": "user", "parts": [{"text": "Hi"}]}, "expected each message to have a 'role' and 'content'"),
        ({"from": "human", "value": None}, "expected each message to have a 'role' and 'content'"),
    ],
)
def test_contents_of_other_kinds_are_refused(read, message, problem, unhooked):
    with pytest.raises(SourceError, match=f"line 1: .*{problem}"):
        read({"messages": [message]})


def test_shared_conversations_are_messages_whatever_their_column_is_called(read):
    human, gpt = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}
    for record in ({"messages": [human]}, {"prompt": [human]}, {"conversations": [human]}):
        (prompt,) = read(record)
        assert prompt.text == "user: Hi\nassistant: "
        assert prompt.messages == (said("Hi"),)
    for record in (
        {"messages": [human, gpt]},
        {"prompt": [human], "completion": [gpt]},
        {"prompt": [human], "response": [gpt]},
    ):
        (response,) = read(record, kind=read_responses)
        assert (response.prompt_text, response.response_text) == ("user: Hi\nassistant: ", "Yes\n")
    pair_of_answers = {"prompt": [human], "chosen": [gpt], "rejected": [{"from": "gpt", "value": "No"}]}
    assert [one.response_text for one in read(pair_of_answers, kind=read_responses)] == ["Yes\n", "No\n"]


def test_every_turn_of_the_assistant_is_a_response_to_what_came_before(read):
    """What tools and users say between them is no response, and the turns are one cluster."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    tool, answer = said("42", "tool"), said("It is 42", "assistant")
    expected = [
        ("user: Hi\nassistant: ", "\n"),
        ("user: Hi\nassistant: \ntool: 42\nassistant: ", "It is 42\n"),
    ]
    for record in (
        {"prompt": [said("Hi")], "completion": [call, tool, answer]},
        {"messages": [said("Hi")], "response": [call, tool, answer]},
        {"prompt": [said("Hi")], "completion": [call, tool, answer, said("Thanks")]},
    ):
        responses = read(record, kind=read_responses)
        assert [(one.prompt_text, one.response_text) for one in responses] == expected
        assert [(one.prompt_id, one.sample_id) for one in responses] == [(0, 0), (0, 1)]
    pairs = {"prompt": [said("Hi")], "chosen": [call, tool, answer], "rejected": [said("No", "assistant")]}
    responses = read(pairs, kind=read_responses)
    assert [one.response_text for one in responses] == ["\n", "It is 42\n", "No\n"]
    assert {one.prompt_id for one in responses} == {0}
    with pytest.raises(SourceError, match="line 1: expected an answer of the assistant"):
        read({"prompt": [said("Hi")], "completion": [tool]}, kind=read_responses)


IM = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\nHi<|im_end|>\nassistant: ",
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n",
        "user\nHi\nassistant\n",  # decoded without special tokens
        "<s>A text with its begin token",
    ],
)
def test_a_prompt_that_was_rendered_is_not_rendered_again(pair, write, text):
    """As logs of lm-evaluation-harness and SkyRL have them."""
    tokenizer = copy.deepcopy(pair.tokenizer)
    assert form_of_text(text, tokenizer) in ("text", "rendered text")  # by the template that it has until now
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = IM + END
    pair = replace(pair, tokenizer=tokenizer)
    path = write("a.jsonl", jsonl({"prompt": "Hi user"}, {"prompt": text}))
    plain, rendered = read_prompts(path, pair)
    assert plain.token_ids == tuple(tokenizer("Hi user")["input_ids"])
    assert rendered.token_ids == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    notes = describe_forms("prompts", Counter([plain.form, rendered.form]), tokenizer)
    assert "1 of the 2 prompts are plain text that begins as the policy's chat template does" in notes
    with pytest.raises(SourceError, match="line 2: a chat template has rendered"):
        read_prompts(path, pair, reading=ReadOptions(chat_template="apply"))


END_TOKENS = {
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "phi3": "<|end|>",
    "gptoss": "<|return|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
}
PUBLISHED = (*END_TOKENS, "gemma3", "deepseekv3", "glm4moe", "llama3_2")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_give_the_tokens_of_transformers_on_one_day(pair, name, monkeypatch):
    trl = pytest.importorskip("trl")
    day = SimpleNamespace(now=lambda: datetime(2024, 7, 26))  # in this process; templates run in another one
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", day)
    tokenizer = copy.copy(pair.tokenizer)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    policy, reference = (replace(model, context_length=None) for model in (pair.policy, pair.reference))
    pair = replace(pair, policy=policy, reference=reference, tokenizer=tokenizer)
    conversations = [[said("Hi")], [said("Hi"), said("<think>so</think>Yes", "assistant"), said("Why?")]]
    if name != "gemma":  # it has no system role
        conversations.append([said("Be kind", "system"), said("Hi")])
    for messages, prompt in zip(conversations, tokenise_prompts(conversations, pair), strict=True):
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(prompt.token_ids) == tokens
    for forms in (Counter(messages=2), Counter(text=2)):
        notes = " ".join(describe_forms("prompts", forms, tokenizer))
        assert ("given 26 July 2024" in notes) == (name in ("gptoss", "llama3_2") and "messages" in forms)


@pytest.fixture
def with_end(pair, write):
    """Reads responses with a published or written template and an end token that is special, and perhaps a stop."""

    def of(records, template, end, *, is_stop):
        tokenizer = copy.deepcopy(pair.tokenizer)
        assert turn_end(tokenizer, (1,)) == ""  # of the template and the tokens that it has until now
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", end]})
        tokenizer.chat_template = template
        stops = (tokenizer.convert_tokens_to_ids(end), 1) if is_stop else (1,)
        policy = replace(pair.policy, context_length=None, eos_token_ids=stops, vocab_size=len(tokenizer))
        reference = replace(pair.reference, context_length=None, vocab_size=len(tokenizer))
        both = replace(pair, policy=policy, reference=reference, tokenizer=tokenizer)
        return tokenizer, list(read_responses(write("a.jsonl", jsonl(*records)), both))

    return of


@pytest.mark.parametrize("is_stop", [True, False], ids=["chat", "base"])
@pytest.mark.parametrize("name", END_TOKENS)
def test_an_answer_ends_with_the_token_that_ends_its_turn(with_end, name, is_stop):
    """Up to that token its tokens are those that transformers adds to the prompt's, whatever ``finish_reason`` says."""
    trl = pytest.importorskip("trl")
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    messages, end = [said("Hi"), said("Yes. <b> ", "assistant")], END_TOKENS[name]
    reasons = ({}, {"finish_reason": "stop"}, {"finish_reason": "length"})
    records = [{"messages": messages, **reason} for reason in reasons]
    tokenizer, responses = with_end(records, template, end, is_stop=is_stop)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert whole[: len(prompt)] == prompt
    end_id = tokenizer.convert_tokens_to_ids(end)
    answer = whole[len(prompt) :]
    answer = tuple(answer[: answer.index(end_id) + 1])
    if is_stop or name != "phi3":  # it writes the stop of a base model after its own
        assert [one.response_ids for one in responses] == [answer, answer, answer[:-1]]
    else:
        assert [one.response_ids[-1] for one in responses[:2]] == [tokenizer.eos_token_id] * 2


@pytest.mark.parametrize("is_stop", [True, False], ids=["chat", "base"])
def test_an_end_token_is_counted_once(with_end, is_stop):
    """A finished response of text gets the template's end token, and one that has it no second one."""
    end, hi, start = "<|im_end|>", [said("Hi")], "<|im_start|>assistant\n"
    rendered = f"<|im_start|>user\nHi<|im_end|>\n{start}"
    records = [
        {"prompt": hi, "completion": [said("Yes<|im_end|>", "assistant")]},
        {"prompt": hi, "response": "Yes", "finish_reason": "stop"},
        {"prompt": hi, "response": "Yes<|im_end|>", "finish_reason": "stop"},
        {"prompt": rendered, "response": "Yes", "finish_reason": "stop"},
        {"prompt": "The sea", "response": "Yes", "finish_reason": "stop"},
        {"prompt": "The sea", "response": "Yes</s>", "finish_reason": "stop"},
    ]
    tokenizer, responses = with_end(records, IM + END.replace("assistant: ", start), end, is_stop=is_stop)
    yes, end_id = (
        tokenizer("Yes", add_special_tokens=False)["input_ids"],
        tokenizer.convert_tokens_to_ids(end),
    )
    assert [one.response_ids for one in responses] == [(*yes, end_id)] * 4 + [(*yes, 1)] * 2
