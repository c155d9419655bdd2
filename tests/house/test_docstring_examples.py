"""Every name of ``kleash`` has an example in its docstring, and it runs."""

import doctest
import inspect

import numpy as np
import pytest
import torch

import kleash

DATA = {"DIVERGENCES", "ESTIMATORS", "__version__"}
"""Names that are no functions and classes, and have no docstring of their own."""


def test_data_alone_has_no_docstring():
    assert {name for name in kleash.__all__ if not callable(getattr(kleash, name))} == DATA


@pytest.mark.parametrize("name", sorted(set(kleash.__all__) - DATA))
def test_the_example_of_a_name_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"kleash": kleash, "np": np, "torch": torch}
    docstring = inspect.getdoc(getattr(kleash, name)) or ""
    example = doctest.DocTestParser().get_doctest(docstring, names, name, None, None)
    assert example.examples
    report = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(
        example, out=report.append
    )
    assert not failed, "".join(report)
