"""Prompts of a source file or a list, tokenised from text, messages or token ids."""

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

from kleash.errors import SourceError
from kleash.models.pair import Pair
from kleash.models.sequences import Prompt, hash_tokens
from kleash.models.sources.dataset_formats import (
    check_messages,
    check_text_only,
    is_preference,
    parse_preference,
    render_messages,
    text_or_messages,
)
from kleash.models.sources.source_files import read_records, source_path
from kleash.models.sources.source_records import SourceRecord, check_unicode, get_field, shorten, show_value


def read_prompts(name: str, pair: Pair, *, limit: int | None = None, columns: bool = False) -> list[Prompt]:
    """Read the prompts of a source: records with "prompt" or "messages", or plain text with a prompt on each line.

    Plain text is tokenised with the special tokens that the tokenizer puts in front of it. Messages are rendered by
    the chat template, up to the start of the assistant's turn. Blank lines are skipped.

    Args:
        name: the file, of JSONL, a JSON array, CSV, Parquet or plain text; "-" for standard input; or
            "shipped:prompts". "prompt" is a text or a list of messages; in a preference pair without "prompt", it is
            the common beginning of "chosen" and "rejected".
        pair: the models, whose tokenizer and context length are used.
        limit: largest number of prompts to read; None for all.
        columns: whether each prompt keeps all fields of its record, for reward functions.

    Raises:
        SourceError: if a record is not a prompt, or its prompt is empty or longer than a model can read; or if there
            is no prompt at all.
    """
    prompts = _prompts(_records(name, limit), pair, columns=columns)
    if not prompts:
        raise SourceError(f"{name} holds no prompt, only blank lines")
    return prompts


def count_columns(name: str, limit: int | None = None) -> Counter[str]:
    """The number of a source's prompts that have each column, in the order in which the columns appear.

    Loads no model. Plain text has no columns.

    Raises:
        SourceError: if a line cannot be read.
    """
    return Counter(column for record in _records(name, limit) for column in record.fields or ())


def _records(name: str, limit: int | None) -> Iterable[SourceRecord]:
    """The first ``limit`` records of a source of prompts."""
    return islice(read_records(source_path(name, "prompts"), "prompts"), limit)


def tokenise_prompts(prompts: Iterable[str | list[dict[str, Any]]], pair: Pair) -> list[Prompt]:
    """Tokenise prompts in memory, texts or lists of messages, as ``read_prompts`` does.

    Raises:
        SourceError: as ``read_prompts``.
    """
    records = [
        SourceRecord(number=number, location=f"prompt {number}", text=prompt)
        if isinstance(prompt, str)
        else SourceRecord(number=number, location=f"prompt {number}", text="", fields={"messages": prompt})
        for number, prompt in enumerate(prompts, start=1)
    ]
    if not records:
        raise SourceError("there is no prompt among those given")
    return _prompts(records, pair)


def _prompts(records: Iterable[SourceRecord], pair: Pair, *, columns: bool = False) -> list[Prompt]:
    """The prompts of records; equal prompts are numbered by ``copy``."""
    copies: Counter[str] = Counter()
    prompts: list[Prompt] = []
    for record in records:
        token_ids, text = tokenise_prompt(record, pair)
        check_length(record, "prompt", len(token_ids), pair)
        prompt_hash = hash_tokens(token_ids)
        prompts.append(
            Prompt(
                prompt_id=len(prompts),
                token_ids=token_ids,
                text=text,
                prompt_hash=prompt_hash,
                copy=copies[prompt_hash],
                location=record.location,
                messages=_messages(record),
                columns=record.fields or {} if columns else {},
            )
        )
        copies[prompt_hash] += 1
    return prompts


def tokenise_prompt(record: SourceRecord, pair: Pair) -> tuple[tuple[int, ...], str]:
    """Token ids and text of the prompt of a record; token ids take precedence over text.

    Raises:
        SourceError: if the record has no prompt, or an empty one.
    """
    if record.fields is None:
        text = check_unicode(record, "the prompt", record.text)
        return _from_text(record, text, pair.tokenizer), text
    check_text_only(record)
    values = get_field(record, "prompt_token_ids", list, "a list of token ids")
    if values is not None:
        token_ids = check_token_ids(record, "prompt_token_ids", values, pair)
        return token_ids, pair.tokenizer.decode(list(token_ids))
    messages = get_field(record, "messages", list, "a list of messages")
    prompt = text_or_messages(record, "prompt")
    if messages is not None and prompt is not None:
        raise SourceError(f"{record.location}: expected 'prompt' or 'messages' and found both; keep one")
    if messages is not None:
        return _from_messages(record, check_messages(record, "messages", messages), pair.tokenizer)
    if prompt is None and is_preference(record):
        prompt = parse_preference(record).prompt
    if prompt is None:
        raise SourceError(
            f"{record.location}: expected a field 'prompt' or 'messages' and found {describe_fields(record)}"
        )
    if isinstance(prompt, list):
        return _render_and_encode(record, prompt, pair.tokenizer, "prompt")
    return _from_text(record, prompt, pair.tokenizer), prompt


def check_token_ids(record: SourceRecord, name: str, values: list[Any], pair: Pair) -> tuple[int, ...]:
    """``values`` as token ids, after checking that both models have them.

    Raises:
        SourceError: if a value is not a token id of the models, or there are none.
    """
    if not values:
        raise SourceError(
            f"{record.location}: {name!r} is empty; give at least one token, or leave the line out"
        )
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < pair.vocab_size:
            raise SourceError(
                f"{record.location}: expected {name!r} to hold token ids from 0 to {pair.vocab_size - 1} and "
                f"found {show_value(value)}"
            )
    return tuple(values)


def check_length(record: SourceRecord, what: str, tokens: int, pair: Pair) -> None:
    """Check that a text of ``tokens`` tokens is not longer than the models' context.

    Raises:
        SourceError: if it is, with both lengths.
    """
    if pair.context_length is not None and tokens > pair.context_length:
        raise SourceError(
            f"{record.location}: the {what} is {tokens} tokens long and the models read at most {pair.context_length}; "
            "shorten it or leave it out"
        )


def describe_fields(record: SourceRecord) -> str:
    """The names of a record's fields, for errors."""
    return ", ".join(repr(name) for name in record.fields) if record.fields else "an empty object"


def encode_text(tokenizer: Any, text: str, *, special_tokens: bool) -> list[int]:
    """Token ids of ``text``, with or without the special tokens that the tokenizer adds around a text."""
    return list(tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"])


def _from_text(record: SourceRecord, text: str, tokenizer: Any) -> tuple[int, ...]:
    """Token ids of a prompt of plain text, without an end token that the tokenizer appended."""
    if not text:
        raise SourceError(f"{record.location}: the prompt is empty")
    token_ids = encode_text(tokenizer, text, special_tokens=True)
    text_ids = encode_text(tokenizer, text, special_tokens=False)
    ends_with_eos = len(token_ids) > len(text_ids) and token_ids[-1] == tokenizer.eos_token_id
    if ends_with_eos and (not text_ids or text_ids[-1] != tokenizer.eos_token_id):
        token_ids.pop()
    if not token_ids:
        raise SourceError(f"{record.location}: the prompt {shorten(text)} has no tokens")
    return tuple(token_ids)


def _messages(record: SourceRecord) -> tuple[dict[str, Any], ...] | None:
    """The messages of a record's prompt; None if the prompt is text or token ids."""
    fields = record.fields or {}
    if fields.get("prompt_token_ids") is not None:
        return None
    messages = fields.get("messages") or fields.get("prompt")
    if messages is None and is_preference(record):
        messages = parse_preference(record).prompt
    return tuple(messages) if isinstance(messages, list) else None


def _from_messages(
    record: SourceRecord, messages: list[dict[str, Any]], tokenizer: Any
) -> tuple[tuple[int, ...], str]:
    """Token ids and text of a conversation that the assistant is to answer."""
    if messages[-1]["role"] == "assistant":
        raise SourceError(
            f"{record.location}: the last of 'messages' is the assistant's; leave it out to have the conversation "
            "answered, or call the field 'prompt' to have it continued"
        )
    return _render_and_encode(record, messages, tokenizer, "messages")


def _render_and_encode(
    record: SourceRecord, messages: list[dict[str, Any]], tokenizer: Any, name: str
) -> tuple[tuple[int, ...], str]:
    """Token ids and text of messages, up to the start of the assistant's turn."""
    text = render_messages(record, messages, tokenizer, name, generate=True)
    token_ids = encode_text(tokenizer, text, special_tokens=False)
    if not token_ids:
        raise SourceError(f"{record.location}: the chat template makes nothing of the messages")
    return tuple(token_ids), text
