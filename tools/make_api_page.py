"""Writes docs/reference/api.md: every public name of every package, with the first sentence of its docstring.

python tools/make_api_page.py
"""

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "api.md"
sys.path.insert(0, str(ROOT / "src"))  # this checkout's kleash, and not an installed one
PACKAGES = (
    *("divergences", "estimators", "linear", "losses", "leash", "uncertainty", "masking", "precision"),
    *(
        "records",
        "models",
        "engines",
        "measuring",
        "auditing",
        "diagnosis",
        "integrations.verl",
        "integrations.trainer",
        "integrations.trl",
        "integrations.openrlhf",
        "training",
        "training.ppo",
        "reports",
        "shipped",
    ),
    "errors",
)
HEAD = """# Public names

Every public name, by the package it lives in, with the first sentence of its documentation; `help(name)` has the rest:
formulas, shapes, units, edge cases, errors, sources. This page is written by `python tools/make_api_page.py`.

The names of the first table can be had from `kleash` itself.
"""


def page() -> str:
    """The text of the page."""
    kleash = importlib.import_module("kleash")
    parts = [HEAD, "## kleash\n", table(kleash, list(kleash.__all__))]
    for package in PACKAGES:
        module = importlib.import_module(f"kleash.{package}")
        first = (module.__doc__ or "").strip().splitlines()[0]
        parts += [f"## kleash.{package}\n", f"{first}\n", table(module, public(module))]
    return "\n".join(parts)


def public(module: ModuleType) -> list[str]:
    """The public names of a module: its ``__all__``, or what it defines."""
    names = getattr(module, "__all__", None)
    if names is not None:
        return list(names)
    local_names = [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    return [name for name in local_names if not name.startswith("_")]


def table(module: ModuleType, names: list[str]) -> str:
    """A row for each name."""
    rows = [f"| `{name}` | {first_sentence(getattr(module, name))} |" for name in sorted(names)]
    return "\n".join(["| name | what |", "|---|---|", *rows, ""])


def first_sentence(value: Any) -> str:
    """The first sentence of a docstring; for a constant, its value."""
    if isinstance(value, str | int | tuple | dict) or not callable(value):
        return constant(value)
    paragraph = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ").strip()
    end = paragraph.find(". ")
    return (paragraph if end < 0 else paragraph[: end + 1]).replace("|", "\\|")


def constant(value: Any) -> str:
    """A constant as text."""
    if hasattr(value, "keys"):
        return "read-only table: " + ", ".join(f"`{name}`" for name in value)
    return f"`{value!r}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
