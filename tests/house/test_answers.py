"""The questions that people ask are answered near the index of the site."""

import json
from pathlib import Path

import check_answers
import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_answers_are_near(capsys):
    questions = json.loads((DOCS / "questions.json").read_text(encoding="utf-8"))
    assert len(questions) >= 30 and all(entry["asked"] for entry in questions)
    assert check_answers.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", sorted((DOCS / "how-to").glob("*.md")), ids=lambda page: page.stem)
def test_pages_that_tell_how_are_short(page):
    assert len(page.read_text(encoding="utf-8").split()) <= 820


def test_the_table_of_memory_and_hours_follows_from_the_arithmetic_above_it():
    rows = ""
    for billions in (1, 7, 32, 70):
        cells = []
        for cards, gigabytes, teraflops in ((1, 24, 70), (1, 80, 312), (8, 80, 312)):
            needed = 2 * 2 * billions / cards + 2
            minutes = 2 * 2 * billions * 1e15 / (cards * teraflops * 1e12 * 0.4) / 60
            cells.append(f"{needed:.0f} GB, {minutes:.2g} min" if needed <= gigabytes else "–")
        rows += f"| 2 × {billions}B | {' | '.join(cells)} |\n"
    assert rows in (DOCS / "how-to" / "several_gpus.md").read_text(encoding="utf-8")


def test_an_answer_that_is_not_there_is_noticed():
    entry = {"page": "how-to/gate.md", "heading": "A gate in CI", "answer": "words that no page has"}
    with pytest.raises(ValueError, match="does not say"):
        check_answers.distance(entry)
