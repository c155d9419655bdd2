"""Sentences about a source: which split and columns are read, and what the chat template renders."""

from collections import Counter
from itertools import islice
from typing import Any, Literal

from kleash.jobs.reading import DatasetOptions, SourceKind
from kleash.sources.chat_rendering import is_rendered
from kleash.sources.columns import describe_choices, named_columns
from kleash.sources.dataset_formats import expand_responses, is_preference
from kleash.sources.rollout_logs import expand_logs
from kleash.sources.source_files import Source, find_source
from kleash.sources.source_records import SourceRecord

NOUNS = {"prompts": "prompts", "responses": "prompts", "text": "documents"}
"""What a chat template renders, by the kind of a source."""
VERL_COLUMNS = frozenset(("input", "output", "gts", "score", "step"))
"""Columns of verl's log of rollouts."""
VERL_NOTE = (
    "verl leaves special tokens out of 'input' and 'output', so the models read other tokens than in the rollout if "
    "its prompts were rendered by a chat template"
)
SYSTEM_COLUMNS = ("system", "system_prompt")
"""Usual names of columns with a system prompt."""


def describe_source(
    kind: SourceKind,
    name: str,
    options: DatasetOptions | None = None,
    *,
    tokenizer: Any = None,
    limit: int | None = None,
) -> tuple[str, ...]:
    """The notes about a source: its files, its columns, and what the chat template renders.

    All records are read, up to ``limit``, if the tokenizer has a chat template or the option is "raw".

    Args:
        kind: what the source is read for.
        name: of the source.
        options: how it is read, such as a job; None for the defaults.
        tokenizer: of the policy.
        limit: largest number of records that are read; None for all.

    Raises:
        SourceError: if a record cannot be read.
    """
    source = find_source(name, kind, options)
    notes = [*source.notes, *describe_choices(source.columns()), *_first_record_notes(source)]
    template = source.reading.chat_template
    if not getattr(tokenizer, "chat_template", None) and template != "raw":
        return tuple(notes)
    records = source.records()
    if kind == "responses":
        records = (response for record in expand_logs(records) for response in expand_responses(record))
    forms = Counter(_form(record, tokenizer) for record in islice(records, limit))
    return (*notes, *_template_notes(forms, NOUNS.get(kind, "prompts"), template, is_text=kind == "text"))


def _first_record_notes(source: Source) -> list[str]:
    """Notes about a system prompt beside the first record, which is not read, and about the program that wrote it."""
    record = None if source.kind == "rollouts" else next(source.raw_records(), None)
    fields = (record and record.fields) or {}
    notes = [
        f"the column {name!r} is not read; put it into the messages, as the first, of the role system"
        for name in SYSTEM_COLUMNS
        if isinstance(fields.get(name), str) and fields[name].strip()
    ]
    if source.kind == "responses" and fields.keys() >= VERL_COLUMNS and not named_columns(source.reading):
        notes.append(VERL_NOTE)
    return notes


def _form(record: SourceRecord, tokenizer: Any) -> Literal["messages", "text", "rendered text", "token ids"]:
    """What the prompt or document of a record is."""
    fields = record.fields
    if fields is None:
        return _form_of_text(record.text, tokenizer)
    if fields.get("prompt_token_ids") is not None:
        return "token ids"
    has_text = fields.get("text") is not None or isinstance(fields.get("prompt"), str)
    if not has_text and is_preference(record) and fields.get("prompt") is None:
        has_text = isinstance(fields["chosen"], str)
    return _form_of_text(fields.get("prompt"), tokenizer) if has_text else "messages"


def _form_of_text(text: Any, tokenizer: Any) -> Literal["text", "rendered text"]:
    """Whether a plain prompt was rendered by the chat template of the tokenizer; other texts are not looked at."""
    has_template = isinstance(text, str) and getattr(tokenizer, "chat_template", None)
    return "rendered text" if has_template and is_rendered(text, tokenizer) else "text"


def _template_notes(forms: Counter[str], noun: str, template: str | None, *, is_text: bool) -> list[str]:
    """What the chat template renders and what not."""
    total = sum(forms.values())

    def some(count: int) -> str:
        if total == 1:
            return f"the {noun.removesuffix('s')} is"
        return f"the {total} {noun} are" if count == total else f"{count} of the {total} {noun} are"

    messages, plain, notes = forms["messages"], forms["text"], list[str]()
    list_of_messages = "a list of messages" if total == 1 else "messages"
    if template == "raw":
        if messages:
            notes.append(
                f"{some(messages)} {list_of_messages}, whose contents are joined; no chat template is applied"
            )
        return notes
    if messages:
        notes.append(f"{some(messages)} {list_of_messages}, rendered by the policy's chat template")
    if forms["rendered text"] and not is_text:
        notes.append(
            f"{some(forms['rendered text'])} plain text that begins as the policy's chat template does"
        )
    if not plain or is_text:
        return notes
    if template == "apply":
        notes.append(f"{some(plain)} plain text, rendered as a user's message by the policy's chat template")
    else:
        notes.append(
            f"{some(plain)} plain text, read without the policy's chat template; --chat-template apply renders "
            "them as a user's message"
        )
    return notes
