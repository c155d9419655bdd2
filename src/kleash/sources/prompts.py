"""Prompts of a source file or a list, tokenised from text, messages or token ids."""

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

from kleash.errors import SourceError
from kleash.jobs.reading import DatasetOptions
from kleash.sources.chat_rendering import is_rendered, join_contents, render_messages
from kleash.sources.dataset_formats import (
    check_messages,
    check_text_only,
    is_preference,
    parse_preference,
    text_or_messages,
)
from kleash.sources.sequences import Prompt, TokenLimits, hash_prompt
from kleash.sources.source_files import find_source
from kleash.sources.source_records import (
    SourceRecord,
    check_unicode,
    describe_fields,
    get_field,
    shorten,
    show_value,
)


def read_prompts(
    name: str,
    pair: TokenLimits,
    *,
    limit: int | None = None,
    columns: bool = False,
    reading: DatasetOptions | None = None,
) -> list[Prompt]:
    """Read the prompts of a source: records with "prompt" or "messages", or plain text with a prompt on each line.

    Plain text is tokenised with the special tokens that the tokenizer puts in front of it. Messages are rendered by
    the chat template, up to the start of the assistant's turn. Blank lines are skipped.

    Args:
        name: the file, of JSONL, a JSON array, CSV, Parquet, Arrow or plain text; "-" for standard input;
            "shipped:prompts"; or a data set, as ``find_source`` takes it. "prompt" is a text or a list of messages; in
            a preference pair without "prompt", it is the common beginning of "chosen" and "rejected".
        pair: the models, whose tokenizer and context length are used.
        limit: largest number of prompts to read; None for all.
        columns: whether each prompt keeps all fields of its record, for reward functions.
        reading: split, columns and chat template, such as a job; None for the defaults.

    Raises:
        SourceError: if a record is not a prompt, or its prompt is empty or longer than a model can read; or if there
            is no prompt at all.
    """
    source = find_source(name, "prompts", reading)
    records = islice(source.records(), limit)
    prompts = _prompts(records, pair, columns=columns, chat_template=source.reading.chat_template)
    if not prompts:
        raise SourceError(f"{name} holds no prompt; give a source with at least one")
    return prompts


def count_columns(name: str, limit: int | None = None, reading: DatasetOptions | None = None) -> Counter[str]:
    """The number of a source's prompts that have each column, in the order in which the columns appear.

    Loads no model. Plain text has no columns.

    Raises:
        SourceError: if a line cannot be read.
    """
    records = islice(find_source(name, "prompts", reading).raw_records(), limit)
    return Counter(column for record in records for column in record.fields or ())


def tokenise_prompts(prompts: Iterable[str | list[dict[str, Any]]], pair: TokenLimits) -> list[Prompt]:
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


def _prompts(
    records: Iterable[SourceRecord],
    pair: TokenLimits,
    *,
    columns: bool = False,
    chat_template: str | None = None,
) -> list[Prompt]:
    """The prompts of records; equal prompts are numbered by ``copy``."""
    copies: Counter[str] = Counter()
    prompts: list[Prompt] = []
    for record in records:
        token_ids, text = tokenise_prompt(record, pair, chat_template)
        check_length(record, "prompt", len(token_ids), pair)
        prompt_hash = hash_prompt(token_ids, pair.tokenizer)
        prompts.append(
            Prompt(
                prompt_id=len(prompts),
                token_ids=token_ids,
                text=text,
                prompt_hash=prompt_hash,
                copy=copies[prompt_hash],
                location=record.location,
                messages=_messages(record, chat_template),
                columns=(record.columns or record.fields or {}) if columns else {},
            )
        )
        copies[prompt_hash] += 1
    return prompts


def tokenise_prompt(
    record: SourceRecord, pair: TokenLimits, chat_template: str | None = None
) -> tuple[tuple[int, ...], str]:
    """Token ids and text of the prompt of a record; token ids take precedence over text.

    Args:
        record: the record.
        pair: the models, whose tokenizer and vocabulary are used.
        chat_template: "apply" renders a plain prompt as a user's message, too; "raw" renders nothing, and joins the
            contents of messages by blank lines; None renders messages alone.

    Raises:
        SourceError: if the record has no prompt, or an empty one.
    """
    if record.fields is None:
        text = check_unicode(record, "the prompt", record.text)
        return _from_text(record, text, pair.tokenizer, chat_template)
    check_text_only(record)
    values = get_field(record, "prompt_token_ids", list, "a list of token ids")
    if values is not None:
        token_ids = check_token_ids(record, "prompt_token_ids", values, pair)
        return token_ids, pair.tokenizer.decode(list(token_ids))
    messages = get_field(record, "messages", list, "a list of messages")
    prompt = text_or_messages(record, "prompt")
    if messages is not None and prompt is not None:
        raise SourceError(
            f"{record.location}: expected 'prompt' or 'messages' and found both; keep one, or choose by --prompt-column"
        )
    if messages is not None:
        messages = check_messages(record, "messages", messages)
        if messages[-1]["role"] == "assistant":
            raise SourceError(
                f"{record.location}: the last of 'messages' is the assistant's; leave it out to have the conversation "
                "answered, or call the field 'prompt' to have it continued"
            )
        return _from_messages(record, messages, pair.tokenizer, "messages", chat_template)
    if prompt is None and is_preference(record):
        prompt = parse_preference(record).prompt
    if prompt is None:
        raise SourceError(
            f"{record.location}: expected a field 'prompt' or 'messages' and found {describe_fields(record)}; "
            "--prompt-column names another"
        )
    if isinstance(prompt, list):
        return _from_messages(record, prompt, pair.tokenizer, "prompt", chat_template)
    return _from_text(record, prompt, pair.tokenizer, chat_template)


def check_token_ids(record: SourceRecord, name: str, values: list[Any], pair: TokenLimits) -> tuple[int, ...]:
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


def check_length(record: SourceRecord, what: str, tokens: int, pair: TokenLimits) -> None:
    """Check that a text of ``tokens`` tokens is not longer than the models' context.

    Raises:
        SourceError: if it is, with both lengths.
    """
    if pair.context_length is not None and tokens > pair.context_length:
        raise SourceError(
            f"{record.location}: the {what} is {tokens} tokens long and the models read at most {pair.context_length}; "
            "shorten it or leave it out"
        )


def encode_text(tokenizer: Any, text: str, *, special_tokens: bool) -> list[int]:
    """Token ids of ``text``, with or without the special tokens that the tokenizer adds around a text."""
    return list(tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"])


def without_second_begin(tokenizer: Any, token_ids: list[int]) -> list[int]:
    """Token ids with one begin token of two: the text begins with it, as one in a log or of a template does."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return token_ids[1:] if bos is not None and token_ids[:2] == [bos, bos] else token_ids


def _from_text(
    record: SourceRecord, text: str, tokenizer: Any, chat_template: str | None
) -> tuple[tuple[int, ...], str]:
    """Token ids and text of a prompt of plain text, without an end token that the tokenizer appended."""
    if not text:
        raise SourceError(f"{record.location}: the prompt is empty")
    if chat_template == "apply":
        if not getattr(tokenizer, "chat_template", None):
            raise SourceError(
                f"{record.location}: --chat-template apply renders it by the chat template of the policy's tokenizer, "
                "which has none; leave that out, or give a --tokenizer with one"
            )
        if is_rendered(text, tokenizer):
            raise SourceError(
                f"{record.location}: a chat template has rendered the prompt {shorten(text)} already, and "
                "--chat-template apply renders prompts that are plain; leave that out"
            )
        message = {"role": "user", "content": text}
        return _from_messages(record, [message], tokenizer, "prompt", chat_template)
    token_ids = encode_text(tokenizer, text, special_tokens=True)
    text_ids = encode_text(tokenizer, text, special_tokens=False)
    ends_with_eos = len(token_ids) > len(text_ids) and token_ids[-1] == tokenizer.eos_token_id
    if ends_with_eos and (not text_ids or text_ids[-1] != tokenizer.eos_token_id):
        token_ids.pop()
    token_ids = without_second_begin(tokenizer, token_ids)
    if not token_ids:
        raise SourceError(f"{record.location}: the prompt {shorten(text)} has no tokens")
    return tuple(token_ids), text


def _messages(record: SourceRecord, chat_template: str | None) -> tuple[dict[str, Any], ...] | None:
    """The messages that a prompt was rendered from; None if it is read as text or token ids."""
    if record.fields is None:
        return ({"role": "user", "content": record.text},) if chat_template == "apply" else None
    if record.fields.get("prompt_token_ids") is not None or chat_template == "raw":
        return None
    prompt = text_or_messages(record, "messages") or text_or_messages(record, "prompt")
    if prompt is None and is_preference(record):
        prompt = parse_preference(record).prompt
    if isinstance(prompt, str) and chat_template == "apply":
        return ({"role": "user", "content": prompt},)
    return tuple(prompt) if isinstance(prompt, list) else None


def _from_messages(
    record: SourceRecord, messages: list[dict[str, Any]], tokenizer: Any, name: str, chat_template: str | None
) -> tuple[tuple[int, ...], str]:
    """Token ids and text of messages, up to the start of the assistant's turn."""
    if chat_template == "raw":
        return _from_text(record, join_contents(record, messages, name), tokenizer, chat_template)
    text = render_messages(record, messages, tokenizer, name, generate=True)
    token_ids = encode_text(tokenizer, text, special_tokens=False)
    if not token_ids:
        raise SourceError(f"{record.location}: the chat template makes nothing of the messages")
    return tuple(token_ids), text
