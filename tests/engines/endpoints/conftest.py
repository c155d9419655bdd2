"""A real inference server, in a process of its own, that serves the shipped policy."""

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_forks import CommandForks
from server_process import serving

from kleash.shipped import shipped_folder

SERVER = Path(__file__).parents[2] / "helpers" / "inference_server.py"


@pytest.fixture(scope="session")
def server(command_forks: CommandForks) -> Iterator[str]:
    """The address of the server."""
    with serving(command_forks, SERVER, str(shipped_folder("policy"))) as address:
        yield address


@pytest.fixture(scope="session")
def seen(server: str) -> Callable[[], dict[str, Any]]:
    """What the server has seen so far."""

    def read() -> dict[str, Any]:
        with urllib.request.urlopen(f"{server}/seen", timeout=20) as response:
            return json.load(response)

    return read
