"""Precision, look-ups, optional packages and errors."""

import inspect

import pytest
import torch

from kleash import errors
from kleash.errors import KleashError, MissingExtraError, UnknownNameError
from kleash.extras import import_extra
from kleash.precision import at_least_float32
from kleash.registry import look_up


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_nothing_is_computed_below_float32_and_nothing_is_rounded_down(given, expected):
    assert at_least_float32(torch.ones(2, dtype=given)).dtype == expected


def test_what_is_wide_enough_is_not_copied():
    for dtype in (torch.float32, torch.float64):
        values = torch.ones(2, dtype=dtype)
        assert at_least_float32(values) is values


def test_looking_up():
    table = {"jeffreys": 1, "hellinger": 2}
    assert look_up(table, "hellinger", "divergence") == 2


def test_a_near_miss_is_named():
    with pytest.raises(UnknownNameError) as caught:
        look_up({"jeffreys": 1, "hellinger": 2}, "jefreys", "divergence")
    assert str(caught.value) == (
        "no divergence is called 'jefreys'; there are jeffreys, hellinger; did you mean 'jeffreys'?"
    )


def test_a_far_miss_only_lists():
    with pytest.raises(UnknownNameError) as caught:
        look_up({"jeffreys": 1, "hellinger": 2}, "xyz", "divergence")
    assert str(caught.value) == "no divergence is called 'xyz'; there are jeffreys, hellinger"


def test_an_optional_package_that_is_there():
    assert import_extra("os.path", "models").join("a", "b") == "a/b"


@pytest.mark.parametrize("module", ["kleash_absent_package", "kleash_absent_package.part"])
def test_an_optional_package_that_is_missing(module):
    with pytest.raises(MissingExtraError) as caught:
        import_extra(module, "models")
    expected = "kleash_absent_package is not installed; run: pip install 'kleash[models]'"
    assert str(caught.value) == expected
    assert isinstance(caught.value, ImportError)


def test_a_package_that_is_broken_keeps_its_own_error(tmp_path, monkeypatch):
    """What an installed package fails to import is its problem, not a missing extra."""
    (tmp_path / "kleash_broken_package.py").write_text("import kleash_absent_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="kleash_absent_package") as caught:
        import_extra("kleash_broken_package", "models")
    assert not isinstance(caught.value, KleashError)


ERRORS = [
    x
    for x in vars(errors).values()
    if inspect.isclass(x) and issubclass(x, Exception) and x is not KleashError
]


def test_ctrl_c_is_no_error_of_ours():
    """Whoever catches errors must not catch the user's wish to stop."""
    assert issubclass(errors.Interrupted, KeyboardInterrupt)
    assert not issubclass(errors.Interrupted, Exception)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_every_error_is_ours_and_a_builtin_one(error):
    assert issubclass(error, KleashError)
    assert issubclass(error, (ValueError, RuntimeError, ImportError, ArithmeticError, OSError))
    assert error.__doc__
    assert str(error("what to do")) == "what to do"
