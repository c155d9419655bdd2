"""The data set formats of TRL: which fields of a record are prompt, response and text.

    prompt only            {"prompt": P}
    prompt and completion  {"prompt": P, "completion": C}
    preference             {"prompt": P, "chosen": C, "rejected": C}; without "prompt", P is the common beginning
    language modelling     {"text": T} or {"messages": M}

P and C are texts or lists of messages. Reference: "Dataset formats and types",
https://huggingface.co/docs/trl/dataset_formats.

The logs of verl ("input", "output"), TRL ("prompt", "completion") and SkyRL ("input_prompt", "output_response") need no
reader: their columns are among the usual names. lm-evaluation-harness writes a line for each document and filter:

    {"doc_id": 0, "filter": "none", "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": options}},
     "resps": [[text, ...]], "filtered_resps": [...]}

prime-rl writes a line for each training sequence:

    {"token_ids": [...], "loss_mask": [...], "inference_logprobs": [...]}

References: ``EvaluationTracker.save_results_samples``, https://github.com/EleutherAI/lm-evaluation-harness;
``TokenExporter``, https://github.com/PrimeIntellect-ai/prime-rl.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, takewhile
from typing import Any, NamedTuple

from kleash.sources.columns import as_messages
from kleash.sources.records import (
    SourceRecord,
    get_field,
    is_list_of,
    parse_unique_json,
    show_value,
    without_nulls,
)

MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of records whose text refers to something that is no text."""
MEDIA_PARTS = (*MEDIA_COLUMNS, "image_url", "input_audio")
"""Keys of parts of a message that are no text."""
CONTENTS = ("content", "tool_calls", "function_call", "reasoning_content", "thinking", "reasoning")
"""Keys of a message, one of which must have a value."""
TextOrMessages = str | list[dict[str, Any]]
"""A text, or a list of messages."""


class Preference(NamedTuple):
    """A pair of answers to one prompt; all three are texts, or all three are lists of messages."""

    prompt: TextOrMessages
    chosen: TextOrMessages
    rejected: TextOrMessages


def text_or_messages(record: SourceRecord, name: str) -> TextOrMessages | None:
    """The field ``name`` of a record, a text or a list of messages; None if it is missing or null.

    Raises:
        SourceError: if it has another type, or a message lacks its role or content.
    """
    value = get_field(record, name, (str, list), "text or a list of messages")
    return check_messages(record, name, value) if isinstance(value, list) else value


def check_messages(record: SourceRecord, name: str, messages: list[Any]) -> list[dict[str, Any]]:
    """Check that there are messages and that each has a role and content; return them.

    Conversations of ShareGPT become messages. The null keys that data sets add to messages are left out, except
    "content", since templates ask whether a message has the key "tool_calls", and a part of it "image".

    Raises:
        SourceError: if the list is empty, a message lacks its role or content, or its content is neither text nor a
            list of parts of text.
    """
    if not messages:
        raise record.error(f"{name!r} is empty; it needs at least one message")
    return [_checked_message(record, name, message) for message in as_messages(messages)]


def _checked_message(record: SourceRecord, name: str, message: Any) -> dict[str, Any]:
    """A message without null keys, after checking its role and content."""
    if (
        not isinstance(message, dict)
        or not isinstance(message.get("role"), str)
        or not any(message.get(key) is not None for key in CONTENTS)
    ):
        raise record.error(
            f"expected each message to have a 'role' and 'content' and found {show_value(message)}"
        )
    content = message.get("content")
    if not isinstance(content, str | None):
        for part in content if isinstance(content, list) else [content]:
            if not isinstance(part, dict) or not isinstance(content, list):
                raise record.error(
                    f"expected the content of each message of {name!r} to be text, or a list of parts such as "
                    f"{{'type': 'text', 'text': '...'}}, and found {show_value(part)}"
                )
            kind = part.get("type") or next(filter(part.get, MEDIA_PARTS), "text")
            if kind != "text":
                raise record.error(
                    f"a message of {name!r} holds {str(kind)[:40]!r}, and kleash measures models on text alone; leave "
                    "the record out, or give its text"
                )
    return {
        key: without_nulls(value) for key, value in message.items() if value is not None or key == "content"
    }


def check_text_only(record: SourceRecord) -> None:
    """Check that a record has no image, audio or video beside its text, as TRL's data sets for vision have.

    Raises:
        SourceError: if it has, with the name of the column.
    """
    for name, value in record.fields.items():
        if (name in MEDIA_COLUMNS and value) or _is_media(value):
            raise record.error(
                f"the record has {name!r} beside its text, and kleash measures models on text alone; leave the record "
                "out, or the column if the text stands without it"
            )


def _is_media(value: Any) -> bool:
    """Whether a value is an image or audio file as the package datasets stores them, or a list of such."""
    if is_list_of(value, dict):
        return all(map(_is_media, value))
    return isinstance(value, dict) and value.keys() == {"bytes", "path"} and any(value.values())


def is_preference(record: SourceRecord) -> bool:
    """Whether a record is a preference pair."""
    return record.fields.get("chosen") is not None and record.fields.get("rejected") is not None


def parse_preference(record: SourceRecord) -> Preference:
    """The preference pair of a record; without "prompt", the prompt is the common beginning of the two answers.

    Raises:
        SourceError: if a part is missing or empty, if the parts differ in type, or if the answers are equal.
    """
    fields = record.fields
    names = ["chosen", "rejected"]
    if fields.get("prompt") is not None and not _repeats_prompt(fields):
        names = ["prompt", *names]
    if {type(fields.get(name)) for name in names} not in ({str}, {list}) or not all(map(fields.get, names)):
        raise record.error(
            "expected 'prompt', 'chosen' and 'rejected', none of them empty, each a text or each a list of messages"
        )
    *prompt, chosen, rejected = (text_or_messages(record, name) or "" for name in names)
    if chosen == rejected:
        raise record.error("'chosen' and 'rejected' are the same; leave the line out")
    if prompt:
        return Preference(prompt[0], chosen, rejected)
    length = len(_common_beginning(chosen, rejected))  # in characters of texts or in messages of lists
    if isinstance(chosen, str) and length and chosen[length - 1] == " ":
        length -= 1  # the space belongs to the first word of the answer
    if not length or length in (len(chosen), len(rejected)):
        raise record.error(
            "expected 'prompt', 'chosen' and 'rejected', and without 'prompt' the other two to begin alike and to go "
            "on differently"
        )
    return Preference(chosen[:length], chosen[length:], rejected[length:])


def _common_beginning(chosen: TextOrMessages, rejected: TextOrMessages) -> list[Any]:
    """The characters or messages with which both answers begin."""
    pairs = zip(chosen, rejected, strict=False)
    return [first for first, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _repeats_prompt(fields: dict[str, Any]) -> bool:
    """Whether the prompt is the text of a message with which both conversations of a pair begin.

    Such are the data sets that were made by the alignment handbook, for instance ultrafeedback_binarized.
    """
    prompt, chosen, rejected = (fields.get(name) for name in ("prompt", "chosen", "rejected"))
    if not (isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list)):
        return False
    common = _common_beginning(without_nulls(chosen), without_nulls(rejected))
    return any(isinstance(message, dict) and message.get("content") == prompt for message in common)


def expand_responses(record: SourceRecord) -> Iterator[SourceRecord]:
    """The responses of a record, each as a record with "prompt" and "response"; a preference pair gives two.

    Messages that end with one of the assistant are a prompt and the response to it. Of an answer of several turns, such
    as one with results of tools, what the assistant says in each is a response to everything before it.

    Raises:
        SourceError: if the record cannot be read as one of the formats.
    """
    fields = record.fields
    if fields.get("response") is not None and fields.get("completion") is not None:
        raise record.error(
            "expected 'response' or 'completion' and found both; keep one, or choose by --response-column"
        )
    if fields.get("response") is not None or fields.get("response_token_ids") is not None:
        yield from _given_responses(record)
    elif is_preference(record):
        pair = parse_preference(record)
        for answer in (pair.chosen, pair.rejected):
            yield from _turns(record, pair.prompt, answer)
    elif (completion := text_or_messages(record, "completion")) is not None:
        yield from _turns(record, text_or_messages(record, "prompt"), completion)
    elif (
        isinstance(messages := text_or_messages(record, "messages"), list)
        and len(messages) > 1
        and messages[-1]["role"] == "assistant"
    ):
        yield _with_response(record, messages[:-1], messages[-1:])
    else:
        yield record


def _given_responses(record: SourceRecord) -> Iterator[SourceRecord]:
    """A record for each response in "response"; other records as they are.

    In a list of texts each is one, in messages each turn of the assistant.
    """
    fields = record.fields
    responses = fields.get("response")
    name = "prompt" if fields.get("messages") is None else "messages"
    if is_list_of(responses, str):
        for text in responses:
            yield record.with_fields({**fields, "response": text})
    elif (
        fields.get("response_token_ids") is None
        and isinstance(responses, list)
        and isinstance(fields.get(name), list)
    ):
        yield from _turns(
            record, text_or_messages(record, name), check_messages(record, "response", responses)
        )
    else:
        yield record


def _turns(
    record: SourceRecord, prompt: TextOrMessages | None, answer: TextOrMessages
) -> Iterator[SourceRecord]:
    """A record for each turn of the assistant in an answer; what users and tools say in it is no response."""
    if isinstance(prompt, str | None) or isinstance(answer, str):
        yield _with_response(record, prompt, answer)
        return
    turns = [
        (is_response, list(turn))
        for is_response, turn in groupby(answer, lambda message: message["role"] == "assistant")
    ]
    if not any(is_response for is_response, _ in turns):
        raise record.error(
            f"expected an answer of the assistant and found {show_value(answer)}; leave the record out"
        )
    before = list(prompt)
    for is_response, turn in turns:
        if is_response:
            yield _with_response(record, before, turn, first_prompt=prompt if len(turns) > 1 else None)
        before = [*before, *turn]


def _with_response(
    record: SourceRecord,
    prompt: TextOrMessages | None,
    answer: TextOrMessages,
    first_prompt: list[dict[str, Any]] | None = None,
) -> SourceRecord:
    """The record with ``prompt`` and ``response`` in place of the fields of its format.

    Args:
        record: the record.
        prompt: of the response.
        answer: the response.
        first_prompt: the prompt of the first of several turns; None of a response alone.
    """
    if type(prompt) is not type(answer):
        raise record.error(
            "expected prompt and completion to be both texts or both lists of messages and found "
            f"{show_value(prompt)} and {show_value(answer)}"
        )
    replaced = ["messages", "completion", "chosen", "rejected"]
    replaced += ["prompt_token_ids"] if first_prompt is not None else []
    fields = {name: value for name, value in record.fields.items() if name not in replaced}
    return replace(
        record.with_fields({**fields, "prompt": prompt, "response": answer}), first_prompt=first_prompt
    )


def text_or_conversation(record: SourceRecord) -> TextOrMessages | None:
    """The document of a record: "text", "messages", or "prompt" and "completion" joined; None without these fields.

    Raises:
        SourceError: if prompt and completion differ in type.
    """
    text = get_field(record, "text", str, "text")
    if text is not None:
        return text
    messages, prompt, completion = (
        text_or_messages(record, name) for name in ("messages", "prompt", "completion")
    )
    if isinstance(messages, list) or prompt is None or completion is None:
        return messages if isinstance(messages, list) else None
    if type(prompt) is not type(completion):
        raise record.error("expected prompt and completion to be both texts or both lists of messages")
    return prompt + completion  # pyrefly: ignore[unsupported-operation]


def expand_logs(records: Iterable[SourceRecord]) -> Iterator[SourceRecord]:
    """Records of logs as their responses; other records as they are.

    A document stands in a log of lm-evaluation-harness once for each filter of its task, with the same responses; those
    of the first filter are read. In a rollout of prime-rl, what the model drew between two results of tools, or in one
    turn, is a response to everything before it.

    Raises:
        SourceError: if a sample is not of a task that generates text, or a rollout has no tokens that were drawn.
    """
    filters: list[Any] = []
    for record in records:
        fields = record.fields
        if isinstance(fields.get("token_ids"), list) and isinstance(fields.get("loss_mask"), list):
            yield from _training_sequence(record)
        elif "arguments" in fields and "resps" in fields:
            filters = filters or [fields.get("filter")]
            if fields.get("filter") == filters[0]:
                yield from _sample(record)
        else:
            yield record


def _training_sequence(record: SourceRecord) -> Iterator[SourceRecord]:
    """The responses of a training sequence of prime-rl: each run of tokens that were drawn, after all before it."""
    token_ids, mask, logprobs = (
        record.fields.get(name) for name in ("token_ids", "loss_mask", "inference_logprobs")
    )
    assert isinstance(token_ids, list) and isinstance(mask, list)
    if len(mask) != len(token_ids) or not (logprobs is None or len(logprobs) == len(token_ids)):
        raise record.error(
            f"expected 'loss_mask' and 'inference_logprobs' to have a value for each of the {len(token_ids)} tokens"
        )
    if not any(mask):
        raise record.error("'loss_mask' is false at every token, so there is no response")
    first, stop = list(map(bool, mask)).index(True), 0
    for is_drawn, run in groupby(mask, bool):
        start, stop = stop, stop + len(list(run))
        if is_drawn:
            values = [None] if logprobs is None else list(logprobs[start:stop])
            fields = {
                "prompt_token_ids": list(token_ids[:start]),
                "response_token_ids": list(token_ids[start:stop]),
                "logprobs": None if None in values else values,
            }
            yield replace(record.with_fields(fields), first_prompt=tuple(token_ids[:first]))


def _sample(record: SourceRecord) -> Iterator[SourceRecord]:
    """The responses of a sample of lm-evaluation-harness, with their prompt."""
    prompt, options = _arguments(record.fields["arguments"])
    texts = record.fields["resps"]
    if isinstance(texts, list) and len(texts) == 1 and isinstance(texts[0], list):
        texts = texts[0]
    if prompt is None or not is_list_of(texts, str) or not isinstance(options, dict):
        raise record.error(
            "expected a sample of lm-evaluation-harness with generated text in 'resps' and found "
            f"{show_value(record.fields['resps'])}; only tasks that generate (generate_until) have responses"
        )
    for text in texts:
        yield record.with_fields({"prompt": prompt, "response": text})


def _arguments(arguments: Any) -> tuple[Any, Any]:
    """The prompt of a sample, a text or messages, and the argument after it; None for what is not there."""
    if isinstance(arguments, dict):
        first = arguments.get("gen_args_0")
        values = [first.get("arg_0"), first.get("arg_1")] if isinstance(first, dict) else []
    else:
        first = arguments[0] if isinstance(arguments, list) and arguments else None
        values = first if isinstance(first, list) else []
    prompt, options = (*values, None, None)[:2]
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]  # a conversation, as JSON in a list
    if isinstance(prompt, str) and prompt.startswith('[{"role"'):
        with suppress(ValueError):  # a text that only begins like messages
            return parse_unique_json(prompt), options
    return (prompt if isinstance(prompt, str) else None), options
