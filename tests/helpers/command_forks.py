"""Runs ``kleash`` in forks of one process: to import torch and transformers takes most of a small command's time."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import Any

PRELOADED = ("kleash.cli.dispatch", "kleash.measuring", "transformers.models.llama.modeling_llama")


class CommandForks:
    """A process that runs command lines, each in a fork with standard streams and an exit code of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, words: list[str]) -> "CommandFork":
        """Start ``kleash WORDS``."""
        folder = Path(mkdtemp(dir=self._folder))
        return CommandFork(
            self, self.ask("start", words, str(folder / "stdout"), str(folder / "stderr")), folder
        )

    def run(self, words: list[str]) -> "subprocess.CompletedProcess[str]":
        """Run ``kleash WORDS`` and wait for its end."""
        fork = self.start(words)
        return subprocess.CompletedProcess(words, fork.wait(), *fork.communicate())

    def ask(self, *request: Any) -> Any:
        """What the process answers."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def __enter__(self) -> "CommandForks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.communicate()  # closes its standard input, which ends it


class CommandFork:
    """A started command, used like a ``subprocess.Popen``."""

    def __init__(self, forks: CommandForks, pid: int, folder: Path) -> None:
        self.forks, self.pid, self.folder = forks, pid, folder
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while the command runs."""
        if self.returncode is None:
            self.returncode = self.forks.ask("poll", self.pid)
        return self.returncode

    def wait(self) -> int:
        """The exit code, when the command has ended."""
        if self.returncode is None:
            self.returncode = self.forks.ask("wait", self.pid)
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """What the command wrote to standard output and standard error, when it has ended."""
        self.wait()
        return (self.folder / "stdout").read_text(), (self.folder / "stderr").read_text()

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def serve() -> None:
    """Start the command lines that standard input names, and wait for their ends."""
    from importlib import import_module

    from undrawn_charts import draw_charts

    for module in PRELOADED:
        import_module(module)
    draw_charts(False)
    for line in sys.stdin:
        match json.loads(line):
            case ["start", *request]:
                answer: int | None = os.fork()
                if answer == 0:
                    os._exit(run_in_this_process(*request))
            case [kind, child]:
                ended, status = os.waitpid(child, os.WNOHANG if kind == "poll" else 0)
                answer = os.waitstatus_to_exitcode(status) if ended else None
        print(json.dumps(answer), flush=True)


def run_in_this_process(words: list[str], stdout: str, stderr: str) -> int:
    """Run ``kleash WORDS`` with these files as standard streams; returns the exit code."""
    from kleash.cli import main

    written = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, (path, flags) in enumerate([(os.devnull, os.O_RDONLY), (stdout, written), (stderr, written)]):
        os.dup2(os.open(path, flags), number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["kleash", *words]
    # As at a terminal: what a shell starts in the background ignores it, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    serve()
