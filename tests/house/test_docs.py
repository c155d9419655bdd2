"""The documentation tells the truth: its code runs, and every public name is in it."""

import importlib
import json
import re

import pytest
from documentation import PAGES, ROOT

import kleash

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
API = ROOT / "docs" / "reference" / "api"
REFERENCE = "\n".join(page.read_text() for page in sorted(API.glob("*.md")))
PACKAGES = ["kleash", *re.findall(r"^\.\. automodule:: (kleash\S+)$", REFERENCE, re.M)]
ABOUT_TRL = (
    *("reference/trl.md", "how-to/trl_snippets.md", "notebooks/holding_a_target_kl_with_trl.ipynb"),
    "kleash.integrations.trl",
)
ABOUT = dict.fromkeys(ABOUT_TRL, "trl") | {"notebooks/is_my_model_drifting.ipynb": "pandas"}
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(page):
    """The path of a page within the documentation, or within the project."""
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def about_peers(case, name):
    """The case called ``name``, which is left out where the package that it is about is not installed."""
    return pytest.param(case, id=name, marks=pytest.mark.peers(ABOUT[name]) if name in ABOUT else ())


@pytest.mark.parametrize("page", [about_peers(page, name_of(page)) for page in PAGES])
def test_every_code_block_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "docs"}
    text = page.read_text(encoding="utf-8")
    for block in FENCE.finditer(text):
        line = text.count("\n", 0, block.start(1))
        code = compile("\n" * line + block.group(1), str(page), "exec")
        exec(code, namespace)
    assert "__name__" in namespace


@pytest.mark.parametrize("page", [about_peers(page, name_of(page)) for page in NOTEBOOKS])
def test_every_notebook_runs(page, tmp_path, monkeypatch):
    """Its cells run in their order, and it was committed without their outputs."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "docs"}
    cells = [
        cell for cell in json.loads(page.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
    ]
    assert len(cells) >= 3
    for number, cell in enumerate(cells):
        assert cell["outputs"] == [] and cell["execution_count"] is None
        exec(compile("".join(cell["source"]), f"{page.name}, code cell {number}", "exec"), namespace)


def test_the_reference_has_every_package_with_public_names():
    """Sphinx lists what ``dir`` finds in a package that a page of docs/reference/api names."""
    assert len(PACKAGES) > 20
    packages = [importlib.import_module(name) for name in PACKAGES[1:] if name not in ABOUT]
    listed = {name for package in packages for name in dir(package)}
    index = (API / "index.md").read_text(encoding="utf-8")
    by_hand = set(re.findall(r"^\.\. (?:autofunction|py:data):: kleash\.(\w+)$", index, re.MULTILINE))
    functions = {name for name in kleash.__all__ if callable(getattr(kleash, name))}
    assert by_hand == {"DIVERGENCES", "ESTIMATORS", *(functions - listed)}


@pytest.mark.parametrize("package", [about_peers(name, name) for name in PACKAGES])
def test_every_public_name_is_documented(package):
    module = importlib.import_module(package)
    names = getattr(module, "__all__", None) or [
        n for n, v in vars(module).items() if getattr(v, "__module__", "") == package
    ]
    undocumented = [
        name for name in names if callable(getattr(module, name)) and not getattr(module, name).__doc__
    ]
    assert names and not undocumented
    assert set(names) <= set(dir(module))
