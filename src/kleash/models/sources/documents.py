"""Documents of a source file, cut into windows of at most the context length."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from kleash.errors import OptionError, SourceError
from kleash.models.pair import Pair
from kleash.models.sequences import TokenSequence, hash_tokens
from kleash.models.sources.dataset_formats import document_text
from kleash.models.sources.prompts import describe_fields, encode_text
from kleash.models.sources.records import SourceRecord
from kleash.models.sources.source_files import read_documents, source_path

WINDOW = 2048


def read_text(
    name: str, pair: Pair, *, window: int | None = None, stride: int | None = None, limit: int | None = None
) -> Iterator[TokenSequence]:
    """The windows of a source's documents: records with "text", or plain text with a blank line between
    documents.

    Window ``k`` of a document reads its tokens ``k·stride`` to ``k·stride + window - 1`` and so predicts the
    one after each. It scores those that no window before it has: every token but the first of a document is
    scored exactly once, and after the first ``window`` of them with at least ``window - stride`` tokens of
    context. ``prompt_id`` is the document, ``sample_id`` the window, ``prompt_hash`` stands for all the
    window's tokens. Documents of fewer than two tokens have nothing to score and keep their number.

    Args:
        name: the file, of JSONL, a JSON array, CSV, Parquet or plain text; "-" for standard input; or
            "shipped:text". One document at a time is held in memory (of a JSON array, all). A record without "text"
            may have "messages", written with the chat template, or "prompt" and "completion", which are joined.
        pair: whose tokenizer and context count.
        window: tokens a model reads at once; None is 2048, or the context where that is shorter.
        stride: tokens from one window to the next, at most ``window``; None is ``window``.
        limit: the most documents to read; None for all.

    Raises:
        OptionError: if window or stride cannot be.
        SourceError: if a line cannot be read as a document, or there is nothing to score.
    """
    window, stride = resolve_window(pair, window, stride)
    return _windows(name, pair, window, stride, limit)


def resolve_window(pair: Pair, window: int | None, stride: int | None) -> tuple[int, int]:
    """What ``read_text`` takes where they are None.

    Raises:
        OptionError: if they cannot be.
    """
    window = min(filter(None, (WINDOW, pair.context_length))) if window is None else window
    stride = window if stride is None else stride
    if pair.context_length is not None and window > pair.context_length:
        raise OptionError(
            f"a window of {window} tokens is more than the {pair.context_length} that the models read; give a "
            "shorter one"
        )
    if not 1 <= stride <= window:
        raise OptionError(
            f"a stride of {stride} tokens does not suit a window of {window}; give 1 to {window}"
        )
    return window, stride


def count_documents(name: str, tokenizer: Any = None, *, limit: int | None = None) -> int:
    """How many documents ``read_text`` will find: each line is read and none is tokenised.

    Args:
        name: as in ``read_text``.
        tokenizer: whose chat template writes records of messages; not needed where there are none.
        limit: the most documents to read; None for all.

    Raises:
        SourceError: if a line cannot be read as a document.
    """
    return sum(1 for _ in islice(_documents(source_path(name), tokenizer), limit))


def _windows(name: str, pair: Pair, window: int, stride: int, limit: int | None) -> Iterator[TokenSequence]:
    path = source_path(name)
    empty = True
    for document, record in enumerate(islice(_documents(path, pair.tokenizer), limit)):
        token_ids = tuple(encode_text(pair.tokenizer, record.text, special=True))
        for sample, (start, first, stop) in enumerate(window_spans(len(token_ids), window, stride)):
            empty = False
            yield TokenSequence(
                prompt_id=document,
                sample_id=sample,
                prompt_ids=token_ids[start:first],
                response_ids=token_ids[first:stop],
                prompt_text=pair.tokenizer.decode(list(token_ids[start:first])),
                response_text=pair.tokenizer.decode(list(token_ids[first:stop])),
                prompt_hash=hash_tokens(token_ids[start:stop]),
                location=record.location,
            )
    if empty:
        raise SourceError(f"{name} holds no document of two tokens or more, so there is nothing to score")


def window_spans(tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Where each window starts, where its scored tokens start, and where it stops, in a document of
    ``tokens``."""
    scored, start = 1, 0
    while scored < tokens:
        stop = min(start + window + 1, tokens)
        yield start, scored, stop
        scored, start = stop, start + stride


def _documents(path: Path, tokenizer: Any) -> Iterator[SourceRecord]:
    for record in read_documents(path):
        if record.fields is None:
            yield record
            continue
        text = document_text(record, tokenizer)
        if text is None:
            raise SourceError(
                f"{record.location}: expected a field 'text' and found {describe_fields(record)}"
            )
        yield SourceRecord(number=record.number, location=record.location, text=text)
