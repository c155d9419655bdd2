"""Sentences about a source: which split and columns are read, and what the chat template renders."""

from collections import Counter
from typing import Any

from kleash.jobs.reading import DatasetOptions, ReadOptions, SourceKind
from kleash.sources.columns import choose_columns, describe_choices, named_columns
from kleash.sources.files import find_source
from kleash.sources.sequences import SourceForm

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


def describe_source(kind: SourceKind, name: str, options: DatasetOptions | None = None) -> tuple[str, ...]:
    """The notes about the files of a source and its columns, of which the first record decides.

    Args:
        kind: what the source is read for.
        name: of the source.
        options: how it is read, such as a job; None for the defaults.

    Raises:
        SourceError: if the first record cannot be read.
    """
    source = find_source(name, kind, options)
    first = next(source.raw_records(), None)
    if first is None:
        return source.notes
    choices = choose_columns(first, kind, source.reading)
    unread = [
        f"the column {name!r} is not read; put it into the messages, as the first, of the role system"
        for name in SYSTEM_COLUMNS
        if isinstance(first.fields.get(name), str) and first.fields[name].strip()
    ]
    is_of_verl = (
        kind == "responses" and first.fields.keys() >= VERL_COLUMNS and not named_columns(source.reading)
    )
    return (*source.notes, *describe_choices(choices), *unread, *((VERL_NOTE,) if is_of_verl else ()))


def describe_forms(
    kind: SourceKind, forms: Counter[SourceForm], tokenizer: Any, options: DatasetOptions | None = None
) -> tuple[str, ...]:
    """The notes about what the chat template renders of a source that was read, and what not.

    Args:
        kind: what the source was read for.
        forms: what its prompts or documents are.
        tokenizer: of the policy.
        options: how it was read, such as a job; None for the defaults.
    """
    template, noun, total = ReadOptions.of(options).chat_template, NOUNS.get(kind, "prompts"), forms.total()
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
    for form, treatment in treatments.items():
        count = forms[form]
        some = f"the {total} {noun} are" if count == total else f"{count} of the {total} {noun} are"
        if total == 1:
            some = f"the {noun.removesuffix('s')} is"
        if count:
            notes.append(f"{some} {treatment.format('a list of messages' if total == 1 else 'messages')}")
    return tuple(notes)
