"""Targets are registered as entry points and loaded when they are used."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kleash.auditing import audits_of, cases_of
from kleash.auditing.targets import TARGETS, Target, target_registry
from kleash.auditing.targets.cases import make_case
from kleash.errors import CannotRunError

GROUP = "kleash.audit_targets"

ABSOLUTE = Target(
    name="absolute",
    package="torch",
    modules=("torch.nn",),
    cases=(make_case("log_ratio", lambda p, q: p - q, "reward", "torch.sub"),),
)
NOT_A_TARGET = "absolute"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> target_registry.TargetRegistry:
    """A registry with three entry points: a target, an object of another type, a module that does not exist."""
    points = [
        EntryPoint(name="absolute", value=f"{__name__}:ABSOLUTE", group=GROUP),
        EntryPoint(name="text", value=f"{__name__}:NOT_A_TARGET", group=GROUP),
        EntryPoint(name="missing", value="no_such_package.audit:TARGET", group=GROUP),
        EntryPoint(name="trl", value="no_such_package.audit:TARGET", group=GROUP),
    ]
    monkeypatch.setattr(target_registry, "entry_points", lambda group: points if group == GROUP else [])
    monkeypatch.setattr(EntryPoint, "load", _load)
    return target_registry.TargetRegistry()


def _load(point: EntryPoint) -> object:
    """The attribute of this module, which importlib could not import by its name."""
    if point.module != __name__:
        raise ModuleNotFoundError(f"No module named {point.module!r}")
    return globals()[point.attr]


def test_names_are_listed_without_loading_entry_points(registered: target_registry.TargetRegistry) -> None:
    assert list(registered) == ["trl", "verl", "openrlhf", "liger", "absolute", "text", "missing"]
    assert len(registered) == 7 and "missing" in registered and "other" not in registered


def test_an_entry_point_does_not_replace_a_built_in_target(
    registered: target_registry.TargetRegistry,
) -> None:
    assert registered["trl"].package == "trl"


def test_an_entry_point_is_loaded_on_use(registered: target_registry.TargetRegistry) -> None:
    assert registered["absolute"] is ABSOLUTE
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        registered["missing"]
    with pytest.raises(CannotRunError, match=r"'text' of kleash\.audit_targets is of type str, not Target"):
        registered["text"]
    with pytest.raises(KeyError):
        registered["other"]


def test_a_registered_target_is_audited_by_name(
    registered: target_registry.TargetRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kleash.auditing.targets.case_resolution.TARGETS", registered)
    (audit,) = audits_of(cases_of("absolute"))
    assert audit.target == "absolute:log_ratio" and audit.value == audit.gradient == "KL(p ‖ q)"


def test_the_target_of_kleash_is_registered_by_a_higher_floor() -> None:
    assert "kleash" in TARGETS, (
        "the entry point is missing: reinstall the package, pip install --no-deps -e ."
    )
    assert "verl_k3+" in {case.name for case in TARGETS["kleash"].cases}


def test_no_string_in_the_audit_names_a_module_of_a_higher_floor(root: Path) -> None:
    named = {
        (path.name, match)
        for path in (root / "src/kleash/auditing").rglob("*.py")
        for match in re.findall(
            r"kleash\.(?:integrations|training|cli)\b[\w.]*", path.read_text(encoding="utf-8")
        )
    }
    assert not named
