"""The page prints the noise that the example computes."""

from pathlib import Path

import loss_noise

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "losses.md"


def test_the_page_has_the_table() -> None:
    assert "\n".join(loss_noise.rows()) + "\n" in PAGE.read_text(encoding="utf-8")
