"""A real inference server, in a process of its own, that serves the shipped policy."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kleash.shipped import shipped_folder

SERVER = Path(__file__).parents[2] / "helpers" / "inference_server.py"


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of the server."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(shipped_folder("policy"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    with process.stdout:
        port = process.stdout.readline().strip()
        assert port, "the server did not start"
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        process.wait(timeout=20)


@pytest.fixture(scope="session")
def seen(server: str) -> Callable[[], dict[str, Any]]:
    """What the server has seen so far."""

    def read() -> dict[str, Any]:
        with urllib.request.urlopen(f"{server}/seen", timeout=20) as response:
            return json.load(response)

    return read
