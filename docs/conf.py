"""The site: `make docs` builds it in build/docs, which needs no network to be made or read."""

import json
import os
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.ext.autosummary import Autosummary

import kleash
from kleash.cli.parsing import RECORDS, parser_of

project = "kleash"
author = "The kleash maintainers"
copyright = f"{author}. Licence: Apache-2.0. To cite: CITATION.cff"
release = kleash.__version__

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
napoleon_use_rtype = False
napoleon_use_ivar = True
maximum_signature_line_length = 88
smartquotes_action = "qe"  # two hyphens begin an option

html_theme = "pydata_sphinx_theme"
html_title = "kleash"
html_show_sourcelink = False
html_copy_source = False
html_domain_indices = False  # the page of Python names has the packages
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
html_js_files = [("tables.js", {"defer": "defer"})]

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
    # napoleon takes what stands before a colon in an attribute's first line for its type: a comment goes before it.
    made = ["..", ""] if what in ("attribute", "data", "property") else []
    literal, section = False, False
    lines[:] = [line.replace(" || ", " ‖ ") for line in lines]
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


PACKAGES = [
    import_module(name)
    for page in sorted((Path(__file__).parent / "reference" / "api").glob("*.md"))
    for name in re.findall(r"^\.\. automodule:: (\S+)$", page.read_text(encoding="utf-8"), re.M)
]
"""What the reference of names describes."""


def public_names(package: ModuleType) -> list[str]:
    """The names of a package that the reference lists, if they are its own."""
    return getattr(package, "__all__", dir(package))


class Names(Autosummary):
    """A table of what ``kleash`` itself has to be called, each with a link to where its package describes it."""

    has_content = False

    def run(self) -> list[nodes.Node]:
        """The table, in the order of the alphabet."""
        names = []
        for name in dir(kleash):
            value = getattr(kleash, name)
            if callable(value):
                homes = [x for x in PACKAGES if name in public_names(x) and getattr(x, name) is value]
                names.append(f"~{homes[-1].__name__ if homes else 'kleash'}.{name}")
        self.options["nosignatures"] = None
        self.content = StringList(names, source=__file__)
        return super().run()


def show_types_alone() -> None:
    """Take from the annotations of records what the command line reads: bounds, choices and help."""
    for package in PACKAGES:
        for value in [getattr(package, name) for name in public_names(package)]:
            for owner in (value, *value.__mro__) if isinstance(value, type) else ():
                for holder in (owner, owner.__init__):
                    if "Annotated" in str(annotations := getattr(holder, "__annotations__", {})):
                        hints = get_type_hints(holder)
                        annotations.update((name, hints[name]) for name in annotations)


def defaults_in_words(
    app: object,
    what: str,
    name: str,
    obj: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Defaults that are no Python, which a signature is shown as one long line with."""
    if signature is not None:
        signature = re.sub(r"<function (\w+)[^>]*>", r"\1", signature.replace("<factory>", "..."))
    return signature, returns


def dash(app: object, doctree: nodes.document) -> None:
    """Sphinx puts two hyphens between a parameter and its description."""
    for text in [text for text in doctree.findall(nodes.Text) if text == " -- "]:
        text.parent.replace(text, nodes.Text(" – "))


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
    show_types_alone()
    app.add_directive("kleash-commands", Commands)
    app.add_directive("kleash-names", Names)
    app.connect("autodoc-process-signature", defaults_in_words)
    app.connect("source-read", read_notebook)
    app.connect("source-read", name_files)
    app.connect("autodoc-process-docstring", as_markup, priority=400)
    app.connect("doctree-read", dash)
