"""Runs that several tests look at."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from command_forks import CommandForks

Kleash = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def kleash(command_forks: CommandForks) -> Kleash:
    """Runs the command as a process of its own and checks its exit code."""

    def run(*words: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
        process = command_forks.run([str(word) for word in words])
        assert process.returncode == expect, f"{process.returncode}: {process.stdout}\n{process.stderr}"
        return process

    return run


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny policy and its reference."""
    from tiny_models import tiny_pair

    return tiny_pair(tmp_path_factory.mktemp("pair"), "llama")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of forty prompts."""
    text = "the sea was calm and a boat went out before dawn came up so far"
    words = text.split()
    path = tmp_path_factory.mktemp("source") / "prompts.txt"
    path.write_text("\n".join(f"{words[n % 15]} {words[(3 * n + 1) % 15]} {n}" for n in range(40)))
    return path
