"""Measurements: from a job to the files of a run, from these to a comparison, and the drift of a live model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kleash.jobs import CacheJob, MeasureJob
from kleash.registry import refuse_former
from kleash.store import CacheContents, Measurement

if TYPE_CHECKING:
    from kleash.measuring.comparison import compare
    from kleash.measuring.drift import Drift, DriftPart, draw_drift, drift_of
    from kleash.measuring.progress import ProgressReporter
    from kleash.measuring.reference_cache import cache_reference
    from kleash.measuring.run import measure
    from kleash.measuring.sweep_run import sweep

__all__ = [
    "CacheContents",
    "CacheJob",
    "Drift",
    "DriftPart",
    "MeasureJob",
    "Measurement",
    "ProgressReporter",
    "cache_reference",
    "compare",
    "draw_drift",
    "drift_of",
    "measure",
    "sweep",
]

MODULE_OF = {
    "compare": "comparison",
    **dict.fromkeys(("Drift", "DriftPart", "draw_drift", "drift_of"), "drift"),
    "ProgressReporter": "progress",
    "cache_reference": "reference_cache",
    "measure": "run",
    "sweep": "sweep_run",
}
"""Public names, each with the module that defines it."""
unknown = refuse_former(
    __name__,
    {
        **dict.fromkeys(
            ("RankGroup", "launched_ranks", "measure_part", "merge"),
            "call measure with one job in every process, and they share it",
        ),
        "measure_base_logits": "call measure with MeasureJob(policy=…, reference_cache=FILE)",
        "write_base_logits": "call cache_reference with CacheJob(format='llama.cpp', …)",
    },
)


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that comparing runs does not import torch."""
    if name not in MODULE_OF:
        return unknown(name)
    return getattr(import_module(f"{__name__}.{MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    """The public names, whether imported or not."""
    return sorted(__all__)
