"""From what is typed to a function: found, or a sentence that says what is missing."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kleash.auditing import cases_of
from kleash.auditing.targets import TARGETS
from kleash.auditing.targets.packages import version_of
from kleash.errors import CannotRunError, KleashError, MissingExtraError, OptionError, UnknownNameError

OWN = """
def mine(token_logp, token_logq, *, scale=1.0, name="k1"):
    return scale * (token_logp - token_logq)

def anything(token_logp, token_logq, **more):
    return token_logp

class Held:
    @staticmethod
    def inside(token_logp, token_logq):
        return token_logp

NUMBER = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of one's own with a file of one's own, which is where we are."""
    (tmp_path / "own_kl_code.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "breaks_on_import.py").write_text("raise RuntimeError('no GPU\\nat all')\n", encoding="utf-8")
    (tmp_path / "leaves_on_import.py").write_text("raise SystemExit(3)\n", encoding="utf-8")
    (tmp_path / "needs_another.py").write_text("import not_there_at_all.inside\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) == str(tmp_path / f"{name}.py"):
            del sys.modules[name]


def test_modules_in_the_working_directory_are_found(own: Path) -> None:
    (case,) = cases_of("own_kl_code:mine", "loss", ("scale=2.5", "name=k3"))
    assert case.function(3.0, 1.0, **case.arguments) == 5.0
    assert case.arguments == {"scale": 2.5, "name": "k3"}
    assert case.name == "own_kl_code:mine"
    assert case.versions == {"own_kl_code": str(own / "own_kl_code.py")}


def test_a_dot_after_the_colon_goes_into_a_class(own: Path) -> None:
    (case,) = cases_of("own_kl_code:Held.inside", "loss")
    assert case.function(3.0, 1.0) == 3.0


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("2", 2),
        ("-.5", -0.5),
        ("True", True),
        ("None", None),
        ("'k3'", "k3"),
        ("k3+", "k3+"),
        ("", ""),
        ("(1, 2)", (1, 2)),
        ("a=b", "a=b"),
        ("1 +", "1 +"),
    ],
)
def test_argument_values_are_literals_or_strings(own: Path, typed: str, value: object) -> None:
    (case,) = cases_of("own_kl_code:mine", "loss", (f"name={typed}",))
    assert case.arguments["name"] == value and type(case.arguments["name"]) is type(value)


def test_functions_with_var_keywords_take_any_argument(own: Path) -> None:
    (case,) = cases_of("own_kl_code:anything", "loss", ("whatever=1",))
    assert case.arguments == {"whatever": 1}


WRITTEN = "a target is written package.module:function"


@pytest.mark.parametrize(
    ("target", "arguments", "error", "words"),
    [
        ("own_kl_code:mime", (), UnknownNameError, "own_kl_code has no 'mime'; did you mean mine?"),
        ("own_kl_code:Held.insidee", (), UnknownNameError, "Held in own_kl_code has no 'insidee'"),
        ("own_kl_code:qqqq", (), UnknownNameError, "own_kl_code has no 'qqqq'"),
        ("own_kl_code:NUMBER", (), OptionError, "is of type int"),
        ("own_kl_cod:mine", (), UnknownNameError, "there is no module own_kl_cod, neither"),
        ("kleash.losses.nothing:mine", (), UnknownNameError, "there is no module kleash.losses.nothing"),
        (
            "kleash.errors.deep.deeper:mine",
            (),
            UnknownNameError,
            "there is no module kleash.errors",
        ),
        ("needs_another:f", (), MissingExtraError, "needs_another imports not_there_at_all"),
        ("breaks_on_import:f", (), CannotRunError, "it raises RuntimeError: no GPU"),
        ("leaves_on_import:f", (), CannotRunError, "it raises SystemExit: 3"),
        ("own_kl_code:mine", ("skale=2",), OptionError, "it takes token_logp, token_logq, scale, name"),
        ("own_kl_code:mine", ("scale",), OptionError, "is written name=value"),
        ("own_kl_code:mine", ("scale=1", "scale=2"), OptionError, "scale was given twice"),
        ("own_kl_code", (), UnknownNameError, f"there are {', '.join(TARGETS)}"),
        ("a b:c", (), OptionError, WRITTEN),
        ("own_kl_code:", (), OptionError, WRITTEN),
        ("own_kl_code.py:mine", (), UnknownNameError, "there is no module own_kl_code.py"),
        (".own:f", (), OptionError, WRITTEN),
    ],
)
def test_errors_of_targets_and_arguments(
    own: Path, target: str, arguments: tuple[str, ...], error: type[KleashError], words: str
) -> None:
    with pytest.raises(error) as caught:
        cases_of(target, "loss" if ":" in target else None, arguments)
    sentence = str(caught.value)
    assert words in sentence and "\n" not in sentence and not sentence.endswith(".")


def test_a_name_after_the_colon_is_a_case_or_else_a_function() -> None:
    (case,) = cases_of("kleash:kl_loss_k2")
    assert case.name == "kleash:kl_loss_k2" and case.arguments == {"estimator": "k2"}
    (case,) = cases_of("kleash:jensen_shannon", "log_probabilities")
    assert case.name == "kleash:jensen_shannon" and case.arguments == {}


def test_versions_are_those_of_the_installed_distributions() -> None:
    assert version_of("sklearn") == version_of("scikit-learn")
    assert version_of("builtins") == "unknown"
