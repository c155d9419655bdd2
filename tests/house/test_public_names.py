"""Every public name is used by a page or an example, is in the signature of one that is, or is listed with a reason."""

import ast
import importlib
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from make_api_page import PACKAGES, public

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
IMPLEMENTED = "what an extension implements or is given (DESIGN.md)"
FAMILY = "as its siblings, which a page uses"
LISTED = {
    **dict.fromkeys(("Engine", "LocalEngine"), IMPLEMENTED),
    **dict.fromkeys(("AuditInputs", "Side", "StatefulController"), IMPLEMENTED),
    "STATISTICS": "what the columns and numbers of a run folder mean",
    "AGGREGATIONS": "the values of an option, by name",
    **dict.fromkeys(("absolute", "k2", "masked_mean", "phi", "TrainingFolder", "read_rollouts"), FAMILY),
    **dict.fromkeys(("GRPOLeash", "RLOOLeash", "LeashedRLOOTrainer"), FAMILY),
    **dict.fromkeys(("write_report", "write_training_report"), FAMILY),
    **dict.fromkeys(("draw_drift", "drift_of"), "DriftMonitor in a training loop of one's own"),
    "response_statistics": "KL of a batch in a subclass of TRL's trainer",
    **dict.fromkeys(("token_statistics_and_top", "TopTokens"), FAMILY),
    "BetaController": "callback of a trainer, on docs/trainer.md",
    "zero3_as_dtensor": "a page shows it with DeepSpeed, which the tests of pages do not have",
    "ReadOptions": "the argument reading of the readers",
    "Reward": "the elements of Rewards",
    "REFERENCE_HIDDEN": "the key of a batch of verl",
    "install": "how verl and OpenRLHF load the plug-in",
}
"""Public name that no code block uses -> why it is public."""


@cache
def public_names() -> Mapping[str, Any]:
    """Public name -> object, of all packages of docs/api.md that are installed here."""
    names: dict[str, Any] = {}
    for package in ("kleash", *(f"kleash.{name}" for name in PACKAGES)):
        try:
            module = importlib.import_module(package)
        except ImportError:
            continue
        names |= {name: getattr(module, name) for name in public(module)}
    return names


def code() -> Iterator[ast.AST]:
    """The syntax trees of the pages' code blocks and of the examples."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*/*.md")):
        yield from map(ast.parse, FENCE.findall(page.read_text(encoding="utf-8")))
    for example in (ROOT / "examples").rglob("*.py"):
        yield ast.parse(example.read_text(encoding="utf-8"))


@cache
def used_names() -> frozenset[str]:
    """Names that the pages and examples import from kleash, or read as attributes."""
    used: set[str] = set()
    for node in (node for tree in code() for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "kleash":
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
    return frozenset(used)


def names_in(annotation: Any) -> set[str]:
    """The words of an annotation, with the names of its classes."""
    if isinstance(annotation, str):
        return set(re.findall(r"\w+", annotation))
    if inspect.isclass(annotation) and not typing.get_args(annotation):
        return {annotation.__name__}
    return {name for part in typing.get_args(annotation) for name in names_in(part)}


def signature_names(value: Any) -> set[str]:
    """The words of the annotations of a function, or of a class's fields and methods; the types of a table's values."""
    if isinstance(value, Mapping):
        return {type(entry).__name__ for entry in value.values()}
    annotated = [value]
    if inspect.isclass(value):
        functions = (getattr(member, "__func__", member) for member in vars(value).values())
        annotated += [function for function in functions if inspect.isfunction(function)]
    annotations = [getattr(inspect.unwrap(each), "__annotations__", {}) for each in annotated]
    return {name for each in annotations for annotation in each.values() for name in names_in(annotation)}


def unexplained(names: Mapping[str, Any], used: frozenset[str], listed: Mapping[str, str]) -> set[str]:
    """Public names without a use, a signature or a reason."""
    top = set(importlib.import_module("kleash").__all__)
    needed = {name for name in names if name in top or name in used or name in listed}
    needed |= {name for name, value in names.items() if is_exception(value)}
    types = {word for name in needed for word in signature_names(names[name])}
    bases = {base for base in types if inspect.isclass(names.get(base))}
    subclasses = {
        name for name, value in names.items() if bases & {base.__name__ for base in ancestors(value)}
    }
    return set(names) - needed - types - subclasses


def is_exception(value: Any) -> bool:
    """Whether it is a class of exceptions."""
    return inspect.isclass(value) and issubclass(value, BaseException)


def ancestors(value: Any) -> tuple[type, ...]:
    """The bases of a class; nothing for other values."""
    return value.__mro__[1:] if inspect.isclass(value) else ()


@pytest.mark.peers("trl")
def test_every_public_name_is_used_by_a_page_or_in_the_signature_of_one() -> None:
    names = public_names()
    surplus = unexplained(names, used_names(), LISTED)
    assert not surplus, f"no page needs {sorted(surplus)}; import them from their modules"


@pytest.mark.peers("trl")
def test_a_name_that_no_page_needs_is_found() -> None:
    names = {**public_names(), "helper_of_nothing": lambda: None}
    assert unexplained(names, used_names(), LISTED) == {"helper_of_nothing"}


@pytest.mark.peers("trl")
def test_every_listed_name_is_public_and_needs_its_reason() -> None:
    assert set(LISTED) <= set(public_names())
    assert set(LISTED) <= unexplained(public_names(), used_names(), {})
