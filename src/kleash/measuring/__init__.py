"""The measuring job: from options to files, and from files to comparisons."""

from typing import TYPE_CHECKING, Any

from kleash.records import CacheContents, CacheJob, MeasureJob, Measurement

if TYPE_CHECKING:
    from kleash.measuring.comparison import compare
    from kleash.measuring.drift import Drift, DriftPart, draw_drift, drift_of
    from kleash.measuring.progress import Nobody, Watcher
    from kleash.measuring.reference_cache import cache_reference, default_cache
    from kleash.measuring.run import default_out, measure

__all__ = [
    "CacheContents",
    "CacheJob",
    "Drift",
    "DriftPart",
    "MeasureJob",
    "Measurement",
    "Nobody",
    "Watcher",
    "cache_reference",
    "compare",
    "default_cache",
    "default_out",
    "draw_drift",
    "drift_of",
    "measure",
]

HOMES = {
    "cache_reference": "reference_cache",
    "default_cache": "reference_cache",
    "compare": "comparison",
    "Drift": "drift",
    "DriftPart": "drift",
    "draw_drift": "drift",
    "drift_of": "drift",
    "default_out": "run",
    "measure": "run",
    "Nobody": "progress",
    "Watcher": "progress",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: comparing runs must not wait for torch."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
