"""How the records of a source are read: its split, its columns, and the chat template."""

from dataclasses import dataclass
from typing import Annotated, Literal

from kleash.jobs.options import Name, Options, one_of, shared_options

SourceKind = Literal["prompts", "text", "responses", "pairs", "rollouts", "whole text"]
"""What is in a source; "whole text" is one text of plain text, not divided into documents."""


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(Options):
    """Which part of a data set is read."""

    split: Name | None = None
    """Split of a data set, such as train; if not given, its only split, or else train."""
    dataset_config: Name | None = None
    """Configuration (subset) of a data set that has several."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions(DatasetOptions):
    """Where the prompts of a source are, and what the chat template renders."""

    prompt_column: Name | None = None
    """Column with the prompts, as text or messages; if not given, the first usual name that is there: prompt, messages,
    question, instruction, query, problem ..."""
    chat_template: Annotated[str, one_of(("apply", "raw"))] | None = None
    """apply: a plain prompt is rendered as a user's message, too. raw: nothing is rendered, and the contents of
    messages are joined by blank lines. If not given, messages are rendered and plain prompts are not."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions(PromptOptions):
    """Which part of a source is read, from which columns, and what the chat template renders."""

    response_column: Name | None = None
    """Column with the responses, for --responses; if not given, the first usual name that is there: response,
    completion, output, answer ..."""
    text_column: Name | None = None
    """Column with the text, for --text; if not given, the first usual name that is there: text, content, document
    ..."""

    @classmethod
    def of(cls, options: DatasetOptions | None) -> "ReadOptions":
        """These options out of a job's, with the defaults of those that it lacks; None for the defaults."""
        return cls() if options is None else cls(**shared_options(options, cls))
