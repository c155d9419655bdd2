"""Logs of other programs as responses: verl, TRL, SkyRL, lm-evaluation-harness, prime-rl."""

import json
from collections import Counter
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from source_files import jsonl
from tokenizers import processors

from kleash.errors import SourceError
from kleash.models import describe_source, read_responses
from kleash.sources.dataset_formats import expand_logs
from kleash.sources.prompts import describe_forms
from kleash.sources.records import SourceRecord

PROMPT, TEXTS = "The sea", [" was calm", " was not"]
OPTIONS = {"until": ["\n"], "temperature": 0.0}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def read(pair, write):
    """Reads responses from records, and gives prompts and texts."""

    def of(*records, name="log.jsonl"):
        content = list(records) if name.endswith(".parquet") else jsonl(*records)
        sequences = list(read_responses(write(name, content), pair))
        assert all(sequence.retokenised for sequence in sequences)
        return [(sequence.prompt_text, sequence.response_text) for sequence in sequences]

    return of


def sample(**values):
    """A line of ``samples_*.jsonl``."""
    arguments = {"gen_args_0": {"arg_0": PROMPT, "arg_1": OPTIONS}}
    record = {"doc_id": 0, "doc": {"question": "Q", "answer": "A"}, "target": "A", "arguments": arguments}
    return {
        **record,
        "resps": [TEXTS],
        "filtered_resps": TEXTS[:1],
        "filter": "none",
        "exact_match": 0.0,
        **values,
    }


def test_logs_of_trainers_are_read(read):
    expected = [(PROMPT, TEXTS[0])]
    verl = {"input": PROMPT, "output": TEXTS[0], "gts": "A", "score": 1.0, "step": 3, "acc": True}
    assert read(verl) == expected
    trl = {"step": 3, "prompt": PROMPT, "completion": TEXTS[0], "reward": 1.0, "advantage": 0.5}
    assert read(trl, name="completions_00003.parquet") == expected
    skyrl = {"input_prompt": PROMPT, "output_response": TEXTS[0], "score": [0, 1.0], "stop_reason": "stop"}
    assert read({**skyrl, "env_class": "gsm8k", "env_extras": {}, "data_source": "x"}) == expected


def test_samples_of_lm_evaluation_harness_are_read(read):
    """Every repeat of a document, once for all filters, also conversations and arguments as lists."""
    both = [(PROMPT, TEXTS[0]), (PROMPT, TEXTS[1])]
    assert read(sample()) == both
    assert read(sample(filter="strict"), sample(filter="flexible")) == both
    assert read(sample(resps=[[TEXTS[0]]]), sample(doc_id=1, resps=[TEXTS[1]])) == both
    assert read(sample(arguments=[[PROMPT, OPTIONS]])) == both
    talk = {"gen_args_0": {"arg_0": [json.dumps(MESSAGES)], "arg_1": OPTIONS}}
    assert read(sample(arguments=talk))[0] == ("<s>user: Hi\nassistant: ", TEXTS[0])


@pytest.mark.parametrize(
    "values",
    [
        {"resps": [[["-0.5", "True"]]]},
        {"resps": []},
        {"arguments": {}},
        {"arguments": {"gen_args_0": {"arg_0": PROMPT, "arg_1": " Paris"}}},
        {"arguments": [[]]},
        {"arguments": {"gen_args_0": {"arg_0": PROMPT}}, "resps": [["-123.5"]]},  # a rolling log-likelihood
    ],
)
def test_samples_without_generated_text_are_refused(read, values, unhooked):
    with pytest.raises(SourceError, match="line 1: expected a sample"):
        read(sample(**values))


TRAINED = {
    "token_ids": [5, 6, 7, 8, 9, 10],
    "loss_mask": [False, False, True, True, False, True],
    "inference_logprobs": [0.0, 0.0, -1.0, -2.0, 0.0, -0.5],
    "trainer_logprobs": [0.0] * 6,
}


def test_every_run_of_drawn_tokens_of_prime_rl_is_a_response(pair, write):
    expected = [([5, 6], [7, 8], [-1, -2]), ([5, 6, 7, 8, 9], [10], [-0.5])]
    responses = list(read_responses(write("log.jsonl", jsonl(TRAINED, TRAINED)), pair))
    assert [
        (list(one.prompt_ids), list(one.response_ids), np.array(one.logp_sampled).tolist())
        for one in responses
    ] == expected * 2
    assert not any(one.retokenised for one in responses)
    # Turns of rollouts with one first prompt are one cluster.
    assert {one.prompt_id for one in responses} == {0}
    assert [one.sample_id for one in responses] == list(range(len(responses)))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**TRAINED, "loss_mask": [True]}, "expected 'loss_mask'"),
        ({**TRAINED, "loss_mask": [False] * 6}, "'loss_mask' is false at every token"),
        ({"traces": [3]}, "expected a field 'prompt'"),
        ({"prompt": "a", "response_token_ids": [6, 7], "tool_mask": [1, 0]}, "'tool_mask' leaves out tokens"),
    ],
)
def test_damaged_rollouts_of_prime_rl_are_refused(read, record, message, unhooked):
    with pytest.raises(SourceError, match=f"line 1: {message}"):
        read(record)


@pytest.mark.parametrize("begin", ["<s>", "<pad><s>"])
def test_a_prompt_that_was_decoded_with_its_begin_tokens_gets_them_once(pair, write, begin):
    tokenizer, ids = deepcopy(pair.tokenizer), {"<s>": 0, "<pad>": 2}
    template = processors.TemplateProcessing(
        f"{begin.replace('><', '> <')} $A", special_tokens=[*ids.items()]
    )
    tokenizer.backend_tokenizer.post_processor = template
    pair = replace(pair, tokenizer=tokenizer)
    records = [{"prompt": text, "response": " x"} for text in (PROMPT, begin + PROMPT, begin * 2 + PROMPT)]
    path = write("log.jsonl", jsonl(*records))
    plain, decoded, doubled = (sequence.prompt_ids for sequence in read_responses(path, pair))
    begins = tokenizer(begin, add_special_tokens=False)["input_ids"]
    assert decoded == plain and list(plain[: len(begins)]) == begins
    assert doubled == (*begins, *plain)


def test_texts_without_special_tokens_are_noted(write):
    verl = {"input": PROMPT, "output": TEXTS[0], "gts": "A", "score": 1.0, "step": 3, "acc": True}
    path = write("3.jsonl", verl)
    assert describe_source("responses", path)[-1].startswith("verl leaves special tokens out of 'input'")
    assert not any("verl" in note for note in describe_source("prompts", path))


def test_notes_count_the_prompts_of_a_log(pair, write):
    forms = Counter(one.prompt_form for one in read_responses(write("log.jsonl", sample()), pair))
    (note,) = describe_forms("responses", forms, pair.tokenizer)
    assert note.startswith("the 2 prompts are plain text, read without")


@pytest.mark.parametrize("prompt", ['[{"role" is a text', '[{"role": ' + "[" * 100_000])
def test_a_prompt_that_begins_like_messages_and_is_no_json_is_a_text(prompt):
    fields = sample(arguments={"gen_args_0": {"arg_0": prompt, "arg_1": OPTIONS}})
    records = expand_logs([SourceRecord(location="line 1", fields=fields)])
    assert [record.fields["prompt"] for record in records] == [prompt] * len(TEXTS)
