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
    is_preference,
    parse_preference,
    render_messages,
    text_or_messages,
)
from kleash.models.sources.records import SourceRecord, check_unicode, get_field, shorten, show_value
from kleash.models.sources.source_files import read_records, source_path


def read_prompts(name: str, pair: Pair, *, limit: int | None = None, columns: bool = False) -> list[Prompt]:
    """The prompts of a source: records with "prompt" or "messages", or plain text with a prompt a line.

    Plain text is tokenised with the special tokens the tokenizer puts in front of it; messages are written
    with the chat template, up to where the assistant speaks. Blank lines are no prompts.

    Args:
        name: the file, of JSONL, a JSON array, CSV, Parquet or plain text; "-" for standard input; or
            "shipped:prompts". "prompt" is a text or a list of messages; of a preference pair without one it is what
            "chosen" and "rejected" begin with alike.
        pair: whose tokenizer and context count.
        limit: the most prompts to read; None for all.
        columns: whether each prompt keeps all that its line says, for rewards.

    Raises:
        SourceError: if a line cannot be read as a prompt, is empty, or is longer than a model can read; or if
            there is no prompt at all.
    """
    prompts = _prompts(_lines(name, limit), pair, columns=columns)
    if not prompts:
        raise SourceError(f"{name} holds no prompt, only blank lines")
    return prompts


def count_columns(name: str, limit: int | None = None) -> Counter[str]:
    """How many of a source's prompts have each column, in the order in which the columns appear.

    Loads no model. Plain text has none.

    Raises:
        SourceError: if a line cannot be read.
    """
    return Counter(column for record in _lines(name, limit) for column in record.fields or ())


def _lines(name: str, limit: int | None) -> Iterable[SourceRecord]:
    """The lines of a source of prompts."""
    path = source_path(name)
    return islice(read_records(path), limit)


def tokenise_prompts(given: Iterable[str | list[dict[str, Any]]], pair: Pair) -> list[Prompt]:
    """Prompts that are at hand: texts, or lists of messages; tokenised as ``read_prompts`` does it.

    Raises:
        SourceError: as ``read_prompts``.
    """
    records = [
        SourceRecord(number=number, location=f"prompt {number}", text=one)
        if isinstance(one, str)
        else SourceRecord(number=number, location=f"prompt {number}", text="", fields={"messages": one})
        for number, one in enumerate(given, start=1)
    ]
    if not records:
        raise SourceError("there is no prompt among those given")
    return _prompts(records, pair)


def _prompts(records: Iterable[SourceRecord], pair: Pair, *, columns: bool = False) -> list[Prompt]:
    copies: Counter[str] = Counter()
    prompts: list[Prompt] = []
    for record in records:
        token_ids, text = tokenise_prompt(record, pair)
        check_length(record, "prompt", len(token_ids), pair)
        key = hash_tokens(token_ids)
        prompts.append(
            Prompt(
                prompt_id=len(prompts),
                token_ids=token_ids,
                text=text,
                prompt_hash=key,
                copy=copies[key],
                location=record.location,
                messages=_messages(record),
                columns=record.fields or {} if columns else {},
            )
        )
        copies[key] += 1
    return prompts


def tokenise_prompt(record: SourceRecord, pair: Pair) -> tuple[tuple[int, ...], str]:
    """Token ids and text of the prompt that a line holds: ids win over text.

    Raises:
        SourceError: if it holds none, or an empty one.
    """
    if record.fields is None:
        return _from_text(
            record, check_unicode(record, "the prompt", record.text), pair.tokenizer
        ), record.text
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
        return _from_turns(record, prompt, pair.tokenizer, "prompt")
    return _from_text(record, prompt, pair.tokenizer), prompt


def check_token_ids(record: SourceRecord, name: str, values: list[Any], pair: Pair) -> tuple[int, ...]:
    """``values`` as token ids that both models have.

    Raises:
        SourceError: if one is not, or there are none.
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
    """See that the models can read ``tokens`` tokens.

    Raises:
        SourceError: if they cannot, naming both lengths.
    """
    if pair.context_length is not None and tokens > pair.context_length:
        raise SourceError(
            f"{record.location}: the {what} is {tokens} tokens long and the models read at most {pair.context_length}; "
            "shorten it or leave it out"
        )


def describe_fields(record: SourceRecord) -> str:
    """The names of a line's fields, for errors."""
    return ", ".join(repr(name) for name in record.fields) if record.fields else "an empty object"


def encode_text(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Token ids of ``text``, with or without what the tokenizer puts around it."""
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _from_text(record: SourceRecord, text: str, tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer makes of plain text, without an end token: the prompt is to be continued."""
    if not text:
        raise SourceError(f"{record.location}: the prompt is empty")
    token_ids, bare = encode_text(tokenizer, text, special=True), encode_text(tokenizer, text, special=False)
    ended = len(token_ids) > len(bare) and token_ids[-1] == tokenizer.eos_token_id
    if ended and (not bare or bare[-1] != tokenizer.eos_token_id):
        token_ids.pop()
    if not token_ids:
        raise SourceError(f"{record.location}: the prompt {shorten(text)} has no tokens")
    return tuple(token_ids)


def _messages(record: SourceRecord) -> tuple[dict[str, Any], ...] | None:
    """The messages that a prompt is made from, if it is."""
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
    """A conversation to be answered."""
    if messages[-1]["role"] == "assistant":
        raise SourceError(
            f"{record.location}: the last of 'messages' is the assistant's; leave it out to have the conversation "
            "answered, or call the field 'prompt' to have it continued"
        )
    return _from_turns(record, messages, tokenizer, "messages")


def _from_turns(
    record: SourceRecord, messages: list[dict[str, Any]], tokenizer: Any, name: str
) -> tuple[tuple[int, ...], str]:
    text = render_messages(record, messages, tokenizer, name, generate=True)
    token_ids = encode_text(tokenizer, text, special=False)
    if not token_ids:
        raise SourceError(f"{record.location}: the chat template makes nothing of the messages")
    return tuple(token_ids), text
