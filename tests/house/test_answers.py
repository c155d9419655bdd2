"""The questions that people ask are answered near the index of the site."""

import json

import check_answers
import memory_and_hours
import pytest
from documentation import ROOT

DOCS = ROOT / "docs"


def test_answers_are_near(capsys):
    questions = json.loads((DOCS / "questions.json").read_text(encoding="utf-8"))
    assert len(questions) >= 30 and all(entry["asked"] for entry in questions)
    assert check_answers.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", sorted((DOCS / "how-to").glob("*.md")), ids=lambda page: page.stem)
def test_pages_that_tell_how_are_short(page):
    assert len(page.read_text(encoding="utf-8").split()) <= 820


def test_the_table_of_memory_and_time_is_that_of_its_tool():
    assert memory_and_hours.table() in (DOCS / "how-to" / "several_gpus.md").read_text(encoding="utf-8")
    minutes = 2 * 2 * 7 * 1e15 / (312e12 * 0.4) / 60
    assert f"| 2 × 7B | – | {2 * 2 * 7 + 2} GB, {minutes:.1f} min |" in memory_and_hours.table()


def test_an_answer_that_is_not_there_is_noticed():
    entry = {"page": "how-to/gate.md", "heading": "A gate in CI", "answer": "words that no page has"}
    with pytest.raises(ValueError, match="does not say"):
        check_answers.distance(entry)
