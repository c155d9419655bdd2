"""How the records of a source are read: its split, its columns, and the chat template."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from kleash.errors import OptionError

SourceKind = Literal["prompts", "text", "responses", "pairs", "rollouts", "whole text"]
"""What is in a source; "whole text" is one text of plain text, not divided into documents."""
CHAT_TEMPLATES = ("apply", "raw")


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Which part of a data set is read."""

    split: str | None = None
    """Split of a data set, such as train; if not given, its only split, or else train."""
    dataset_config: str | None = None
    """Configuration (subset) of a data set that has several."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions(DatasetOptions):
    """Where the prompts of a source are, and what the chat template renders."""

    prompt_column: str | None = None
    """Column with the prompts, as text or messages; if not given, the first usual name that is there: prompt, messages,
    question, instruction, query, problem ..."""
    chat_template: str | None = None
    """apply: a plain prompt is rendered as a user's message, too. raw: nothing is rendered, and the contents of
    messages are joined by blank lines. If not given, messages are rendered and plain prompts are not."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions(PromptOptions):
    """Which part of a source is read, from which columns, and what the chat template renders."""

    response_column: str | None = None
    """Column with the responses, for --responses; if not given, the first usual name that is there: response,
    completion, output, answer ..."""
    text_column: str | None = None
    """Column with the text, for --text; if not given, the first usual name that is there: text, content, document
    ..."""

    @classmethod
    def of(cls, options: DatasetOptions | None) -> "ReadOptions":
        """These options out of a job's, with the defaults of those that it lacks; None for the defaults."""
        return cls(**{name: getattr(options, name) for name in READ_OPTIONS if hasattr(options, name)})


READ_OPTIONS = tuple(option.name for option in fields(ReadOptions))


def check_read_options(options: Any) -> None:
    """Check the values of a job's reading options, whose types are checked already.

    Raises:
        OptionError: if ``chat_template`` is neither "apply" nor "raw", or a name is empty.
    """
    template = getattr(options, "chat_template", None)
    if template is not None and template not in CHAT_TEMPLATES:
        raise OptionError(f"--chat-template must be one of {', '.join(CHAT_TEMPLATES)}; it is {template!r}")
    for name in READ_OPTIONS:
        if getattr(options, name, None) == "":
            raise OptionError(f"--{name.replace('_', '-')} is empty; give a name, or leave it out")
