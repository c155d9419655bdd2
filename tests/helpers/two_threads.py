"""Two processes of a run that are threads."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from kleash.jobs import MeasureJob
from kleash.measuring import Measurement, run
from kleash.measuring.progress import ProgressReporter


def measured_twice(job: MeasureJob) -> list[tuple[Measurement, bool]]:
    """``measure_together`` of two threads, which begin to score at the same time."""
    begin = Barrier(2)

    class Reporter(ProgressReporter):
        def set_total(self, sequences: int) -> None:
            begin.wait(60)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda _: run.measure_together(job, Reporter()), range(2)))
