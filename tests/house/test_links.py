"""Every link within the project resolves, with its #anchor."""

import re
import subprocess
from collections import Counter
from urllib.parse import unquote

import pytest
from documentation import ROOT

NAMES = ("README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "src/kleash/shipped/data/README.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))

FENCED_BLOCK = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t]*#*$", re.MULTILINE)
HTML_ANCHOR = re.compile(r"<[a-z0-9]+\b[^>]*?\b(?:id|name)=[\"']([^\"']+)")
INLINE_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE_LINK = re.compile(r"^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HTML_LINK = re.compile(r"\b(?:href|src|srcset)=[\"']([^\"']+)")
EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:|//")
MENTION = re.compile(r"\b(?:docs/[\w/-]+|README|DESIGN|CONTRIBUTING|CHANGELOG)\.md(?:#[\w-]+)?")
"""A page that a source file names, with an anchor or without."""


def slug(heading):
    """The anchor that GitHub gives a heading: lower case, punctuation dropped, each space a hyphen."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[`*]|<[^>]+>", "", text).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(text):
    """The anchors of a page; the second heading of one text ends in -1, the third in -2."""
    text = FENCED_BLOCK.sub("", text)
    seen = Counter()
    names = set(HTML_ANCHOR.findall(text))
    for heading in HEADING.findall(text):
        name = slug(heading)
        names.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return names


def links(text):
    """The targets of a page's links and pictures, without those outside the project and those in code."""
    text = CODE_SPAN.sub("``", FENCED_BLOCK.sub("", text))
    found = [link for kind in (INLINE_LINK, REFERENCE_LINK, HTML_LINK) for link in kind.findall(text)]
    return [link for link in found if not EXTERNAL.match(link)]


def broken(page, targets):
    """The links of a page that name a file or an anchor that does not exist."""
    wrong = []
    for link in targets:
        path, _, anchor = link.partition("#")
        target = page.parent / unquote(path) if path else page
        exists = target.exists()
        if exists and anchor:
            exists = target.suffix == ".md" and anchor in anchors(target.read_text(encoding="utf-8"))
        if not exists:
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_resolve(page):
    assert broken(page, links(page.read_text(encoding="utf-8"))) == []


def test_pages_named_in_source_files_exist():
    words = ["git", "ls-files", "*.py", "*.toml", "*.html", "Makefile"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs the repository's list of files")
    others = ("tests/house/test_links.py", "examples/recipes/")  # recipes name the pages of others
    sources = [name for name in listed.stdout.split() if not name.startswith(others)]
    assert len(sources) > 100
    wrong = {}
    for source in sources:
        text = (ROOT / source).read_text(encoding="utf-8", errors="replace")
        if missing := broken(ROOT / "README.md", MENTION.findall(text)):
            wrong[source] = missing
    assert wrong == {}
