"""Two processes of a run that are threads; models are loaded one at a time, as transformers patches torch meanwhile."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock

import pytest

from kleash.jobs import MeasureJob
from kleash.measuring import Measurement, run
from kleash.measuring.progress import ProgressReporter
from kleash.models import Pair


def measured_twice(job: MeasureJob, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Measurement, bool]]:
    """``measure_together`` of two threads, which begin to score at the same time."""
    lock, load, begin = Lock(), run.load_models, Barrier(2)

    def locked_load(*arguments: object) -> Pair:
        with lock:
            return load(*arguments)

    class Reporter(ProgressReporter):
        def set_total(self, sequences: int) -> None:
            begin.wait(60)

    monkeypatch.setattr(run, "load_models", locked_load)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda _: run.measure_together(job, Reporter()), range(2)))
