"""Servers that tests run as processes of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(script: Path, *arguments: str) -> Iterator[str]:
    """The address of a server: a script that prints the port on which it listens."""
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdout is not None
    with process.stdout:
        port = process.stdout.readline().strip()
        assert port, f"{script.name} did not start"
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        process.wait(timeout=20)
