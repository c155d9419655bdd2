"""The summary of a result: a headline, facts, tables and warnings, from which formats and notebooks are made."""

import re
from dataclasses import dataclass
from functools import singledispatch

UNKNOWN_INTERVAL = "unknown"
NUMBER_HEADER = ("", "value", "95 % interval", "standard error", "unit")
"""Header of a table whose rows are numbers."""


MAX_WORDS = 40
"""Characters of a text that is a number or a few words, and no sentence."""


class Name(str):
    """A text that is no sentence of kleash, such as a path: shown as it is, in the style of code."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class SummaryTable:
    """A table of texts."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """As wide as the header; a ``Name`` is a text of others."""
    title: str = ""

    @property
    def is_left(self) -> tuple[bool, ...]:
        """Whether each column is aligned to the left: the first one, and those of sentences."""
        return tuple(
            place == 0 or any(len(row[place]) > MAX_WORDS for row in self.rows)
            for place in range(len(self.header))
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a person reads of a result."""

    headline: str
    """The result in one line."""
    facts: tuple[tuple[str, str], ...] = ()
    """What it is about: label and text."""
    tables: tuple[SummaryTable, ...] = ()
    warnings: tuple[str, ...] = ()


@singledispatch
def summarize(result: object) -> Summary:
    """The summary of a result of kleash; ``kleash.store.result_summaries`` has those of all kinds.

    Raises:
        TypeError: if ``result`` is none.
    """
    raise TypeError(f"{type(result).__name__} is no result of kleash")


def plain_text(text: str) -> str:
    """``text`` in characters that every encoding of Unicode has: what is left of undecodable bytes becomes U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def counted(number: int, noun: str) -> str:
    """A number with its noun in the singular or plural."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
