"""Clicks from the index of the site, and words, until the answer to each question of docs/questions.json.

python tools/check_answers.py        # a line for each question; exit code 1 if fewer than 27 of 30 are near enough

A click is a link of the index, or a heading in a page's own table of contents. Words are counted from the place
that a click leads to, the page or its heading, to the end of the answer, a phrase of the page. Code counts, too.
"""

import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
CLICKS, WORDS, ENOUGH = 2, 300, 0.9


def distance(entry: dict[str, str]) -> tuple[int, int]:
    """Clicks and words to the answer of one question; KeyError or ValueError if it is not where the file says."""
    page, heading, answer = entry["page"], entry["heading"], entry["answer"]
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    if f"]({page})" not in index:
        raise ValueError(f"the index has no link to {page}")
    text = " ".join((DOCS / page).read_text(encoding="utf-8").replace("\n", " \n ").split(" "))
    begin = re.search(rf"^ ?#+ {re.escape(heading)} *$", text, re.MULTILINE)
    if begin is None:
        raise ValueError(f"{page} has no heading {heading!r}")
    words = text[begin.end() :].split()
    sought = answer.split()
    last = next((i for i in range(len(words)) if words[i : i + len(sought)] == sought), None)
    if last is None:
        raise ValueError(f"{page} does not say {answer!r} below {heading!r}")
    is_title = text[: begin.start()].strip() == ""
    return (1 if is_title else 2), last + len(sought)


def main() -> int:
    """Print the distances; 1 if too many answers are too far."""
    questions = json.loads((DOCS / "questions.json").read_text(encoding="utf-8"))
    near = 0
    for entry in questions:
        clicks, words = distance(entry)
        near += clicks <= CLICKS and words <= WORDS
        print(f"{clicks} clicks, {words:3} words: {entry['question']}")
    print(f"{near} of {len(questions)} within {CLICKS} clicks and {WORDS} words")
    return 0 if near >= ENOUGH * len(questions) else 1


if __name__ == "__main__":
    sys.exit(main())
