"""What a page of HTML consists of, by the parser of the standard library."""

import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"br", "col", "hr", "img", "input", "link", "meta"}


class Page(HTMLParser):
    """Tags with their attributes, scripts, the cells of tables, and the text outside of scripts."""

    def __init__(self, html: str | Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.texts: list[str] = []
        self.cells: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html.read_text(encoding="utf-8") if isinstance(html, Path) else html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts.append((self.tags[-1][1], data))
        elif self.cdata_elem is None:
            self.texts.append(data)
            if "td" in self.open or "th" in self.open:
                self.cells[-1][-1] += data

    @property
    def text(self) -> str:
        """The text as it stands, of one line."""
        return re.sub(r"\s+", " ", "".join(self.texts))

    @property
    def words(self) -> str:
        """The text of one line, with a space between elements."""
        return re.sub(r"\s+", " ", " ".join(self.texts))

    @property
    def names(self) -> list[str]:
        """The names of the tags."""
        return [name for name, _ in self.tags]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of the tags of a name."""
        return [attributes for name, attributes in self.tags if name == tag]
