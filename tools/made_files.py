"""Generated files: writing them, or checking that they are up to date."""

import sys
from collections.abc import Mapping
from pathlib import Path


def between_marks(text: str, begin: str, end: str, content: str) -> str:
    """The text with ``content`` between two marks.

    Raises:
        ValueError: if the text lacks a mark.
    """
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last):
        raise ValueError(f"the page lacks {begin.strip()!r} or {end.strip()!r}")
    return before + begin + content + end + after


def write_or_check(files: Mapping[Path, str], *, check: bool) -> int:
    """Write the files; or with ``check`` only print which are out of date.

    Args:
        files: texts by their paths.
        check: compare only; write nothing.

    Returns:
        The exit status of the command: 1 if a file is out of date, else 0.
    """
    if not check:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return 0
    old = [path.name for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
    print(
        f"out of date: {', '.join(old)}; run {Path(sys.argv[0]).name} without --check"
        if old
        else "up to date"
    )
    return 1 if old else 0
