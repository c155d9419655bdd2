"""Loading of models one at a time, for processes of a run that are threads: transformers patches torch meanwhile."""

from threading import Lock

import pytest

from kleash.measuring import run
from kleash.models import Pair


def load_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``measure`` load the models of one thread at a time."""
    lock, load = Lock(), run.load_models

    def locked_load(*arguments: object) -> Pair:
        with lock:
            return load(*arguments)

    monkeypatch.setattr(run, "load_models", locked_load)
