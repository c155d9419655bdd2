"""Prompts as token ids: from text, from chat messages, or as they are."""

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
    return Counter(column for line in _lines(name, limit) for column in line.record or ())


def _lines(name: str, limit: int | None) -> Iterable[SourceRecord]:
    """The lines of a source of prompts."""
    path = source_path(name)
    return islice(read_records(path), limit)


def tokenise_prompts(given: Iterable[str | list[dict[str, Any]]], pair: Pair) -> list[Prompt]:
    """Prompts that are at hand: texts, or lists of messages; tokenised as ``read_prompts`` does it.

    Raises:
        SourceError: as ``read_prompts``.
    """
    lines = [
        SourceRecord(number=number, where=f"prompt {number}", text=one)
        if isinstance(one, str)
        else SourceRecord(number=number, where=f"prompt {number}", text="", record={"messages": one})
        for number, one in enumerate(given, start=1)
    ]
    if not lines:
        raise SourceError("there is no prompt among those given")
    return _prompts(lines, pair)


def _prompts(lines: Iterable[SourceRecord], pair: Pair, *, columns: bool = False) -> list[Prompt]:
    copies: Counter[str] = Counter()
    prompts: list[Prompt] = []
    for line in lines:
        token_ids, text = tokenise_prompt(line, pair)
        check_length(line, "prompt", len(token_ids), pair)
        key = hash_tokens(token_ids)
        prompts.append(
            Prompt(
                prompt_id=len(prompts),
                token_ids=token_ids,
                text=text,
                prompt_hash=key,
                copy=copies[key],
                location=line.where,
                messages=_messages(line),
                columns=line.record or {} if columns else {},
            )
        )
        copies[key] += 1
    return prompts


def tokenise_prompt(line: SourceRecord, pair: Pair) -> tuple[tuple[int, ...], str]:
    """Token ids and text of the prompt that a line holds: ids win over text.

    Raises:
        SourceError: if it holds none, or an empty one.
    """
    if line.record is None:
        return _from_text(line, check_unicode(line, "the prompt", line.text), pair.tokenizer), line.text
    values = get_field(line, "prompt_token_ids", list, "a list of token ids")
    if values is not None:
        token_ids = check_token_ids(line, "prompt_token_ids", values, pair)
        return token_ids, pair.tokenizer.decode(list(token_ids))
    messages = get_field(line, "messages", list, "a list of messages")
    prompt = text_or_messages(line, "prompt")
    if messages is not None and prompt is not None:
        raise SourceError(f"{line.where}: expected 'prompt' or 'messages' and found both; keep one")
    if messages is not None:
        return _from_messages(line, check_messages(line, "messages", messages), pair.tokenizer)
    if prompt is None and is_preference(line):
        prompt = parse_preference(line).prompt
    if prompt is None:
        raise SourceError(
            f"{line.where}: expected a field 'prompt' or 'messages' and found {describe_fields(line)}"
        )
    if isinstance(prompt, list):
        return _from_turns(line, prompt, pair.tokenizer, "prompt")
    return _from_text(line, prompt, pair.tokenizer), prompt


def check_token_ids(line: SourceRecord, name: str, values: list[Any], pair: Pair) -> tuple[int, ...]:
    """``values`` as token ids that both models have.

    Raises:
        SourceError: if one is not, or there are none.
    """
    if not values:
        raise SourceError(f"{line.where}: {name!r} is empty; give at least one token, or leave the line out")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < pair.vocab_size:
            raise SourceError(
                f"{line.where}: expected {name!r} to hold token ids from 0 to {pair.vocab_size - 1} and "
                f"found {show_value(value)}"
            )
    return tuple(values)


def check_length(line: SourceRecord, what: str, tokens: int, pair: Pair) -> None:
    """See that the models can read ``tokens`` tokens.

    Raises:
        SourceError: if they cannot, naming both lengths.
    """
    if pair.context_length is not None and tokens > pair.context_length:
        raise SourceError(
            f"{line.where}: the {what} is {tokens} tokens long and the models read at most {pair.context_length}; "
            "shorten it or leave it out"
        )


def describe_fields(line: SourceRecord) -> str:
    """The names of a line's fields, for errors."""
    return ", ".join(repr(name) for name in line.record) if line.record else "an empty object"


def encode_text(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Token ids of ``text``, with or without what the tokenizer puts around it."""
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _from_text(line: SourceRecord, text: str, tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer makes of plain text, without an end token: the prompt is to be continued."""
    if not text:
        raise SourceError(f"{line.where}: the prompt is empty")
    token_ids, bare = encode_text(tokenizer, text, special=True), encode_text(tokenizer, text, special=False)
    ended = len(token_ids) > len(bare) and token_ids[-1] == tokenizer.eos_token_id
    if ended and (not bare or bare[-1] != tokenizer.eos_token_id):
        token_ids.pop()
    if not token_ids:
        raise SourceError(f"{line.where}: the prompt {shorten(text)} has no tokens")
    return tuple(token_ids)


def _messages(line: SourceRecord) -> tuple[dict[str, Any], ...] | None:
    """The messages that a prompt is made from, if it is."""
    record = line.record or {}
    if record.get("prompt_token_ids") is not None:
        return None
    messages = record.get("messages") or record.get("prompt")
    if messages is None and is_preference(line):
        messages = parse_preference(line).prompt
    return tuple(messages) if isinstance(messages, list) else None


def _from_messages(
    line: SourceRecord, messages: list[dict[str, Any]], tokenizer: Any
) -> tuple[tuple[int, ...], str]:
    """A conversation to be answered."""
    if messages[-1]["role"] == "assistant":
        raise SourceError(
            f"{line.where}: the last of 'messages' is the assistant's; leave it out to have the conversation answered, "
            "or call the field 'prompt' to have it continued"
        )
    return _from_turns(line, messages, tokenizer, "messages")


def _from_turns(
    line: SourceRecord, messages: list[dict[str, Any]], tokenizer: Any, name: str
) -> tuple[tuple[int, ...], str]:
    text = render_messages(line, messages, tokenizer, name, generate=True)
    token_ids = encode_text(tokenizer, text, special=False)
    if not token_ids:
        raise SourceError(f"{line.where}: the chat template makes nothing of the messages")
    return tuple(token_ids), text
