"""Which columns of a source are its prompts, responses and texts: named by an option, or found by their usual names."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from kleash.errors import SourceError
from kleash.jobs.reading import ReadOptions, SourceKind
from kleash.sources.source_records import SourceRecord, describe_fields, shorten, show_value

CONVERSATIONS = ("messages", "conversations", "conversation")
"""Names of columns with messages."""
PROMPT_COLUMNS = (
    "prompt",
    *CONVERSATIONS,
    "question",
    "instruction",
    "query",
    "problem",
    "input",
    "inputs",
    "input_prompt",
)
"""Usual names of the column with the prompts, the most telling first."""
RESPONSE_COLUMNS = (
    *("response", "completion", "output", "answer", "solution", "generation", "generated_text"),
    *("model_output", "model_response", "output_response", "prediction", "reply"),
    *("responses", "completions", "outputs", "generations"),
)
"""Usual names of the column with the responses."""
TEXT_COLUMNS = (
    *("text", "content", "document", "article", "body", "passage", "raw_content", "code", "story"),
    *CONVERSATIONS,
)
"""Usual names of the column with the text."""
FIELDS = frozenset(
    {
        *("prompt", "messages", "prompt_token_ids", "text", "response", "response_token_ids"),
        *("completion", "chosen", "rejected"),
    }
)
"""Names of fields that are read from a record as they are."""
USUAL_COLUMNS = FIELDS.union(PROMPT_COLUMNS, RESPONSE_COLUMNS, TEXT_COLUMNS)
"""Every name by which a column can be found."""
PROMPT_FIELDS = ("prompt_token_ids", "messages", "prompt")
RESPONSE_FIELDS = ("response_token_ids", "response", "completion")
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}
"""Names of speakers in ShareGPT's conversations, {"from": ..., "value": ...}, and their roles."""


class ColumnChoice(NamedTuple):
    """The columns that stand for a field, and alternatives that could have."""

    field: str
    """"prompt", "response" or "text"."""
    columns: tuple[str, ...]
    """One column, or "instruction" and "input"."""
    ready: tuple[str, ...] = ()
    """Fields in whose presence a record needs no choice; none if an option names the column."""
    alternatives: tuple[str, ...] = ()
    """Other columns of a usual name."""

    @property
    def is_named(self) -> bool:
        """Whether an option names the column, so that every record must have it."""
        return not self.ready


def named_columns(reading: ReadOptions) -> frozenset[str]:
    """The columns that options name."""
    names = (reading.prompt_column, reading.response_column, reading.text_column)
    return frozenset(name for name in names if name is not None)


def choose_columns(first: SourceRecord, kind: SourceKind, reading: ReadOptions) -> tuple[ColumnChoice, ...]:
    """Choose the columns that are read as the fields "prompt", "response" or "text", by the first record of a source.

    Args:
        first: the first record.
        kind: what the source is read as.
        reading: the options that name columns.

    Returns:
        A choice for each field whose column has another name; empty if the fields have their own names.

    Raises:
        SourceError: if a column that an option names is not there, with the columns that are.
    """
    fields = first.fields
    if kind == "rollouts":
        return ()
    if fields is None:
        names = sorted(named_columns(reading))
        if names:
            raise SourceError(f"{first.location}: it is plain text, which has no column {names[0]!r}")
        return ()
    if kind == "text":
        prompt_and_completion = ("prompt",) if {"prompt", "completion"} <= fields.keys() else ()
        ready = ("text", "messages", *prompt_and_completion)
        choice = _choose(first, "text", reading.text_column, ready, TEXT_COLUMNS)
        return () if choice is None else (choice,)
    pair = ("chosen",) if "chosen" in fields and "rejected" in fields else ()
    # A preference pair beside a question is an answer to it; otherwise its prompt is the common beginning.
    has_question = any(name in fields for name in ("question", "instruction", "query"))
    ready = PROMPT_FIELDS if has_question else (*PROMPT_FIELDS, *pair)
    choices = [_choose(first, "prompt", reading.prompt_column, ready, PROMPT_COLUMNS)]
    if kind == "responses":
        prompt_columns = {column for choice in choices if choice is not None for column in choice.columns}
        # The last message of a conversation is the response, unless the prompt is in another column.
        may_be_conversation = reading.prompt_column is None or reading.prompt_column in CONVERSATIONS
        ready = (*RESPONSE_FIELDS, *pair, *(CONVERSATIONS if may_be_conversation else ()))
        usual_names = [name for name in RESPONSE_COLUMNS if name not in prompt_columns]
        choices.append(_choose(first, "response", reading.response_column, ready, usual_names))
    return tuple(choice for choice in choices if choice is not None)


def rename_columns(record: SourceRecord, choices: Sequence[ColumnChoice]) -> SourceRecord:
    """The record with the fields that its chosen columns stand for; ``columns`` keeps the names of the source.

    Raises:
        SourceError: if a named column is not there, or a chosen one holds neither text, messages nor token ids.
    """
    needed = [choice for choice in choices if _is_needed(record, choice)]
    if not needed:
        return record
    columns = dict(record.fields or {})
    fields = dict(columns)
    for choice in needed:
        for name in _FIELDS_OF[choice.field]:
            fields.pop(name, None)
    for choice in needed:
        name, value = _field_and_value(record, choice)
        fields[name] = value
    return replace(record, fields=fields, columns=columns)


def _is_needed(record: SourceRecord, choice: ColumnChoice) -> bool:
    """Whether a choice applies to a record; a named column must be in each."""
    fields = record.fields or {}
    if choice.is_named:
        _require_column(record, choice.columns[0], choice.field)
        return True
    return fields.get(choice.columns[0]) is not None


def _require_column(record: SourceRecord, name: str, field: str) -> None:
    if name not in (record.fields or {}):
        raise SourceError(
            f"{record.location}: there is no column {shorten(name)}; there are {describe_fields(record)}: give one of "
            f"them as --{field}-column"
        )


def describe_choices(choices: Iterable[ColumnChoice]) -> tuple[str, ...]:
    """A note for each choice of a column that no option named."""
    return tuple(
        f"{choice.field}s are read from {' and '.join(map(repr, choice.columns))}"
        + (f"; {', '.join(map(repr, choice.alternatives))} could be meant too" if choice.alternatives else "")
        + f"; --{choice.field}-column names another column"
        for choice in choices
        if not choice.is_named
    )


def as_messages(value: Any) -> Any:
    """ShareGPT's conversations as messages with "role" and "content"; any other value as it is."""
    if not _is_list_of(value, dict) or not all(
        isinstance(entry.get("from"), str) and "value" in entry for entry in value
    ):
        return value
    return [
        {"role": ROLES.get(entry["from"].lower(), entry["from"]), "content": entry["value"]}
        for entry in value
    ]


def _choose(
    record: SourceRecord, field: str, option: str | None, ready: Collection[str], usual_names: Iterable[str]
) -> ColumnChoice | None:
    """The column that stands for ``field``; None if a field of ``ready`` is there, or nothing is.

    Args:
        record: the first, with fields.
        field: "prompt", "response" or "text".
        option: the column that an option names.
        ready: fields in whose presence no column is chosen.
        usual_names: names of columns to look for, in this order, without regard to case.
    """
    fields = record.fields or {}
    if option is not None:
        _require_column(record, option, field)
        return ColumnChoice(field, (option,))
    if any(fields.get(name) is not None for name in ready):
        return None
    present = {name.lower(): name for name in reversed(fields) if fields[name] is not None}
    names = [present[name] for name in usual_names if name in present]
    if not names:
        return None
    columns, alternatives = (names[0],), tuple(names[1:])
    if columns[0] == "instruction" and isinstance(fields.get("input", 0), str | None):
        columns = ("instruction", "input")
        alternatives = tuple(name for name in alternatives if name != "input")
    return ColumnChoice(field, columns, tuple(ready), alternatives)


_FIELDS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prompt": PROMPT_FIELDS,
        "response": (*RESPONSE_FIELDS, "chosen", "rejected"),
        "text": ("text", "messages", "prompt", "completion"),
    }
)
"""Fields that a choice replaces."""


def _field_and_value(record: SourceRecord, choice: ColumnChoice) -> tuple[str, Any]:
    """The field that a choice sets, and its value."""
    fields = record.fields or {}
    column = choice.columns[0]
    value = as_messages(fields[column])
    if len(choice.columns) > 1:
        parts = [fields[name] for name in choice.columns if fields.get(name)]
        if parts and all(isinstance(part, str) for part in parts):
            return choice.field, "\n\n".join(parts)
    if isinstance(value, str):
        return choice.field, value
    if _is_list_of(value, dict):
        return ("messages" if choice.field != "response" and column != "prompt" else choice.field), value
    if choice.field != "text" and _is_list_of(value, int):
        return f"{choice.field}_token_ids", value
    if choice.field == "response" and _is_list_of(value, str):
        return choice.field, value
    raise SourceError(
        f"{record.location}: expected {column!r} to be text or a list of messages and found {show_value(value)}"
    )


def _is_list_of(value: Any, kind: type) -> bool:
    """Whether a value is a list with at least one entry, all of type ``kind``; True and False are no numbers."""
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(entry, kind) and not isinstance(entry, bool) for entry in value)
