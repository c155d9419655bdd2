"""Functions called after a module is imported."""

import sys
from importlib import import_module

import pytest

from kleash.extras import call_after_import


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of one module, and a module that fails the first time it is imported."""
    folder = tmp_path / "waited_for"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "late.py").write_text("value = 1\n")
    (folder / "user.py").write_text("from waited_for.late import value\n")
    (folder / "failing.py").write_text("import sys\nsys.failures.pop()\nvalue = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("waited_for")]:
        del sys.modules[name]


def double(module):
    module.value *= 2


def test_functions_are_called_once_and_before_names_are_imported_from_the_module(package):
    before = list(sys.meta_path)
    call_after_import("waited_for.late", double)
    call_after_import("waited_for.late", double)
    assert "waited_for" not in sys.modules
    assert import_module("waited_for.user").value == 4, "both functions, once each"
    assert sys.meta_path == before
    call_after_import("waited_for.late", double)
    assert import_module("waited_for.late").value == 8, "immediately for an imported module"


def test_a_failed_import_is_tried_again(package, monkeypatch):
    monkeypatch.setattr(sys, "failures", [], raising=False)
    before = list(sys.meta_path)
    call_after_import("waited_for.failing", double)
    with pytest.raises(IndexError):
        import_module("waited_for.failing")
    sys.failures.append("one")
    assert import_module("waited_for.failing").value == 2
    assert sys.meta_path == before


def test_a_missing_module_still_raises(package):
    call_after_import("waited_for.missing", double)
    with pytest.raises(ModuleNotFoundError):
        import_module("waited_for.missing")
    sys.meta_path.pop(0)
