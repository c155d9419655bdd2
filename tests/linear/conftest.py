"""Makes the helper next to the tests importable, and lets the library in C take calls of any size."""

import sys
from pathlib import Path

import pytest

from kleash.linear.impl import compiling

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def native_from_one_logit_on(monkeypatch):
    monkeypatch.setattr(compiling, "NATIVE_PAYS_FROM", 1)
