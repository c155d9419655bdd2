"""Python's cyclic garbage collector during a command."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 20_000
"""Objects that may be made before the collector looks for cycles among them; Python's default is 700."""


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect cyclic garbage less often.

    Importing torch and transformers makes some hundred thousand objects and hardly any garbage. With Python's
    default the collector searches them 1 200 times, which takes an eighth of the time of a short command.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(NEW_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
