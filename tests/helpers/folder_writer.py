"""A process that takes part in a run."""

import time
from multiprocessing.synchronize import Event
from pathlib import Path

from kleash.records import RunFolder
from kleash.store.job_folder import RunHeader


def hold_folder(path: str, header: RunHeader, begun: Event) -> None:
    """Begin the run in ``path``, set the event, and wait to be killed."""
    with RunFolder(Path(path)).writing(header, resume=True):
        begun.set()
        time.sleep(60)
