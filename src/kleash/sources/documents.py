"""Documents of a source file, cut into windows of at most the context length."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

from kleash.errors import OptionError, SourceError
from kleash.jobs.reading import DatasetOptions
from kleash.sources.chat_rendering import join_contents, render_messages
from kleash.sources.dataset_formats import text_or_conversation
from kleash.sources.files import Source, find_source
from kleash.sources.prompts import check_token_ids, encode_text, without_second_begin
from kleash.sources.records import SourceRecord, describe_fields
from kleash.sources.sequences import SourceForm, TokenLimits, TokenSequence, hash_tokens, text_after

DEFAULT_WINDOW = 2048


def read_text(
    name: str,
    pair: TokenLimits,
    *,
    window: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    reading: DatasetOptions | None = None,
) -> Iterator[TokenSequence]:
    """Read the documents of a source as windows: records with "text", or plain text with blank lines between.

    Window ``k`` of a document reads the tokens ``k·stride`` to ``k·stride + window - 1`` and predicts the token after
    each. It scores the tokens that no earlier window scored: every token of a document except the first is scored
    exactly once, and those after the first ``window`` with at least ``window - stride`` tokens of context.
    ``prompt_id`` is the document, ``sample_id`` the window, and ``prompt_hash`` the hash of all tokens of the window.
    A document of fewer than two tokens has no windows, but is counted in ``prompt_id``.

    Args:
        name: the file, of JSONL, a JSON array, CSV, Parquet, Arrow or plain text; "-" for standard input;
            "shipped:text"; or a data set, as ``find_source`` takes it. One document at a time is held in memory (of a
            JSON array, all). A record without "text" may have "messages", rendered by the chat template, or "prompt"
            and "completion", which are joined.
        pair: the models, whose tokenizer and context length are used.
        window: number of tokens that a model reads at once; None is 2048, or the context length if that is shorter.
        stride: number of tokens from the start of a window to the start of the next, at most ``window``; None is
            ``window``.
        limit: largest number of documents to read; None for all.
        reading: split, column and chat template, such as a job; None for the defaults.

    Raises:
        OptionError: if the window is longer than the context, or the stride is not from 1 to the window.
        SourceError: if a line cannot be read as a document, or there is nothing to score.
    """
    window, stride = resolve_window(pair.context_length, window, stride)
    return _windows(find_source(name, "text", reading), pair, window, stride, limit)


def resolve_window(context_length: int | None, window: int | None, stride: int | None) -> tuple[int, int]:
    """The window and stride of ``read_text``, with its defaults for None; ``context_length`` of the models.

    Raises:
        OptionError: if the window is longer than the context, or the stride is not from 1 to the window.
    """
    window = min(filter(None, (DEFAULT_WINDOW, context_length))) if window is None else window
    stride = window if stride is None else stride
    if context_length is not None and window > context_length:
        raise OptionError(
            f"a window of {window} tokens is more than the {context_length} that the models read; give a shorter one"
        )
    if not 1 <= stride <= window:
        raise OptionError(
            f"a stride of {stride} tokens does not suit a window of {window}; give 1 to {window}"
        )
    return window, stride


def count_documents(
    name: str, tokenizer: Any = None, *, limit: int | None = None, reading: DatasetOptions | None = None
) -> Counter[SourceForm]:
    """The number of documents of a source that ``read_text`` would read, by what they are; nothing is tokenised.

    Args:
        name: as in ``read_text``.
        tokenizer: its chat template renders records of messages; None if there are none.
        limit: largest number of documents to count; None for all.
        reading: as in ``read_text``.

    Raises:
        SourceError: if a line cannot be read as a document.
    """
    return Counter(
        form for _, form, _ in islice(_documents(find_source(name, "text", reading), tokenizer), limit)
    )


def _windows(
    source: Source, pair: TokenLimits, window: int, stride: int, limit: int | None
) -> Iterator[TokenSequence]:
    """Iterate over the windows of a source, whose size and stride are valid."""
    has_windows, tokenizer = False, pair.tokenizer
    for number, (text, form, record) in enumerate(islice(_documents(source, tokenizer), limit)):
        # of a rendered conversation, without tokens that the template did not write
        is_rendered = form == "messages" and source.reading.chat_template != "raw"
        token_ids = encode_text(tokenizer, text, special_tokens=not is_rendered)
        token_ids = tuple(token_ids if is_rendered else without_second_begin(tokenizer, token_ids))
        for index, (start, score_start, stop) in enumerate(window_spans(len(token_ids), window, stride)):
            has_windows = True
            yield TokenSequence(
                prompt_id=number,
                sample_id=index,
                prompt_ids=check_token_ids(record, "text", token_ids[start:score_start], pair),
                response_ids=check_token_ids(record, "text", token_ids[score_start:stop], pair),
                prompt_text=text_after(tokenizer, (), token_ids[start:score_start]),
                response_text=text_after(
                    tokenizer, token_ids[start:score_start], token_ids[score_start:stop]
                ),
                prompt_hash=hash_tokens(token_ids[start:stop]),
                location=record.location,
                prompt_form=form,
            )
    if not has_windows:
        raise SourceError(
            f"{source.name} holds no document of two tokens or more, so there is nothing to score"
        )


def window_spans(tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Iterate over the windows of a document of ``tokens`` tokens: first token, first scored token, and end.

    A window has one token more than a model reads at once: the last is predicted only. Tokens from the first scored one
    to the end are scored.
    """
    score_start, start = 1, 0
    while score_start < tokens:
        stop = min(start + window + 1, tokens)
        yield start, score_start, stop
        score_start, start = stop, start + stride


def _documents(source: Source, tokenizer: Any) -> Iterator[tuple[str, SourceForm, SourceRecord]]:
    """Iterate over the documents of a source: the text of each, what the source has for it, and its record."""
    for record in source.records():
        document = text_or_conversation(record)
        if document is None:
            raise record.error(
                f"expected a field 'text' and found {describe_fields(record)}; --text-column names another"
            )
        if isinstance(document, str):
            yield document, "text", record
        elif source.reading.chat_template == "raw":
            yield join_contents(record, document, "messages"), "messages", record
        else:
            yield render_messages(record, document, tokenizer, "messages"), "messages", record
