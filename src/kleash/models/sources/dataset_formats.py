"""The data set formats of TRL: which fields of a record are prompt, response and text.

    prompt only            {"prompt": P}
    prompt and completion  {"prompt": P, "completion": C}
    preference             {"prompt": P, "chosen": C, "rejected": C}; without "prompt", P is the common beginning
    language modelling     {"text": T} or {"messages": M}

P and C are texts or lists of messages. Reference: "Dataset formats and types",
https://huggingface.co/docs/trl/dataset_formats.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from kleash.errors import SourceError
from kleash.models.compat import summarise_error
from kleash.models.sandbox.process import render_chat
from kleash.models.sources.source_records import SourceRecord, check_unicode, get_field, show_value

MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of records whose text refers to something that is no text."""
RENDERING_OPTIONS = frozenset(
    {"conversation", "tools", "documents", "chat_template", "tokenize", "padding", "truncation", "max_length"}
    | {"add_generation_prompt", "continue_final_message", "return_tensors", "return_dict", "tokenizer_kwargs"}
    | {"return_assistant_tokens_mask"}
)
"""Arguments of ``apply_chat_template`` that are no variables of a template."""
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

    Raises:
        SourceError: if the list is empty, a message lacks its role or content, or its content is a list with anything
            but parts of text.
    """
    if not messages:
        raise SourceError(f"{record.location}: {name!r} is empty; it needs at least one message")
    for message in messages:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not ("content" in message or message.get("tool_calls"))
        ):
            raise SourceError(
                f"{record.location}: expected each message to have a 'role' and 'content' and found "
                f"{show_value(message)}"
            )
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            _check_part(record, name, part)
    return messages


def _check_part(record: SourceRecord, name: str, part: Any) -> None:
    """Check that a part of a message's content, such as {"type": "text", "text": "..."}, is text.

    Raises:
        SourceError: if it is no object, or an image, audio or video.
    """
    if not isinstance(part, dict):
        raise SourceError(
            f"{record.location}: expected the content of each message of {name!r} to be text, or a list of parts such "
            f"as {{'type': 'text', 'text': '...'}}, and found {show_value(part)} in the list"
        )
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

    Messages that end with one of the assistant are a prompt and the response to it.

    Raises:
        SourceError: if the record cannot be read as one of the formats.
    """
    fields = record.fields
    if fields is None or "response" in fields or "response_token_ids" in fields:
        responses = (fields or {}).get("response")
        if isinstance(responses, list) and responses and all(isinstance(text, str) for text in responses):
            yield from (replace(record, fields={**(fields or {}), "response": text}) for text in responses)
        else:
            yield record
        return
    if is_preference(record):
        pair = parse_preference(record)
        for answer in (pair.chosen, pair.rejected):
            yield _with_response(record, pair.prompt, answer)
        return
    completion = text_or_messages(record, "completion")
    if completion is not None:
        prompt = text_or_messages(record, "prompt")
        yield (
            record
            if prompt is None and isinstance(completion, str)
            else _with_response(record, prompt, completion)
        )
        return
    messages = text_or_messages(record, "messages")
    if isinstance(messages, list) and len(messages) > 1 and messages[-1]["role"] == "assistant":
        yield _with_response(record, messages[:-1], messages[-1:])
        return
    yield record


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


def conversation_text(
    record: SourceRecord, messages: list[dict[str, Any]], tokenizer: Any, name: str, chat_template: str | None
) -> str:
    """The text of a whole conversation: rendered, or its contents joined if ``chat_template`` is "raw".

    Raises:
        SourceError: as ``render_messages`` and ``join_contents``.
    """
    if chat_template == "raw":
        return join_contents(record, messages, name)
    return render_messages(record, messages, tokenizer, name)


def join_contents(record: SourceRecord, messages: list[dict[str, Any]], name: str) -> str:
    """The contents of messages, joined by blank lines.

    Args:
        record: the record that they come from, for errors.
        messages: as ``check_messages`` returns them.
        name: the field that they come from, for errors.

    Raises:
        SourceError: if a content is neither text nor a list of texts.
    """
    return "\n\n".join(_content_text(record, message.get("content"), name) for message in messages)


def _content_text(record: SourceRecord, content: Any, name: str) -> str:
    """The text of a message's content: text, or parts of the type "text"."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise SourceError(
            f"{record.location}: expected the contents of {name!r} to be text and found {show_value(content)}; leave "
            "--chat-template raw out, or give text"
        )
    return check_unicode(record, repr(name), "".join(map(str, texts)))


def render_answer(
    record: SourceRecord, prompt: list[dict[str, Any]], answer: list[dict[str, Any]], tokenizer: Any
) -> str:
    """The text that the chat template adds to a prompt for an answer, up to and including the end token.

    Raises:
        SourceError: if the template renders the prompt differently when the answer follows.
    """
    prompt_text = render_messages(record, prompt, tokenizer, "prompt", generate=True)
    whole_text = render_messages(record, prompt + answer, tokenizer, "completion")
    if not whole_text.startswith(prompt_text):
        raise SourceError(
            f"{record.location}: the chat template writes the prompt in another way once it is answered, so the answer "
            "cannot be told from it; give 'prompt_token_ids' and 'response_token_ids'"
        )
    text, eos = whole_text[len(prompt_text) :], tokenizer.eos_token
    if eos and eos in text and not text[text.rindex(eos) + len(eos) :].strip():
        return text[: text.rindex(eos) + len(eos)]
    return text


def render_messages(
    record: SourceRecord, messages: list[dict[str, Any]], tokenizer: Any, name: str, *, generate: bool = False
) -> str:
    """The text of messages, rendered by the tokenizer's chat template.

    Args:
        record: the record that they come from, for errors.
        messages: as ``check_messages`` returns them.
        tokenizer: its chat template is used.
        name: the field that they come from, for errors.
        generate: whether to end where the assistant continues: after the generation prompt, or within the last message
            if it is the assistant's.

    Raises:
        SourceError: if there is no template, or it raises an error.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise SourceError(
            f"{record.location}: it holds messages in {name!r} and the policy's tokenizer has no chat template; give "
            "'prompt' as text, or a tokenizer that has one"
        )
    options = _template_options(record)
    continues_last = generate and messages[-1]["role"] == "assistant"
    try:
        text = render_chat(
            tokenizer,
            messages,
            add_generation_prompt=generate and not continues_last,
            continue_final_message=continues_last,
            **options,
        )
    except Exception as error:  # a template is code of the checkpoint and can raise any exception
        raise SourceError(
            f"{record.location}: the chat template refuses the messages: {summarise_error(error)}"
        ) from error
    return check_unicode(record, repr(name), text)


def _template_options(record: SourceRecord) -> dict[str, Any]:
    """The tools of a record, and the variables of its chat template: TRL's "tools" and "chat_template_kwargs".

    Raises:
        SourceError: if the tools are no list of objects, the variables no object, or one of them an option.
    """
    fields = record.columns or record.fields or {}
    options: dict[str, Any] = {}
    tools, variables = (_parsed(fields.get(name)) for name in ("tools", "chat_template_kwargs"))
    if tools:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise SourceError(
                f"{record.location}: expected 'tools' to be a list of JSON schemas and found {show_value(tools)}; "
                "leave the column out"
            )
        options["tools"] = [_without_nulls(tool) for tool in tools]
    if variables:
        if not isinstance(variables, dict) or RENDERING_OPTIONS.intersection(variables):
            raise SourceError(
                f"{record.location}: expected 'chat_template_kwargs' to be an object with variables of the chat "
                f"template and found {show_value(variables)}"
            )
        options |= {name: value for name, value in variables.items() if value is not None}
    return options


def _parsed(value: Any) -> Any:
    """A value, of JSON if it is a text that is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _without_nulls(value: Any) -> Any:
    """A value without the null keys that Parquet adds to objects of a column."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
