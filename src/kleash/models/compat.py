"""Keeping other libraries' progress bars, warnings and long tracebacks off our terminal."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from kleash.extras import import_extra

LONGEST_REASON = 300


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers and its neighbours say nothing; afterwards they are as they were."""
    log = import_extra("transformers.utils.logging", "models")
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """What went wrong, short enough to stand inside a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # "Error(s) in loading state_dict for Model:" says nothing without what comes next.
    told = next((place for place, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return " ".join(lines[: told + 1])[:LONGEST_REASON].rstrip(". ")
