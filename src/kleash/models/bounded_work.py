"""What a checkpoint's author wrote and this program runs, templates and patterns, bounded in time and memory.

Neither a thread nor a regular expression can be stopped, and a template can ask for any amount of memory in one
operation. So both are done in a process of their own, which is killed when it takes too long.
"""

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kleash.errors import ModelError

WORKER = Path(__file__).with_name("template_worker.py")
START = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); sys.argv = [sys.argv[2]]; import runpy; "
START += "runpy.run_path(sys.argv[0], run_name='__main__')"
LONGEST_WAIT = 120.0
"""Seconds by the clock for one request; the worker ends itself after 10 of computing."""


class StoppedError(Exception):
    """Work that was stopped, with the reason."""


class FailedError(Exception):
    """Work that raised an error, with what it said."""


class Worker:
    """A process that is started when it is first needed, and again after it was killed."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> list[str]:
        """The worker's answer.

        Raises:
            StoppedError: if it takes too long, or too much memory.
            FailedError: if it raised an error.
        """
        with self._lock:
            try:
                answer = self._answer(json.dumps(request, default=str).encode() + b"\n")
            except BaseException:
                self.stop()
                raise
        if "limit" in answer:
            raise StoppedError(answer["limit"])
        if "error" in answer:
            raise FailedError(answer["error"])
        return answer["texts"]

    def stop(self) -> None:
        """End the process, if there is one of this process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _answer(self, request: bytes) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except OSError as error:
            raise StoppedError("the process that runs it cannot be reached") from error
        received = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(LONGEST_WAIT):
                    raise StoppedError(f"it does not end within {LONGEST_WAIT:.0f} s")
                part = os.read(process.stdout.fileno(), 1 << 20)
                if not part:
                    raise StoppedError("it does not end within 10 s of computing, or takes too much memory")
                received += part
        return json.loads(received)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.stop()
            environment = {**os.environ, "USE_TORCH": "0", "USE_TF": "0", "USE_FLAX": "0", "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(sys.path), str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        return self._process


WORK = Worker()
atexit.register(WORK.stop)
os.register_at_fork(after_in_child=lambda: WORK.__init__())  # the parent's process answers the parent alone


def check_patterns(what: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """See that regular expressions are valid, and that matching them against names ends.

    Raises:
        ModelError: if not.
    """
    request = {"kind": "match", "patterns": list(patterns), "names": list(names)}
    if not request["patterns"]:
        return
    try:
        WORK.ask(request)
    except (StoppedError, FailedError) as error:
        raise ModelError(
            f"{what} has a pattern in its adapter_config.json that cannot be used ({error}); mend it, such as by naming "
            "the modules in a list"
        ) from error
