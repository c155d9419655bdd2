"""Conversion to float32, look-ups by name, and the exception classes."""

import inspect
from importlib import import_module

import pytest
import torch

from kleash import errors
from kleash.errors import KleashError, UnknownNameError
from kleash.precision import at_least_float32
from kleash.registry import look_up


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_at_least_float32_converts_half_precision_only(dtype, expected):
    assert at_least_float32(torch.ones(2, dtype=dtype)).dtype == expected


def test_at_least_float32_does_not_copy_wide_tensors():
    for dtype in (torch.float32, torch.float64):
        values = torch.ones(2, dtype=dtype)
        assert at_least_float32(values) is values


def test_look_up_returns_the_entry():
    table = {"jeffreys": 1, "hellinger": 2}
    assert look_up(table, "hellinger", "divergence") == 2


def test_look_up_suggests_a_near_name():
    with pytest.raises(UnknownNameError) as caught:
        look_up({"jeffreys": 1, "hellinger": 2}, "jefreys", "divergence")
    assert str(caught.value) == (
        "no divergence is called 'jefreys'; there are jeffreys, hellinger; did you mean 'jeffreys'?"
    )


def test_look_up_lists_the_names():
    with pytest.raises(UnknownNameError) as caught:
        look_up({"jeffreys": 1, "hellinger": 2}, "xyz", "divergence")
    assert str(caught.value) == "no divergence is called 'xyz'; there are jeffreys, hellinger"


@pytest.mark.parametrize(
    ("package", "name", "instead"),
    [
        ("estimators", "check_agreement", "mean_weight"),
        ("integrations.trl", "response_statistics", "kleash.attach"),
        ("leash", "BetaSchedule", "dataclasses.replace"),
        ("measuring", "merge", "one job in every process"),
        ("uncertainty", "CoarseCounts", "quantiles"),
    ],
)
def test_former_names_are_refused_with_what_to_use_instead(package, name, instead):
    module = import_module(f"kleash.{package}")
    with pytest.raises(ImportError, match=rf"kleash\.{package}\.{name} is gone: .*{instead}"):
        getattr(module, name)
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = module.other


ERRORS = [
    x
    for x in vars(errors).values()
    if inspect.isclass(x) and issubclass(x, Exception) and not issubclass(x, Warning) and x is not KleashError
]


def test_a_tracker_that_fails_is_warned_of():
    """What it was sent is on disk, so that a program which only wants the measurement goes on."""
    assert issubclass(errors.TrackerWarning, UserWarning) and errors.TrackerWarning not in ERRORS


def test_interrupted_is_not_an_exception():
    """``except Exception`` must not catch Ctrl-C."""
    assert issubclass(errors.Interrupted, KeyboardInterrupt)
    assert not issubclass(errors.Interrupted, Exception)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_every_error_is_a_kleash_error_and_a_builtin_error(error):
    assert issubclass(error, KleashError)
    assert issubclass(error, (ValueError, RuntimeError, ImportError, ArithmeticError, OSError))
    assert error.__doc__
    assert str(error("what to do")) == "what to do"
