"""Which columns of a source are its prompts, responses and texts: named by an option, or found by their usual names."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kleash.jobs.reading import ReadOptions, SourceKind
from kleash.sources.records import SourceRecord, describe_fields, is_list_of, shorten, show_value

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


FIELDS_OF: Mapping[str, tuple[str, ...]] = {
    "prompt": PROMPT_FIELDS,
    "response": (*RESPONSE_FIELDS, "chosen", "rejected"),
    "text": ("text", "messages", "prompt", "completion"),
}
"""Fields that a choice of a column replaces."""


class ColumnChoice(NamedTuple):
    """The columns that stand for a field, and alternatives that could have."""

    field: str
    """"prompt", "response" or "text"."""
    columns: tuple[str, ...]
    """One column, or "instruction" and "input"."""
    is_named: bool = False
    """Whether an option names the column, so that every record must have it."""
    alternatives: tuple[str, ...] = ()
    """Other columns of a usual name."""


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
    if kind == "text":
        prompt_and_completion = ("prompt",) if {"prompt", "completion"} <= fields.keys() else ()
        ready = ("text", "messages", *prompt_and_completion)
        return _choose(first, "text", reading.text_column, ready, TEXT_COLUMNS)
    pair = ("chosen",) if "chosen" in fields and "rejected" in fields else ()
    # A preference pair beside a question is an answer to it; otherwise its prompt is the common beginning.
    has_question = any(name in fields for name in ("question", "instruction", "query"))
    ready = PROMPT_FIELDS if has_question else (*PROMPT_FIELDS, *pair)
    choices = _choose(first, "prompt", reading.prompt_column, ready, PROMPT_COLUMNS)
    if kind != "responses":
        return choices
    prompt_columns = [column for choice in choices for column in choice.columns]
    # The last message of a conversation is the response, unless the prompt is in another column.
    may_be_conversation = reading.prompt_column is None or reading.prompt_column in CONVERSATIONS
    ready = (*RESPONSE_FIELDS, *pair, *(CONVERSATIONS if may_be_conversation else ()))
    usual_names = [name for name in RESPONSE_COLUMNS if name not in prompt_columns]
    return (*choices, *_choose(first, "response", reading.response_column, ready, usual_names))


def _choose(
    record: SourceRecord, field: str, option: str | None, ready: Collection[str], usual_names: Iterable[str]
) -> tuple[ColumnChoice, ...]:
    """The choice of the column that stands for ``field``; empty if a field of ``ready`` is there, or nothing is.

    Args:
        record: the first.
        field: "prompt", "response" or "text".
        option: the column that an option names.
        ready: fields in whose presence no column is chosen.
        usual_names: names of columns to look for, in this order, without regard to case.
    """
    fields = record.fields
    if option is not None:
        return (ColumnChoice(field, (option,), is_named=True),)
    present = {name.lower(): name for name in reversed(fields) if fields[name] is not None}
    names = [present[name] for name in usual_names if name in present]
    if not names or any(fields.get(name) is not None for name in ready):
        return ()
    columns, alternatives = names[:1], names[1:]
    if columns == ["instruction"] and isinstance(fields.get("input", 0), str | None):
        columns = ["instruction", "input"]
        alternatives = [name for name in alternatives if name != "input"]
    return (ColumnChoice(field, tuple(columns), alternatives=tuple(alternatives)),)


def rename_columns(record: SourceRecord, choices: Sequence[ColumnChoice]) -> SourceRecord:
    """The record with the fields that its chosen columns stand for; ``columns`` keeps the names of the source.

    Raises:
        SourceError: if a named column is not there, or a chosen one holds neither text, messages nor token ids.
    """
    needed = [choice for choice in choices if _is_needed(record, choice)]
    if not needed:
        return record
    replaced = {name for choice in needed for name in FIELDS_OF[choice.field]}
    other_fields = {name: value for name, value in record.fields.items() if name not in replaced}
    return record.with_fields(other_fields | dict(_field_and_value(record, choice) for choice in needed))


def _is_needed(record: SourceRecord, choice: ColumnChoice) -> bool:
    """Whether a choice applies to a record; a named column must be in each.

    Raises:
        SourceError: if it is not, with the columns that are.
    """
    column = choice.columns[0]
    if choice.is_named and column not in record.fields:
        raise record.error(
            f"there is no column {shorten(column)}; there are {describe_fields(record)}: give one of them as "
            f"--{choice.field}-column"
        )
    return choice.is_named or record.fields.get(column) is not None


def describe_choices(choices: Iterable[ColumnChoice], kind: SourceKind) -> tuple[str, ...]:
    """A note for each choice of a column that no option named; pairs have no such option."""
    return tuple(
        f"{choice.field}s are read from {' and '.join(map(repr, choice.columns))}"
        + (f"; {', '.join(map(repr, choice.alternatives))} could be meant too" if choice.alternatives else "")
        + (
            "; call another one 'prompt' if it is meant"
            if kind == "pairs"
            else f"; --{choice.field}-column names another column"
        )
        for choice in choices
        if not choice.is_named
    )


def as_messages(value: Any) -> Any:
    """ShareGPT's conversations as messages with "role" and "content"; any other value as it is."""
    if not is_list_of(value, dict) or not all(
        isinstance(entry.get("from"), str) and "value" in entry for entry in value
    ):
        return value
    return [
        {"role": ROLES.get(entry["from"].lower(), entry["from"]), "content": entry["value"]}
        for entry in value
    ]


def _field_and_value(record: SourceRecord, choice: ColumnChoice) -> tuple[str, Any]:
    """The field that a choice sets, and its value."""
    field, column = choice.field, choice.columns[0]
    parts = [record.fields[name] for name in choice.columns if record.fields.get(name)]
    if len(choice.columns) > 1 and is_list_of(parts, str):
        return field, "\n\n".join(parts)
    value = as_messages(record.fields[column])
    if isinstance(value, str) or (field == "response" and is_list_of(value, str)):
        return field, value
    if is_list_of(value, dict):
        return ("messages" if field != "response" and column != "prompt" else field), value
    if field != "text" and is_list_of(value, int):
        return f"{field}_token_ids", value
    raise record.error(f"expected {column!r} to be text or a list of messages and found {show_value(value)}")
