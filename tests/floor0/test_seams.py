"""Versions and seams of other people's packages."""

import sys
import types
import warnings

import pytest

from kleash import extras
from kleash.errors import CannotRunError, MissingExtraError
from kleash.extras import require_attributes, version_warning, warn_if_untested


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
    ("version", "known"),
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
def test_a_version_is_known_or_said(installed, version, known):
    installed["some"] = version
    said = version_warning("some", at_least="1.16", below="1.17")
    assert (said is None) is known
    if not known:
        assert version in said and "1.16" in said and "1.17" in said


def test_only_an_unknown_version_is_warned_of(installed):
    installed["some"] = "3.0"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_untested("some", at_least="1.0", below="2.0")
        installed["some"] = "1.5"
        warn_if_untested("some", at_least="1.0", below="2.0")
    (only,) = caught
    assert "some 3.0" in str(only.message)


def test_what_is_not_installed_is_an_error(installed):
    with pytest.raises(MissingExtraError, match="some is not installed"):
        version_warning("some", at_least="1", below="2")


@pytest.fixture
def package(monkeypatch):
    module = types.ModuleType("made_up_package")

    class Trainer:
        beta = 1.0

        def loss(self, model, inputs): ...

    module.Trainer = Trainer
    monkeypatch.setitem(sys.modules, "made_up_package", module)


def test_seams_that_are_there(package):
    place = "made_up_package:Trainer"
    assert (
        require_attributes("made_up", {place: (), f"{place}.beta": (), f"{place}.loss": ("model",)}) is None
    )


@pytest.mark.parametrize(
    ("place", "arguments", "named"),
    [
        ("made_up_package:Trainer.losses", (), "made_up_package:Trainer.losses"),
        ("made_up_package:Trainer.losses.more", (), "made_up_package:Trainer.losses.more"),
        (
            "made_up_package:Trainer.loss",
            ("model", "batch"),
            "argument 'batch' of made_up_package:Trainer.loss",
        ),
        ("made_up_package.other:thing", (), "made_up_package.other:thing"),
    ],
)
def test_a_missing_seam_is_named(package, place, arguments, named):
    with pytest.raises(CannotRunError, match="made_up lacks") as raised:
        require_attributes("made_up", {"made_up_package:Trainer.beta": (), place: arguments})
    assert named in str(raised.value) and "Trainer.beta" not in str(raised.value)
