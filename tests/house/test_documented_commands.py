"""The documentation's command lines are ones that kleash takes: its options, with values that they allow."""

import re
import shlex
from pathlib import Path

import pytest
from documentation import PAGES, ROOT

from kleash.cli.parsing import RECORDS, read_words

BLOCK = re.compile(r"^```(?:console|bash|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LEFT_OUT = {"…", "..."}
"""Words that stand for options of a line above."""
NEEDED = {"sweep": ("--candidates", "a/"), "measure": ("--prompts", "p.jsonl"), "dpo": ("--pairs", "p.jsonl")}
"""What may be left out, although the command or the algorithm needs it."""


def commands(text: str) -> list[list[str]]:
    """The words after "kleash" in each line of a page's blocks, up to a pipe or a redirection."""
    found = []
    for line in "".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if "kleash" in words and "--completion" not in words:
            words = words[words.index("kleash") + 1 :]
            ends = (number for number, word in enumerate(words) if re.fullmatch(r"\||\d?>+|&+|<", word))
            found.append(words[: next(ends, None)])
    return found


CASES = [(page, words) for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]
NAMES = [f"{page.relative_to(ROOT)}: {' '.join(words)}" for page, words in CASES]


def test_commands_are_found() -> None:
    assert len(CASES) > 60


@pytest.mark.parametrize("words", [words for _, words in CASES], ids=NAMES)
def test_command_is_taken(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.kld").write_bytes(b"_logits_")
    if "--config" in words:
        config = Path(words[words.index("--config") + 1])
        config.parent.mkdir(exist_ok=True)
        config.write_text("limit: 64\n")
    needed = [NEEDED[word] for word in words[:2] if word in NEEDED and LEFT_OUT & set(words)]
    added = [word for option in needed if option[0] not in words for word in option]
    assert type(read_words([*(word for word in words if word not in LEFT_OUT), *added])) in RECORDS.values()
