"""Optional dependencies: imports, tested versions and required attributes."""

import sys
import types
import warnings

import pytest

from kleash import extras
from kleash.errors import CannotRunError, KleashError, MissingExtraError
from kleash.extras import import_extra, require_attributes, warn_if_untested


@pytest.fixture
def installed(monkeypatch):
    versions = {}

    def version(package):
        if package not in versions:
            raise extras.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(extras.metadata, "version", version)
    return versions


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("1.16", True),
        ("1.16.0", True),
        ("1.16.9", True),
        ("1.16.2.dev3", True),
        ("1.15.9", False),
        ("1.17", False),
        ("1.17.0rc1", False),
        ("1.2", False),
        ("2.0", False),
        ("nightly", False),
    ],
)
def test_versions_outside_the_tested_range_have_a_warning(installed, version, is_tested):
    installed["some"] = version
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_untested("some", at_least="1.16", below="1.17")
    assert not caught if is_tested else f"some {version} is installed" in str(caught[0].message)


def test_a_package_that_is_not_installed_raises(installed):
    with pytest.raises(MissingExtraError, match="some is not installed"):
        warn_if_untested("some", at_least="1", below="2")


@pytest.fixture
def package(monkeypatch):
    module = types.ModuleType("made_up_package")

    class Trainer:
        beta = 1.0

        def loss(self, model, inputs): ...
        def wrapped(self, *args, **named): ...

    module.Trainer = Trainer
    monkeypatch.setitem(sys.modules, "made_up_package", module)


def test_existing_attributes_pass(package):
    checked = {"": (), ".beta": (), ".loss": ("model",), ".wrapped": ("model",)}
    paths = {f"made_up_package:Trainer{name}": arguments for name, arguments in checked.items()}
    assert require_attributes("made_up", paths) is None


@pytest.mark.parametrize(
    ("place", "arguments", "named"),
    [
        ("made_up_package:Trainer.losses", (), "made_up_package:Trainer.losses"),
        ("made_up_package:Trainer.losses.more", (), "made_up_package:Trainer.losses.more"),
        ("made_up_package:Trainer.loss", ("model", "batch"), "argument 'batch' of"),
        ("made_up_package.other:thing", (), "made_up_package.other:thing"),
    ],
)
def test_missing_attributes_and_arguments_are_named(package, place, arguments, named):
    with pytest.raises(CannotRunError, match="made_up lacks") as raised:
        require_attributes("made_up", {"made_up_package:Trainer.beta": (), place: arguments})
    assert named in str(raised.value) and "Trainer.beta" not in str(raised.value)


@pytest.mark.parametrize("module", ["kleash_absent_package", "kleash_absent_package.part"])
def test_import_extra_of_a_missing_package_names_the_extra(module):
    with pytest.raises(MissingExtraError) as caught:
        import_extra(module, "models")
    expected = "kleash_absent_package is not installed; run: pip install 'kleash[models]'"
    assert str(caught.value) == expected
    assert isinstance(caught.value, ImportError)


def test_import_extra_of_a_broken_package_raises_its_own_error(tmp_path, monkeypatch):
    """A failing import inside an installed package is not a missing extra."""
    (tmp_path / "kleash_broken_package.py").write_text("import kleash_absent_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="kleash_absent_package") as caught:
        import_extra("kleash_broken_package", "models")
    assert not isinstance(caught.value, KleashError)
