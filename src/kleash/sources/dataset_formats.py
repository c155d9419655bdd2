"""The data set formats of TRL: which fields of a record are prompt, response and text.

    prompt only            {"prompt": P}
    prompt and completion  {"prompt": P, "completion": C}
    preference             {"prompt": P, "chosen": C, "rejected": C}; without "prompt", P is the common beginning
    language modelling     {"text": T} or {"messages": M}

P and C are texts or lists of messages. Reference: "Dataset formats and types",
https://huggingface.co/docs/trl/dataset_formats.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, takewhile
from typing import Any, NamedTuple, NoReturn

from kleash.errors import SourceError
from kleash.sources.chat_rendering import conversation_text
from kleash.sources.columns import as_messages
from kleash.sources.source_records import SourceRecord, get_field, show_value

MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of records whose text refers to something that is no text."""
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

    Conversations of ShareGPT become messages. Null keys of parts are left out, since templates ask whether a part has
    the key "image".

    Raises:
        SourceError: if the list is empty, a message lacks its role or content, or its content is neither text nor a
            list of parts of text.
    """
    if not messages:
        raise SourceError(f"{record.location}: {name!r} is empty; it needs at least one message")
    return [_checked_message(record, name, message) for message in as_messages(messages)]


def _checked_message(record: SourceRecord, name: str, message: Any) -> dict[str, Any]:
    """A message, after checking its role and content."""
    if (
        not isinstance(message, dict)
        or not isinstance(message.get("role"), str)
        or not any(message.get(key) is not None for key in CONTENTS)
    ):
        raise SourceError(
            f"{record.location}: expected each message to have a 'role' and 'content' and found "
            f"{show_value(message)}"
        )
    content = message.get("content")
    if not isinstance(content, list):
        if not isinstance(content, str | None):
            _refuse_content(record, name, content)
        return message
    for part in content:
        _check_part(record, name, part)
    parts = [{key: value for key, value in part.items() if value is not None} for part in content]
    return {**message, "content": parts}


def _refuse_content(record: SourceRecord, name: str, value: Any) -> NoReturn:
    """Raise the error about a content, or an entry of one, that is no text and no part."""
    raise SourceError(
        f"{record.location}: expected the content of each message of {name!r} to be text, or a list of parts such "
        f"as {{'type': 'text', 'text': '...'}}, and found {show_value(value)}"
    )


def _check_part(record: SourceRecord, name: str, part: Any) -> None:
    """Check that a part of a message's content, such as {"type": "text", "text": "..."}, is text.

    Raises:
        SourceError: if it is no object, or an image, audio or video.
    """
    if not isinstance(part, dict):
        _refuse_content(record, name, part)
    media = [key for key in (*MEDIA_COLUMNS, "image_url", "input_audio") if part.get(key)]
    kind = part.get("type") or (media[0] if media else "text")
    if kind != "text":
        raise SourceError(
            f"{record.location}: a message of {name!r} holds {str(kind)[:40]!r}, and kleash measures models on "
            "text alone; leave the record out, or give its text"
        )


def check_text_only(record: SourceRecord) -> None:
    """Check that a record has no image, audio or video beside its text, as TRL's data sets for vision have.

    Raises:
        SourceError: if it has, with the name of the column.
    """
    for name, value in (record.fields or {}).items():
        if (name in MEDIA_COLUMNS and value) or _is_media(value):
            raise SourceError(
                f"{record.location}: the record has {name!r} beside its text, and kleash measures models on text "
                "alone; leave the record out, or the column if the text stands without it"
            )


def _is_media(value: Any) -> bool:
    """Whether a value is an image or audio file as the package datasets stores them, or a list of such."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_media, value))
    return isinstance(value, dict) and value.keys() == {"bytes", "path"} and any(map(bool, value.values()))


def parse_preference(record: SourceRecord) -> Preference:
    """The preference pair of a record; without "prompt", the prompt is the common beginning of the two answers.

    Raises:
        SourceError: if a part is missing or empty, if the parts differ in type, or if the answers are equal.
    """
    fields = record.fields or {}
    if _repeats_prompt(fields):
        fields = {name: value for name, value in fields.items() if name != "prompt"}
        record = replace(record, fields=fields, columns=record.columns or record.fields)
    names = [name for name in ("prompt", "chosen", "rejected") if name != "prompt" or name in fields]
    if {type(fields.get(name)) for name in names} not in ({str}, {list}) or not all(map(fields.get, names)):
        raise SourceError(
            f"{record.location}: expected 'prompt', 'chosen' and 'rejected', each a text or each a list of messages"
        )
    prompt, chosen, rejected = (text_or_messages(record, name) for name in ("prompt", "chosen", "rejected"))
    assert chosen is not None and rejected is not None
    if chosen == rejected:
        raise SourceError(f"{record.location}: 'chosen' and 'rejected' are the same; leave the line out")
    if prompt is not None:
        return Preference(prompt, chosen, rejected)
    # Length of the common beginning, in characters of texts or in messages of lists.
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if isinstance(chosen, str) and length and chosen[length - 1] == " ":
        length -= 1  # the space belongs to the first word of the answer
    if not length or length in (len(chosen), len(rejected)):
        raise SourceError(
            f"{record.location}: expected 'prompt', 'chosen' and 'rejected', and without 'prompt' the other two to "
            "begin alike and to go on differently"
        )
    return Preference(chosen[:length], chosen[length:], rejected[length:])


def _repeats_prompt(fields: dict[str, Any]) -> bool:
    """Whether the prompt is the text of a message with which both conversations of a pair begin.

    Such are the data sets that were made by the alignment handbook, for instance ultrafeedback_binarized.
    """
    prompt, chosen, rejected = (fields.get(name) for name in ("prompt", "chosen", "rejected"))
    if not (isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list)):
        return False
    common = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    return any(isinstance(message, dict) and message.get("content") == prompt for message, _ in common)


def is_preference(record: SourceRecord) -> bool:
    """Whether a record is a preference pair."""
    fields = record.fields or {}
    return "chosen" in fields and "rejected" in fields


def expand_responses(record: SourceRecord) -> Iterator[SourceRecord]:
    """The responses of a record, each as a record with "prompt" and "response"; a preference pair gives two.

    Messages that end with one of the assistant are a prompt and the response to it. Of an answer of several turns, such
    as one with results of tools, what the assistant says in each is a response to everything before it.

    Raises:
        SourceError: if the record cannot be read as one of the formats.
    """
    fields = record.fields
    if fields is None:
        yield record
        return
    if fields.get("response") is not None and fields.get("completion") is not None:
        raise SourceError(
            f"{record.location}: expected 'response' or 'completion' and found both; keep one, or choose by "
            "--response-column"
        )
    if "response" in fields or "response_token_ids" in fields:
        yield from _given_responses(record, fields)
        return
    if is_preference(record):
        pair = parse_preference(record)
        for answer in (pair.chosen, pair.rejected):
            yield from _turns(record, pair.prompt, answer)
        return
    completion = text_or_messages(record, "completion")
    if completion is not None:
        prompt = text_or_messages(record, "prompt")
        if prompt is None and isinstance(completion, str):
            yield record
        else:
            yield from _turns(record, prompt, completion)
        return
    messages = text_or_messages(record, "messages")
    if isinstance(messages, list) and len(messages) > 1 and messages[-1]["role"] == "assistant":
        yield _with_response(record, messages[:-1], messages[-1:])
        return
    yield record


def _given_responses(record: SourceRecord, fields: dict[str, Any]) -> Iterator[SourceRecord]:
    """The responses of a record with "response" or "response_token_ids": of a list of texts, each."""
    responses = fields.get("response")
    if isinstance(responses, list) and responses and all(isinstance(text, str) for text in responses):
        yield from (replace(record, fields={**fields, "response": text}) for text in responses)
        return
    name = "prompt" if fields.get("messages") is None else "messages"
    has_messages = isinstance(responses, list) and isinstance(fields.get(name), list)
    answer = text_or_messages(record, "response") if has_messages else None
    if answer is None or fields.get("response_token_ids") is not None:
        yield record
    else:
        yield from _turns(record, text_or_messages(record, name), answer)


def _turns(
    record: SourceRecord, prompt: TextOrMessages | None, answer: TextOrMessages
) -> Iterator[SourceRecord]:
    """A record for each turn of the assistant in an answer; what users and tools say in it is no response."""
    if isinstance(prompt, str | None) or isinstance(answer, str):
        yield _with_response(record, prompt, answer)
        return
    before = list(prompt)
    turns = [
        (is_assistant, list(turn))
        for is_assistant, turn in groupby(answer, lambda message: message["role"] == "assistant")
    ]
    if not any(is_assistant for is_assistant, _ in turns):
        raise SourceError(
            f"{record.location}: expected an answer of the assistant and found {show_value(answer)}; leave the record "
            "out"
        )
    for is_assistant, turn in turns:
        if is_assistant:
            response = _with_response(record, before, turn)
            if len(turns) > 1:
                fields = {**(response.fields or {}), "prompt_token_ids": None}
                response = replace(response, fields=fields, first_prompt=prompt)
            yield response
        before = [*before, *turn]


def _with_response(
    record: SourceRecord, prompt: TextOrMessages | None, answer: TextOrMessages
) -> SourceRecord:
    """The record with ``prompt`` and ``response`` in place of the fields of its format."""
    fields = {
        name: value
        for name, value in (record.fields or {}).items()
        if name not in ("prompt", "messages", "completion", "chosen", "rejected")
    }
    if type(prompt) is not type(answer):
        raise SourceError(
            f"{record.location}: expected prompt and completion to be both texts or both lists of messages and found "
            f"{show_value(prompt)} and {show_value(answer)}"
        )
    return replace(record, fields={**fields, "prompt": prompt, "response": answer})


def document_text(record: SourceRecord, tokenizer: Any, chat_template: str | None = None) -> str | None:
    """The text of a record: "text", the rendered "messages", or "prompt" and "completion" joined.

    Args:
        record: the record.
        tokenizer: its chat template renders messages.
        chat_template: "raw" joins the contents of messages by blank lines.

    Returns:
        The text; None if the record has none of these fields.

    Raises:
        SourceError: if prompt and completion differ in type, or the messages cannot be rendered.
    """
    text = get_field(record, "text", str, "text")
    if text is not None:
        return text
    messages, prompt, completion = (
        text_or_messages(record, name) for name in ("messages", "prompt", "completion")
    )
    if isinstance(messages, list):
        return conversation_text(record, messages, tokenizer, "messages", chat_template)
    if prompt is None or completion is None:
        return None
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt + completion
    if isinstance(prompt, list) and isinstance(completion, list):
        return conversation_text(record, prompt + completion, tokenizer, "prompt", chat_template)
    raise SourceError(
        f"{record.location}: expected prompt and completion to be both texts or both lists of messages"
    )


def is_conversation(record: SourceRecord) -> bool:
    """Whether the text of a record is made of messages."""
    fields = record.fields or {}
    return fields.get("text") is None and any(
        isinstance(fields.get(name), list) for name in ("messages", "prompt")
    )
