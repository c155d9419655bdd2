"""Results as CSV, with a row for each number, and as Markdown, with every text of others escaped."""

import csv
import io
import re
from collections.abc import Iterable, Sequence

from kleash.reports.formatting import make_visible
from kleash.store.codec import encode
from kleash.store.number_rows import NumberRow
from kleash.store.summary_tables import Name, Summary, SummaryTable

CSV_COLUMNS = (
    *("run", "minus", "name", "value", "standard_error", "ci95_low", "ci95_high", "unit"),
    *("tokens", "clusters", "warnings"),
)
PLAIN_NAME = re.compile(r"[\w./:+=, -]*[\w./:+=,-]", re.ASCII)
"""Texts that a code span of Markdown shows as they are, also in a table."""
MARKS = re.compile(r"[\\`*_\[\]|~$#]")
"""Characters that can mean something to Markdown, which a backslash takes from them."""
ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "@&#8203;"}
"""Of characters of HTML, and of a mention of a person, which the invisible character prevents."""
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of a cell that spreadsheets take for a formula."""
LIST_MARK = re.compile(r"(\s*)(?:([-+])|(\d{1,9})([.)]))(?=\s|$)")


def to_csv(rows: Iterable[NumberRow]) -> str:
    """Numbers as CSV with a header line, one number a line, in full precision.

    What a number does not have is empty. Numbers that are not finite are written as in the JSON files: Infinity,
    -Infinity, NaN. Several warnings are joined by "; ". A name that a spreadsheet would run as a formula gets an
    apostrophe in front.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        low, high = (None, None) if row.ci95 is None else row.ci95
        numbers = (row.value, row.standard_error, low, high)
        writer.writerow(
            (
                *map(_cell_text, (row.run, row.minus, row.name)),
                *(*map(_number_text, numbers), row.unit),
                *(row.tokens, row.clusters, _cell_text("; ".join(row.warnings))),
            )
        )
    return text.getvalue()


def _cell_text(text: str) -> str:
    """A text that a spreadsheet shows and does not run."""
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text


def _number_text(value: float | None) -> str:
    """A number with all of its digits; empty without one."""
    return "" if value is None else str(encode(value))


def to_markdown(summary: Summary, notes: Sequence[str] = ()) -> str:
    """A summary in GitHub's Markdown: headline, facts, tables, warnings, and then ``notes``, which are sentences."""
    facts = [f"- {escape_text(label)}: {markdown_text(text)}" for label, text in summary.facts]
    parts = [
        f"**{escape_text(summary.headline)}**",
        *(["\n".join(facts)] if facts else []),
        *map(markdown_table, summary.tables),
        *(
            ["\n".join(f"- warning: {escape_text(text)}" for text in summary.warnings)]
            * bool(summary.warnings)
        ),
        *map(escape_text, notes),
    ]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: SummaryTable) -> str:
    """A table of Markdown, its title in a line before it; columns of numbers and words are aligned to the right.

    The first column, and columns of sentences, are aligned to the left.
    """
    marks = ["---" if is_left else "---:" for is_left in table.is_left]
    lines = [
        *([f"{escape_text(table.title)}:", ""] if table.title else []),
        _table_line(table.header),
        _table_line(marks, is_raw=True),
        *map(_table_line, table.rows),
    ]
    return "\n".join(lines)


def _table_line(texts: Sequence[str], *, is_raw: bool = False) -> str:
    return f"| {' | '.join(texts if is_raw else map(markdown_text, texts))} |"


def markdown_text(text: str) -> str:
    """A text of a summary: a ``Name`` as code, another one escaped."""
    return markdown_code(text) if isinstance(text, Name) else escape_text(text)


def markdown_code(text: str) -> str:
    """A text as code that reads as ``text``, whatever it contains: also within a cell of a table.

    A plain name is a code span. In others, where no code span is right both within and outside of tables, every
    character that could be a mark is a reference in ``<code>``.
    """
    visible = make_visible(text)
    if visible == text and PLAIN_NAME.fullmatch(text):
        return f"`{text}`"
    references = (
        character if character.isalnum() or character in " -./," else f"&#{ord(character)};"
        for character in visible
    )
    return f"<code>{''.join(references)}</code>"


def escape_text(text: str) -> str:
    """A text that Markdown shows as it stands, on one line."""
    escaped = MARKS.sub(r"\\\g<0>", make_visible(text)) if text else ""
    escaped = "".join(ENTITIES.get(character, character) for character in escaped)
    return LIST_MARK.sub(r"\1\3\\\2\4", escaped, count=1) if LIST_MARK.match(escaped) else escaped
