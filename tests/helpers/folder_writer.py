"""A process that holds a run folder, for tests of the lock."""

import time
from multiprocessing.synchronize import Event
from pathlib import Path

from kleash.records import RunFolder
from kleash.store.job_folder import RunHeader


def hold_folder(path: str, header: RunHeader, locked: Event) -> None:
    """Lock the run folder at ``path``, set the event, and wait to be killed."""
    with RunFolder(Path(path)).writing(header, resume=True):
        locked.set()
        time.sleep(60)
