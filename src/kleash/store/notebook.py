"""Results in notebooks: HTML in one piece, without scripts and with the colours of the page around it."""

from html import escape
from typing import Any

from kleash.errors import KleashError
from kleash.store.codec import encode, to_json
from kleash.store.summary_tables import Name, Summary, SummaryTable, plain_text, summarize

LINE = "1px solid rgba(128,128,128,.4)"
"""A line that is seen on a light and on a dark page."""
CELL = "padding:.15em .6em;text-align:{align};vertical-align:top;white-space:{wrap};border-bottom:" + LINE


class Result:
    """A result as it stands in JSON, and as a notebook shows it: headline, facts, tables and warnings."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return encode(self)

    def to_json(self) -> str:
        """As JSON text; non-finite numbers are strings."""
        return to_json(self)

    def _repr_html_(self) -> str | None:
        """The summary as HTML; None, and then a notebook shows the ``repr``, if the record has no headline."""
        try:
            return to_html(summarize(self))
        except KleashError:
            return None


def to_html(summary: Summary) -> str:
    """A summary as HTML. All texts are escaped, and right-to-left texts stay in their places."""
    facts = "".join(
        f"<div>{_text(label)}: {_text(text)}</div>" for label, text in summary.facts if label != "estimand"
    )
    details = "".join(f"<div>{_text(text)}</div>" for label, text in summary.facts if label == "estimand")
    warnings = "".join(f"<li>{_text(warning)}</li>" for warning in summary.warnings)
    count = f"{len(summary.warnings)} warning{'' if len(summary.warnings) == 1 else 's'}"
    parts = (
        f'<div style="font-weight:600;margin-bottom:.3em">{_text(summary.headline)}</div>',
        f'<div style="opacity:.8;font-size:92%">{facts}</div>' if facts else "",
        *map(_table, summary.tables),
        f"<details open><summary>{count}</summary><ul>{warnings}</ul></details>" if warnings else "",
        f'<details style="opacity:.8;font-size:92%"><summary>what was measured</summary>{details}</details>'
        if details
        else "",
    )
    return f'<div style="color:inherit;background:none;max-width:72em;overflow-x:auto">{"".join(parts)}</div>'


def _table(table: SummaryTable) -> str:
    """A table."""
    styles = [
        CELL.format(align="left", wrap="normal") if is_left else CELL.format(align="right", wrap="nowrap")
        for is_left in table.is_left
    ]
    header = "".join(
        f'<th style="{style};white-space:normal">{_text(text)}</th>'
        for style, text in zip(styles, table.header, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(f'<td style="{style}">{_text(text)}</td>' for style, text in zip(styles, row, strict=True))
        + "</tr>"
        for row in table.rows
    )
    title = f'<div style="margin-top:.5em">{_text(table.title)}</div>' if table.title else ""
    return (
        f'{title}<table style="border-collapse:collapse;margin:.5em 0;color:inherit;'
        f'font-variant-numeric:tabular-nums"><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _text(text: str) -> str:
    """A text, escaped; a ``Name`` in the style of code, which can be broken into lines anywhere."""
    escaped = f"<bdi>{escape(plain_text(text))}</bdi>"
    return f'<code style="overflow-wrap:anywhere">{escaped}</code>' if isinstance(text, Name) else escaped
