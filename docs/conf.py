"""The site: `make docs` builds it in build/docs, which needs no network to be made or read."""

import json
import os
import re
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

from kleash import __version__
from kleash.cli.parsing import RECORDS, parser_of

project = "kleash"
author = "The kleash maintainers"
copyright = author
release = __version__

extensions = [
    "myst_parser",
    "sphinx_design",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
root_doc = "index"
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # "…" in examples is no Python

autodoc_default_options = {"members": True, "undoc-members": True, "no-value": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_use_ivar = True
maximum_signature_line_length = 88

html_theme = "pydata_sphinx_theme"
html_title = "kleash"
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # summaries are fetched, which browsers refuse for file://
html_theme_options = {
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "header_links_before_dropdown": 6,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_static_path = ["_static"]
html_css_files = ["site.css"]

CODE = re.compile(r"(``.+?``)")
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|References|Attributes|Examples?|Note):$")


def escape(line: str) -> str:
    """A line of a docstring in which nothing but ``code`` is markup."""
    parts = CODE.split(line)
    return "".join(
        part if part.startswith("``") else re.sub(r"([*|`]|_(?=\W|$))", r"\\\1", part) for part in parts
    )


def as_markup(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text: indented blocks and tables are formulas or code, and stars are no emphasis."""
    made: list[str] = []
    literal, section = False, False
    for number, line in enumerate(lines):
        begins = number == 0 or not lines[number - 1].strip()
        if line == "::":  # the block that follows is literal anyway
            continue
        if not line.strip():
            made.append(line)
            continue
        indented = line.startswith("    ")
        if SECTION.match(line):
            section = True
        elif not indented:
            section = False
        if begins:
            literal = line.startswith(("|", ">>>")) or (indented and not section)
            if literal:
                made += [
                    ".. code-block:: text"
                    if not line.lstrip().startswith(">>>")
                    else ".. code-block:: pycon",
                    "",
                ]
        elif (
            literal
            and not indented
            and not line.startswith(("|", ">>>", "..."))
            and not made[-1].startswith("    ")
        ):
            literal = False
        made.append(f"    {line}" if literal else escape(line))
    lines[:] = made


LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")


def name_files(app: object, docname: str, source: list[str]) -> None:
    """Links to files of the project beside the site become their paths; tests check that they exist."""
    here = Path(__file__).parent

    def text(link: re.Match[str]) -> str:
        path = (here / docname).parent.joinpath(link[2]).resolve()
        return link[0] if path.is_relative_to(here) else f"{link[1]} (`{path.relative_to(here.parent)}`)"

    source[0] = LINK.sub(text, source[0])


def read_notebook(app, docname: str, source: list[str]) -> None:
    """A notebook becomes a page of its text and code, with a link to the file."""
    file = Path(app.env.doc2path(docname))
    if file.suffix == ".ipynb":
        cells = json.loads(source[0])["cells"]
        texts = ["".join(cell["source"]) for cell in cells]
        parts = [
            f"```python\n{text}\n```" if cell["cell_type"] == "code" else text
            for cell, text in zip(cells, texts, strict=True)
        ]
        source[0] = "\n\n".join([*parts, f"This page is a notebook: {{download}}`{file.name}`."])


class Commands(Directive):
    """A section for each command, with the help that has all of its options."""

    def run(self) -> list[nodes.Node]:
        """The sections, in the order of the commands."""
        os.environ["COLUMNS"] = "100"
        sections: list[nodes.Node] = []
        for name in RECORDS:
            title = f"kleash {name}"
            section = nodes.section(ids=[title.replace(" ", "-")], names=[title])
            section += nodes.title(title, title)
            text = parser_of(name).format_help(shows_all=True)
            section += nodes.literal_block(text, text, language="text")
            sections.append(section)
        return sections


def setup(app) -> None:
    """Add the page of commands, and connect what converts docstrings before napoleon reads their sections."""
    app.add_directive("kleash-commands", Commands)
    app.connect("source-read", read_notebook)
    app.connect("source-read", name_files)
    app.connect("autodoc-process-docstring", as_markup, priority=400)
