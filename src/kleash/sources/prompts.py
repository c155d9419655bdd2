"""Prompts of a source file or a list, tokenised from text, messages or token ids."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any

from kleash.errors import SourceError
from kleash.jobs.reading import DatasetOptions, ReadOptions, SourceKind
from kleash.sources.chat_rendering import (
    MARK,
    form_of_text,
    join_contents,
    render_example,
    render_messages,
)
from kleash.sources.dataset_formats import (
    TextOrMessages,
    check_messages,
    check_text_only,
    is_preference,
    parse_preference,
    text_or_messages,
)
from kleash.sources.files import find_source
from kleash.sources.in_memory import records_in_memory
from kleash.sources.records import (
    SourceRecord,
    describe_fields,
    get_field,
    shorten,
    show_value,
)
from kleash.sources.sequences import (
    LEAST_PADDING_RUN,
    Prompt,
    SourceForm,
    TokenLimits,
    hash_prompt,
    text_after,
)

NOUNS = {"prompts": "prompts", "responses": "prompts", "text": "documents"}
"""What a chat template renders, by the kind of a source."""


def read_prompts(
    name: str,
    pair: TokenLimits,
    *,
    limit: int | None = None,
    columns: bool = False,
    reading: DatasetOptions | None = None,
) -> list[Prompt]:
    """Read the prompts of a source: records with "prompt" or "messages", or plain text with a prompt on each line.

    Plain text is tokenised with the special tokens that the tokenizer puts in front of it; text that the chat template
    has rendered without them, if it writes none. Messages are rendered by it, up to the start of the assistant's turn.
    Blank lines are skipped.

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
    return _prompts(
        name,
        islice(source.records(), limit),
        pair,
        columns=columns,
        chat_template=source.reading.chat_template,
    )


def count_columns(name: str, limit: int | None = None, reading: DatasetOptions | None = None) -> Counter[str]:
    """The number of a source's prompts that have each column, in the order in which the columns appear.

    Loads no model. Plain text has the column "prompt".

    Raises:
        SourceError: if a line cannot be read.
    """
    records = islice(find_source(name, "prompts", reading).raw_records(), limit)
    return Counter(column for record in records for column in record.fields)


def tokenise_prompts(prompts: Iterable[Any], pair: TokenLimits, limit: int | None = None) -> list[Prompt]:
    """Tokenise prompts in memory, the first ``limit``, as ``read_prompts`` does: texts, lists of messages, or records.

    Raises:
        SourceError: as ``read_prompts`` and ``records_in_memory``.
    """
    records = (
        SourceRecord(location=f"prompt {number}", fields=fields)
        for number, fields in enumerate(islice(records_in_memory(prompts, "prompts"), limit), start=1)
    )
    return _prompts("the list", records, pair)


def _prompts(
    name: str,
    records: Iterable[SourceRecord],
    pair: TokenLimits,
    *,
    columns: bool = False,
    chat_template: str | None = None,
) -> list[Prompt]:
    """The prompts of the records of a source called ``name``; equal prompts are numbered by ``copy``."""
    copies: Counter[str] = Counter()
    prompts: list[Prompt] = []
    for record in records:
        prompt = tokenise_prompt(record, pair, chat_template)
        check_length(record, "prompt", len(prompt.token_ids), pair)
        prompts.append(
            replace(
                prompt,
                prompt_id=len(prompts),
                copy=copies[prompt.prompt_hash],
                columns=record.source_fields if columns else {},
            )
        )
        copies[prompt.prompt_hash] += 1
    if not prompts:
        raise SourceError(f"{name} holds no prompt; give a source with at least one")
    return prompts


def tokenise_prompt(record: SourceRecord, pair: TokenLimits, chat_template: str | None = None) -> Prompt:
    """The prompt of a record as tokens, numbered 0; token ids take precedence over text.

    Args:
        record: the record.
        pair: the models, whose tokenizer and vocabulary are used.
        chat_template: "apply" renders a plain prompt as a user's message, too; "raw" renders nothing, and joins the
            contents of messages by blank lines; None renders messages alone.

    Raises:
        SourceError: if the record has no prompt, or an empty one, or one to be rendered that a template has rendered.
    """
    check_text_only(record)
    values, tokenizer = get_field(record, "prompt_token_ids", list, "a list of token ids"), pair.tokenizer

    def made_of(
        token_ids: tuple[int, ...], text: str, form: SourceForm, messages: list[Any] | None = None
    ) -> Prompt:
        return Prompt(
            prompt_id=0,
            token_ids=token_ids,
            text=text,
            prompt_hash=hash_prompt(token_ids, tokenizer),
            location=record.location,
            form=form,
            messages=None if messages is None else tuple(messages),
        )

    if values is not None:
        token_ids = check_token_ids(record, "prompt_token_ids", values, pair)
        if token_ids[:LEAST_PADDING_RUN] == (tokenizer.pad_token_id,) * LEAST_PADDING_RUN:
            raise record.error(
                "'prompt_token_ids' begins with padding, which would be read as text; cut it off"
            )
        return made_of(token_ids, text_after(tokenizer, (), token_ids), "token ids")
    name, prompt = _find_prompt(record)
    form = "messages" if isinstance(prompt, list) else form_of_text(prompt, tokenizer)
    if isinstance(prompt, list) and chat_template == "raw":
        prompt = join_contents(record, prompt, name)
    if not prompt:
        raise record.error("the prompt is empty")
    if isinstance(prompt, str):
        if chat_template != "apply":
            token_ids = _encode_prompt(record, prompt, tokenizer, form)
            return made_of(check_token_ids(record, name, token_ids, pair), prompt, form)
        if form == "rendered text":
            raise record.error(
                f"a chat template has rendered the prompt {shorten(prompt)} already, and --chat-template apply renders "
                "prompts that are plain; leave that out"
            )
        prompt = [{"role": "user", "content": prompt}]
    text = render_messages(record, prompt, tokenizer, name, generate=True)
    token_ids = tuple(encode_text(tokenizer, text, special_tokens=False))
    if not token_ids:
        raise record.error("the chat template makes nothing of the messages")
    return made_of(check_token_ids(record, name, token_ids, pair), text, form, prompt)


def _find_prompt(record: SourceRecord) -> tuple[str, TextOrMessages]:
    """The field with the prompt of a record, and its text or messages.

    Raises:
        SourceError: if there is none, or there are two.
    """
    messages, prompt = (
        get_field(record, "messages", list, "a list of messages"),
        text_or_messages(record, "prompt"),
    )
    if messages is not None and prompt is not None:
        raise record.error(
            "expected 'prompt' or 'messages' and found both; keep one, or choose by --prompt-column"
        )
    if messages is not None:
        messages = check_messages(record, "messages", messages)
        if messages[-1]["role"] == "assistant":
            raise record.error(
                "the last of 'messages' is the assistant's; leave it out to have the conversation answered, or call "
                "the field 'prompt' to have it continued"
            )
        return "messages", messages
    if prompt is None and is_preference(record):
        prompt = parse_preference(record).prompt
    if prompt is None:
        raise record.error(
            f"expected a field 'prompt' or 'messages' and found {describe_fields(record)}; --prompt-column names "
            "another"
        )
    return "prompt", prompt


def _encode_prompt(record: SourceRecord, text: str, tokenizer: Any, form: SourceForm) -> tuple[int, ...]:
    """Token ids of a prompt of plain text, without an end token that the tokenizer appended.

    A rendered text begins with the begin tokens if the chat template writes them.
    """
    token_ids = encode_text(
        tokenizer,
        text,
        special_tokens=form != "rendered text" or _begin_tokens(tokenizer, str(tokenizer.chat_template))[1],
    )
    text_ids = encode_text(tokenizer, text, special_tokens=False)
    ends_with_eos = len(token_ids) > len(text_ids) and token_ids[-1] == tokenizer.eos_token_id
    if ends_with_eos and (not text_ids or text_ids[-1] != tokenizer.eos_token_id):
        token_ids.pop()
    if not token_ids:
        raise record.error(f"the prompt {shorten(text)} has no tokens")
    return tuple(without_second_begin(tokenizer, token_ids))


def check_token_ids(
    record: SourceRecord, name: str, values: Sequence[Any], pair: TokenLimits
) -> tuple[int, ...]:
    """``values`` of a field, or of its text, as token ids, after checking that both models have them.

    Raises:
        SourceError: if a value is not a token id of the models, or there are none.
    """
    if not values:
        raise record.error(f"{name!r} is empty; give at least one token, or leave the line out")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < pair.vocab_size:
            raise record.error(
                f"expected {name!r} to hold token ids from 0 to {pair.vocab_size - 1} and found {show_value(value)}"
            )
    return tuple(values)


def check_length(record: SourceRecord, what: str, tokens: int, pair: TokenLimits) -> None:
    """Check that a text of ``tokens`` tokens is not longer than the models' context.

    Raises:
        SourceError: if it is, with both lengths.
    """
    if pair.context_length is not None and tokens > pair.context_length:
        raise record.error(
            f"the {what} is {tokens} tokens long and the models read at most {pair.context_length}; shorten it or "
            "leave it out"
        )


def encode_text(tokenizer: Any, text: str, *, special_tokens: bool) -> list[int]:
    """Token ids of ``text``, with or without the special tokens that the tokenizer adds around a text."""
    return list(tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"])


def encode_after(tokenizer: Any, prompt: Prompt, text: str, *, is_rendered: bool) -> list[int]:
    """Token ids of a response's ``text``, such that their text where they follow the prompt is this text.

    Tokenizers as those of Llama 2 and Mistral put a space before a text, which is one too many where the text has its
    own, or the prompt ends with white space. Where neither has any, a log lacks the space, since they drop it when they
    decode a response alone; what a chat template wrote lacks none.

    Args:
        tokenizer: of the prompt.
        prompt: its text precedes the response.
        text: of the response.
        is_rendered: whether a chat template wrote the response.
    """

    def gives_text(token_ids: list[int]) -> bool:
        return text_after(tokenizer, prompt.token_ids, token_ids) == text

    alone = encode_text(tokenizer, text, special_tokens=False)
    lacks_space = not (is_rendered or prompt.text[-1:].isspace() or text[:1].isspace())
    if lacks_space or gives_text(alone):
        return alone
    before, whole = (
        encode_text(tokenizer, each, special_tokens=False) for each in (prompt.text, prompt.text + text)
    )
    within = whole[len(before) :]
    return within if gives_text(within) else alone


def without_second_begin(tokenizer: Any, token_ids: list[int]) -> list[int]:
    """Token ids with the begin tokens once if they are there twice: a text of a log or template begins with them."""
    begin, _ = _begin_tokens(tokenizer, str(getattr(tokenizer, "chat_template", None)))
    return token_ids[len(begin) :] if token_ids[: 2 * len(begin)] == [*begin, *begin] else token_ids


@lru_cache(maxsize=4)
def _begin_tokens(tokenizer: Any, template: str) -> tuple[list[int], bool]:
    """What a tokenizer puts before a text, and whether its chat template ``template`` writes it, too.

    This is the begin token, or several as of GLM.
    """
    token_ids, of_text = (encode_text(tokenizer, "a", special_tokens=special) for special in (True, False))
    begin = token_ids[: token_ids.index(of_text[0])] if set(of_text[:1]) & set(token_ids) else []
    rendered = render_example(tokenizer, [{"role": "user", "content": MARK}])
    return begin, encode_text(tokenizer, rendered, special_tokens=False)[: len(begin)] == begin


def describe_forms(
    kind: SourceKind, forms: Counter[SourceForm], tokenizer: Any, options: DatasetOptions | None = None
) -> tuple[str, ...]:
    """The notes about what the chat template renders of a source that was read, and what not.

    A form of the source has a note only if it could have been read otherwise: texts have none where the tokenizer has
    no chat template, or where they are documents.

    Args:
        kind: what the source was read for.
        forms: how many of its prompts or documents are of each form.
        tokenizer: of the policy.
        options: how it was read, such as a job; None for the defaults.
    """
    template, noun, total = ReadOptions.of(options).chat_template, NOUNS.get(kind, "prompts"), forms.total()
    # "{}" stands for "messages", or "a list of messages" of a single prompt
    treatments: dict[SourceForm, str] = {
        "messages": "{}, rendered by the policy's chat template",
        "rendered text": "plain text that begins as the policy's chat template does",
        "text": "plain text, read without the policy's chat template; --chat-template apply renders them as a user's "
        "message",
    }
    if template == "raw":
        treatments = {"messages": "{}, whose contents are joined; no chat template is applied"}
    elif not getattr(tokenizer, "chat_template", None):
        treatments = {}
    elif kind == "text":
        treatments = {"messages": treatments["messages"]}
    elif template == "apply":
        treatments["text"] = "plain text, rendered as a user's message by the policy's chat template"
    notes: list[str] = []
    has_date = "strftime_now" in str(getattr(tokenizer, "chat_template", ""))
    if has_date and template != "raw" and (forms["messages"] or template == "apply"):
        notes.append("the chat template asks for today's date, and is given 26 July 2024 on every day")
    for form, treatment in treatments.items():
        count = forms[form]
        some = f"the {total} {noun} are" if count == total else f"{count} of the {total} {noun} are"
        if total == 1:
            some = f"the {noun.removesuffix('s')} is"
        if count:
            notes.append(f"{some} {treatment.format('a list of messages' if total == 1 else 'messages')}")
    return tuple(notes)
