"""Fixture: the library in C is used for calls of any size."""

import pytest

from kleash.linear.impl import compiling


@pytest.fixture(autouse=True)
def native_from_one_logit_on(monkeypatch):
    monkeypatch.setattr(compiling, "NATIVE_PAYS_FROM", 1)
