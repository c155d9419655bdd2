"""Packages that are not installed: their install commands, and stand-ins for unused ones."""

import subprocess
import sys

import pytest

from kleash.auditing import cases_of
from kleash.auditing.targets.packages import stand_ins
from kleash.errors import CannotRunError, MissingExtraError


@pytest.mark.parametrize(
    ("name", "package", "line"),
    [
        ("trl", "trl", "trl is not installed; run: pip install trl"),
        ("liger", "liger_kernel", "liger_kernel is not installed; run: pip install liger-kernel"),
        ("verl", "verl", "verl is not installed; run: pip install --no-deps verl && pip install "),
        ("openrlhf", "openrlhf", "openrlhf is not installed; run: pip install --no-deps openrlhf && pip "),
    ],
)
def test_a_missing_package_names_its_install_command(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, line: str
) -> None:
    class Hidden:
        @staticmethod
        def find_spec(fullname: str, path: object = None, target: object = None) -> None:
            if fullname.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

    for module in list(sys.modules):
        if module.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Hidden, *sys.meta_path])
    with pytest.raises(MissingExtraError) as caught:
        cases_of(name)
    assert str(caught.value).startswith(line)
    with pytest.raises(MissingExtraError) as caught:
        cases_of(f"{package}.deep.inside:function", "loss")
    assert str(caught.value).startswith(line)


def test_stand_ins_can_be_imported_and_inherited_from_but_not_used() -> None:
    with stand_ins(("nowhere_to_be_found", "json")) as absent:
        import nowhere_to_be_found.deep as stand_in  # type: ignore[import-not-found]

        inherited = type("Inherited", (stand_in.Server,), {})
        assert "nowhere_to_be_found" in sys.modules
    assert absent == ("nowhere_to_be_found",)
    with pytest.raises(CannotRunError, match=r"install nowhere_to_be_found$"):
        stand_in.anything(1)
    with pytest.raises(CannotRunError, match="Inherited is needed here"):
        inherited()
    assert not any(name.startswith("nowhere_to_be_found") for name in sys.modules)
    with pytest.raises(ModuleNotFoundError):
        import nowhere_to_be_found  # type: ignore[import-not-found] # noqa: F401


def test_stand_ins_are_removed_when_an_import_fails() -> None:
    finders = list(sys.meta_path)
    with pytest.raises(ZeroDivisionError), stand_ins(("nowhere_to_be_found",)):
        import nowhere_to_be_found  # type: ignore[import-not-found] # noqa: F401

        raise ZeroDivisionError
    assert sys.meta_path == finders and "nowhere_to_be_found" not in sys.modules


def test_targets_import_no_package_until_they_are_loaded() -> None:
    code = (
        "import sys, kleash.auditing.targets; print(*{'trl', 'verl', 'openrlhf', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "", done.stderr
