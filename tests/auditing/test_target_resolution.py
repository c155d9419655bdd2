"""From what is typed to a function: a target, one of its cases, a dotted path, or an error that says what fails."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from kleash.auditing import audits_of, cases_of
from kleash.auditing.targets import Target, find_target, resolution, target_names
from kleash.auditing.targets.cases import make_case
from kleash.auditing.targets.packages import stand_ins
from kleash.auditing.targets.repositories import REPOSITORIES
from kleash.errors import CannotRunError, MissingExtraError, OptionError, UnknownNameError

OWN = """
def mine(token_logp, token_logq, *, scale=1.0, name="k1"):
    return scale * (token_logp - token_logq)

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
    (tmp_path / "needs_another.py").write_text("import not_there_at_all.inside\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) == str(tmp_path / f"{name}.py"):
            del sys.modules[name]


def test_modules_in_the_working_directory_are_found(own):
    (case,) = cases_of("own_kl_code:mine", "loss", ("scale=2.5", "name=k3"))
    assert case.function(3.0, 1.0, **case.arguments) == 5.0
    assert case.arguments == {"scale": 2.5, "name": "k3"} and case.name == "own_kl_code:mine"
    (own / "own_kl_code.py").rename(own / "2-kl-code.py")
    (audit,) = audits_of(cases_of("./2-kl-code.py:Held.inside", "reward"))
    assert audit.value == "-the entropy of p", "a dot after the colon goes into a class"


@pytest.mark.parametrize(
    ("typed", "value"),
    [("-.5", -0.5), ("True", True), ("None", None), ("'k3'", "k3"), *((x, x) for x in ("k3+", "a=b", "1 +"))],
)
def test_argument_values_are_literals_or_strings(own, typed, value):
    (case,) = cases_of("own_kl_code:mine", "loss", (f"name={typed}",))
    assert case.arguments["name"] == value and type(case.arguments["name"]) is type(value)


@pytest.mark.parametrize(
    ("target", "arguments", "error", "words"),
    [
        ("own_kl_code:mime", (), UnknownNameError, "own_kl_code has no 'mime'; did you mean mine?"),
        ("own_kl_code:NUMBER", (), OptionError, "is of type int"),
        ("own_kl_cod:mine", (), UnknownNameError, "there is no module own_kl_cod, neither"),
        ("kleash.errors.deep.deeper:mine", (), UnknownNameError, "there is no module kleash.errors"),
        ("needs_another:f", (), MissingExtraError, "which is not installed; write it as FILE:func"),
        ("breaks_on_import:f", (), CannotRunError, "it raises RuntimeError: no GPU; write it as FI"),
        ("own_kl_code:mine", ("scale",), OptionError, "is written name=value"),
        ("own_kl_code", (), UnknownNameError, f"there are {', '.join(target_names())}"),
        ("a b:c", (), OptionError, "a target is written package.module:function"),
        ("/own_kl_code.py:mine", (), OptionError, "below the current folder; it is '/own_kl_code.py:mine'"),
    ],
)
def test_errors_of_targets_and_arguments(own, target, arguments, error, words):
    with pytest.raises(error) as caught:
        cases_of(target, "loss" if ":" in target else None, arguments)
    sentence = str(caught.value)
    assert words in sentence and "\n" not in sentence and not sentence.endswith(".")


def test_a_name_after_the_colon_is_a_case_or_else_a_function():
    (case,) = cases_of("kleash:kl_loss_k2")
    assert case.name == "kleash:kl_loss_k2" and case.arguments == {"estimator": "k2"}
    assert "verl_k3+" in {case.name for case in find_target("kleash").cases}, "of a higher floor"
    (case,) = cases_of("kleash:jensen_shannon", "log_probabilities")
    assert case.name == "kleash:jensen_shannon" and case.arguments == {}
    with pytest.raises(UnknownNameError, match="no case of verl is called 'k4'; there are kl, abs, mse"):
        cases_of("verl:k4")


ABSOLUTE = Target(
    name="absolute",
    package="torch",
    modules=("torch.nn",),
    cases=(make_case("log_ratio", "torch.sub", "reward", function=lambda p, q: p - q),),
)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points: a target, a module that does not exist, a name that is taken."""
    points = EntryPoints(
        EntryPoint(name=name, value=value, group=resolution.ENTRY_POINT_GROUP)
        for name, value in (
            ("absolute", "test_target_resolution:ABSOLUTE"),
            ("missing", "no_such_package.audit:TARGET"),
            ("trl", "no_such_package.audit:TARGET"),
        )
    )
    monkeypatch.setitem(sys.modules, "test_target_resolution", sys.modules[__name__])
    monkeypatch.setattr(resolution, "entry_points", points.select)


@pytest.mark.usefixtures("registered")
def test_entry_points_are_loaded_on_use_and_replace_no_target_of_kleash():
    of_kleash = ("trl", "verl", "openrlhf", "liger", *(target.name for target in REPOSITORIES))
    assert target_names() == (*of_kleash, "absolute", "missing")
    assert find_target("trl").package == "trl" and find_target("absolute") is ABSOLUTE
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        find_target("missing")
    (audit,) = audits_of(cases_of("absolute"))
    assert audit.target == "absolute:log_ratio" and audit.value == audit.gradient == "KL(p ‖ q)"
    assert "torch" in audit.versions


@pytest.mark.parametrize(
    ("name", "package", "line"),
    [
        ("trl", "trl", "trl is not installed; run: pip install trl"),
        ("verl", "verl", "verl is not installed; run: pip install --no-deps verl && pip install "),
    ],
)
def test_a_missing_package_names_its_install_command(monkeypatch, name, package, line):
    class Hidden:
        @staticmethod
        def find_spec(fullname: str, path: object = None, target: object = None) -> None:
            if fullname.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

    for module in list(sys.modules):
        if module.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Hidden, *sys.meta_path])
    for target, convention in ((name, None), (f"{package}.deep.inside:function", "loss")):
        with pytest.raises(MissingExtraError) as caught:
            cases_of(target, convention)
        assert str(caught.value).startswith(line)


def test_stand_ins_can_be_inherited_from_and_are_removed():
    finders = list(sys.meta_path)
    with pytest.raises(ZeroDivisionError), stand_ins(("nowhere_to_be_found", "json")) as absent:
        import nowhere_to_be_found.deep as stand_in  # type: ignore[import-not-found]

        type("Inherited", (stand_in.Server,), {})
        assert "nowhere_to_be_found" in sys.modules
        raise ZeroDivisionError
    assert absent == ("nowhere_to_be_found",)
    assert not any(name.startswith("nowhere_to_be_found") for name in sys.modules)
    assert sys.meta_path == finders
    with pytest.raises(ModuleNotFoundError):
        import nowhere_to_be_found  # type: ignore[import-not-found] # noqa: F401
