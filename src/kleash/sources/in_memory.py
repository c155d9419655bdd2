"""Sources in memory: lists, data sets and data frames as records, and as the file of a run that holds them."""

import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kleash.errors import KleashError, RunFolderError, SourceError
from kleash.extras import import_extra
from kleash.jobs.reading import SourceKind
from kleash.sources.records import is_message_list, show_value
from kleash.store.atomic import write_atomically
from kleash.store.job_folder import ADVICE_IF_LOCKED, HEADER, SOURCE
from kleash.store.locks import folder_lock


def records_in_memory(data: Iterable[Any], kind: SourceKind) -> Iterator[dict[str, Any]]:
    """Iterate over the records of a source in memory, with the fields of a JSONL file.

    Args:
        data: texts, lists of messages, or records by column, such as the rows of a ``datasets.Dataset``; or a data
            frame of pandas, Polars or Arrow.
        kind: what the source is read for: a text is the field "text" of a document, otherwise "prompt".

    Raises:
        SourceError: if an entry is none of these, or ``data`` is a dictionary, such as one of splits.
    """
    rows: Iterable[Any] = data
    if hasattr(data, "columns"):
        frame = import_extra("pyarrow", "models").RecordBatchReader.from_stream(data)
        rows = (row for batch in frame for row in batch.to_pylist())
    elif isinstance(data, (Mapping, bytes)) or not isinstance(data, Iterable):
        what = f"the keys {', '.join(map(str, data))}" if isinstance(data, Mapping) else show_value(data)
        raise SourceError(
            f"{kind} are a file's name, a list, a data set's split or a data frame, and not {what}"
        )
    for number, row in enumerate(rows, start=1):
        if isinstance(row, str) and kind in ("prompts", "text"):
            yield {"text" if kind == "text" else "prompt": row}
        elif isinstance(row, Mapping) and row.keys() != {"role", "content"}:  # a message, not in a list
            yield dict(row)
        elif is_message_list(row):
            yield {"messages": row}
        else:
            forms = (
                'a list of messages or a record with "prompt" and "response"'
                if kind in ("responses", "rollouts")
                else "a text, a list of messages or a record"
            )
            raise SourceError(f"{kind}, entry {number}: expected {forms} and found {show_value(row)}")


def to_jsonl(data: Iterable[Any], kind: SourceKind) -> bytes:
    """The JSONL file of a source in memory.

    Values that JSON has no word for, such as dates, become texts; arrays become lists.

    Raises:
        SourceError: as ``records_in_memory``, or if there is no record.
    """
    lines = (
        json.dumps(
            record, ensure_ascii=False, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x)
        )
        for record in records_in_memory(data, kind)
    )
    content = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
    if not content:
        raise SourceError(f"there is no entry among the {kind} given; give at least one")
    return content


@contextmanager
def naming_entries(path: Path, kind: str) -> Generator[None]:
    """Context whose errors name the entries of a source in memory, not the lines of its file; "" if it is a file."""
    try:
        yield
    except KleashError as error:
        if kind:
            error.args = (str(error).replace(f"{path}, line ", f"{kind}, entry "),)
        raise


def write_source(data: Iterable[Any], kind: SourceKind, folder: Path) -> bool:
    """Write a source in memory into the folder of a run, as ``source.jsonl``, which the run then reads.

    So a run of a list is hashed, resumed and repeated as one of a file. Returns whether it was not there before.

    Raises:
        SourceError: as ``to_jsonl``.
        RunFolderError: if the folder holds the run of another source, or cannot be written.
    """
    content = to_jsonl(data, kind)
    path = folder / SOURCE
    with folder_lock(folder, ADVICE_IF_LOCKED, on_wait=lambda: None):
        stored = path.read_bytes() if path.exists() else None
        if stored is None and not (folder / HEADER).exists():
            write_atomically(path, content)
        elif stored != content:
            raise RunFolderError(
                f"{folder} holds a run of another source; give another folder as out, or delete it"
            )
    return stored is None
