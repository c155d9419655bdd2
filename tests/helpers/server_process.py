"""Servers that tests run as processes of their own."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from command_forks import CommandForks


@contextmanager
def serving(forks: CommandForks, script: Path, *arguments: str) -> Iterator[str]:
    """The address of a server: a script that prints the port on which it listens."""
    process = forks.start_python([str(script), *arguments])
    try:
        while not process.output().endswith("\n"):
            assert process.poll() is None, f"{script.name} did not start"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{process.output().strip()}"
    finally:
        process.kill()
        process.wait()
