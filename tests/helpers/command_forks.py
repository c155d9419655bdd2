"""Runs ``kleash`` in forks of one process: to import torch and transformers takes most of a small command's time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

PRELOADED = ("kleash.cli.dispatch", "kleash.measuring", "transformers.models.llama.modeling_llama")


class CommandForks:
    """A process that runs command lines, each in a fork with standard streams and an exit code of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, words: list[str]) -> "subprocess.CompletedProcess[str]":
        """Run ``kleash WORDS`` and wait for its end."""
        assert self._server.stdin is not None and self._server.stdout is not None
        streams = [self._folder / "stdout", self._folder / "stderr"]
        self._server.stdin.write(json.dumps([words, *map(str, streams)]) + "\n")
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        return subprocess.CompletedProcess(words, code, *(stream.read_text() for stream in streams))

    def __enter__(self) -> "CommandForks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.communicate()  # closes its standard input, which ends it


def serve() -> None:
    """Run the command lines that standard input names, one by one, and print their exit codes."""
    from importlib import import_module

    for module in PRELOADED:
        import_module(module)
    for line in sys.stdin:
        words, stdout, stderr = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(run_in_this_process(words, stdout, stderr))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run_in_this_process(words: list[str], stdout: str, stderr: str) -> int:
    """Run ``kleash WORDS`` with these files as standard streams; returns the exit code."""
    from kleash.cli import main

    written = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, (path, flags) in enumerate([(os.devnull, os.O_RDONLY), (stdout, written), (stderr, written)]):
        os.dup2(os.open(path, flags), number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["kleash", *words]
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    serve()
