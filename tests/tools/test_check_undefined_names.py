"""The check of undefined names finds each planted one, and takes no shape for a name."""

from pathlib import Path

import check_undefined_names
import pytest

SHAPES = '''
from jaxtyping import Float as Number
from torch import Tensor


def total(x: Number[Tensor, "*tokens vocab"], y: Number[Tensor, "rows"]) -> Number[Tensor, ""]:
    """The sum over `é` and everything else."""
    return (x + y).sum()
'''


def lines(folder: Path, text: str) -> list[str]:
    (folder / "code.py").write_text(text, encoding="utf-8")
    return check_undefined_names.undefined_names(["code.py"], folder)


def test_shapes_are_no_names(tmp_path: Path) -> None:
    spans = list(check_undefined_names.shape_spans(SHAPES))
    rows = SHAPES.splitlines()
    assert {rows[s.first - 1][s.start : s.end] for s in spans} == {'"*tokens vocab"', '"rows"', '""'}
    assert lines(tmp_path, SHAPES) == []


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        ("\ndef f():\n    return missing\n", "missing"),
        ("\ndef f(x: 'Missing') -> None: ...\n", "Missing"),
        ("\ndef f(é: Number[Absent, 'é rows']) -> None: ...\n", "Absent"),
        ("\nprint(f'{gone!r} of {1}')\n", "gone"),
        ("\nlist['absent']\n", "absent"),
        ("\nprint(dropped)  # noqa: F821\n", "dropped"),
    ],
    ids=["body", "annotation", "dtype", "f-string", "other-brackets", "noqa"],
)
def test_undefined_names_are_found(tmp_path: Path, plant: str, name: str) -> None:
    text = SHAPES + plant
    (line,) = lines(tmp_path, text)
    assert line.startswith("code.py:") and f"`{name}`" in line
    assert lines(tmp_path, text.replace(name, "Tensor")) == []


def test_a_file_that_cannot_be_parsed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"code\.py"):
        lines(tmp_path, "def (:\n")


def test_the_command_fails_on_a_planted_name_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "code.py").write_text("x = missing\n")
    assert check_undefined_names.main(["code.py", "--root", str(tmp_path)]) == 1
    assert "code.py:1: " in capsys.readouterr().out
    (tmp_path / "code.py").write_text("x = 1\n")
    assert check_undefined_names.main(["code.py", "--root", str(tmp_path)]) == 0
    assert "0 undefined names" in capsys.readouterr().out
