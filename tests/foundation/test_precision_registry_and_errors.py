"""Conversion to float32, look-ups by name, and the exception classes."""

import inspect
from importlib import import_module

import pytest
import torch

from kleash import errors
from kleash.errors import KleashError, UnknownNameError
from kleash.precision import at_least_float32
from kleash.registry import look_up


def test_at_least_float32_converts_half_precision_and_does_not_copy_others():
    half = [torch.ones(2, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
    assert [at_least_float32(values).dtype for values in half] == [torch.float32] * 2
    for dtype in (torch.float32, torch.float64):
        values = torch.ones(2, dtype=dtype)
        assert at_least_float32(values) is values


def test_look_up_returns_the_entry_or_lists_the_names_and_suggests_a_near_one():
    table = {"text": 1, "prompt_column": 2}
    assert look_up(table, "text", "option") == 1
    for name, hint in (("prompt_colum", "; did you mean 'prompt_column'?"), ("prompts", ""), (None, "")):
        with pytest.raises(UnknownNameError) as caught:
            look_up(table, name, "option")
        assert str(caught.value) == f"no option is called {name!r}; there are text, prompt_column{hint}"


@pytest.mark.parametrize(
    ("package", "name", "instead"),
    [
        ("estimators", "check_agreement", "mean_weight"),
        pytest.param(
            *("integrations.trl", "response_statistics", "kleash.attach"), marks=pytest.mark.peers("trl")
        ),
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
