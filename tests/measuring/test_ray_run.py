"""``--engine ray`` on a real local cluster: the files and numbers of one process, through the loss of a worker."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from run_files import require_same_files

from kleash.measuring import measure
from kleash.measuring.progress import ProgressReporter

pytestmark = [
    pytest.mark.peers("ray"),
    pytest.mark.filterwarnings("ignore"),
]  # Ray's threads warn of deprecations


@pytest.fixture(scope="module")
def cluster():
    """This process, connected to a cluster of two CPUs; a run uses it and leaves it connected."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
        )
        yield ray
        ray.shutdown()


class KillingReporter(ProgressReporter):
    """Keeps the notes of a run, and kills one of its workers as soon as a shard is on disk."""

    def __init__(self):
        self.sentences: list[str] = []
        self.has_killed = False

    def note(self, sentence):
        self.sentences.append(sentence)

    def add_scored(self, sequences, tokens):
        if not self.has_killed:
            os.kill(workers_of_this_process()[0], signal.SIGKILL)
        self.has_killed = True


def workers_of_this_process():
    """The process ids of the workers that descend from this process."""
    from psutil import Process

    children = Process().children(recursive=True)
    return [child.pid for child in children if "ray::ShardWorker" in " ".join(child.cmdline())]


def test_workers_measure_what_one_process_measures_although_one_is_killed(cluster, job, alone, tmp_path):
    """The first worker is killed as soon as a shard is on disk; the rest is measured by others."""
    out, reporter = tmp_path / "run", KillingReporter()
    measure(replace(job, engine="ray", workers=2, out=str(out)), reporter)
    require_same_files(out, Path(str(job.out)))
    assert reporter.has_killed
