"""Runs Python programs in forks of the test process: to import torch and transformers takes most of their time."""

import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import Any

from _pytest.assertion.rewrite import AssertionRewritingHook

LONGEST = 900
"""Seconds after which a program is ended: one that waits for another that is gone would wait for ever."""
PRELOADED = ("kleash.cli.dispatch", "kleash.cli.requirements", "kleash.measuring.run", "pyarrow.parquet")
PRELOADED += ("transformers.models.llama.modeling_llama",)


class CommandForks:
    """A fork of this process that runs programs, each in a fork with standard streams and an exit code of its own.

    Made while this process has one thread and has run no test.
    """

    def __init__(self) -> None:
        self.folder = Path()
        """Where the streams of the programs are kept."""
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            try:
                ours.close()
                serve(theirs)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        self._server = ours.makefile("rw")
        ours.close()
        theirs.close()

    def start(self, words: list[str]) -> "CommandFork":
        """Start ``kleash WORDS``."""
        return self.start_python(["-m", "kleash", *words])

    def run(self, words: list[str]) -> "subprocess.CompletedProcess[str]":
        """Run ``kleash WORDS`` and wait for its end."""
        return self.start(words).completed(words)

    def start_python(self, words: list[str]) -> "CommandFork":
        """Start ``python WORDS``: a script, or a module after "-m", and its arguments."""
        folder = Path(mkdtemp(dir=self.folder))
        (folder / "stdout").touch()
        pid = self.ask("start", words, str(folder / "stdout"), str(folder / "stderr"))
        return CommandFork(self, pid, folder)

    def run_python(self, words: list[str]) -> "subprocess.CompletedProcess[str]":
        """Run ``python WORDS`` and wait for its end."""
        return self.start_python(words).completed(words)

    def ask(self, *request: Any) -> Any:
        """What the process answers."""
        print(json.dumps(request), file=self._server, flush=True)
        return json.loads(self._server.readline())

    def __enter__(self) -> "CommandForks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()  # which ends the process


class CommandFork:
    """A started program, used like a ``subprocess.Popen``."""

    def __init__(self, forks: CommandForks, pid: int, folder: Path) -> None:
        self.forks, self.pid, self.folder = forks, pid, folder
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while the program runs."""
        if self.returncode is None:
            self.returncode = self.forks.ask("poll", self.pid)
        return self.returncode

    def wait(self) -> int:
        """The exit code, when the program has ended."""
        code = self.forks.ask("wait", self.pid) if self.returncode is None else self.returncode
        self.returncode = code
        return code

    def output(self) -> str:
        """What the program has written to standard output so far."""
        return (self.folder / "stdout").read_text()

    def communicate(self) -> tuple[str, str]:
        """What the program wrote to standard output and standard error, when it has ended."""
        self.wait()
        return self.output(), (self.folder / "stderr").read_text()

    def completed(self, words: list[str]) -> "subprocess.CompletedProcess[str]":
        """The program that ``words`` started, when it has ended."""
        return subprocess.CompletedProcess(words, self.wait(), *self.communicate())

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def serve(connection: socket.socket) -> None:
    """Start the programs that are requested, and wait for their ends, until there are no more requests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    leave_pytest()
    with connection.makefile("rw") as requests:
        for line in requests:
            answer: int | None = None
            match json.loads(line):
                case ["start", words, stdout, stderr]:
                    answer = start_fork(words, stdout, stderr)
                case ["poll", child]:
                    ended, status = os.waitpid(child, os.WNOHANG)
                    answer = os.waitstatus_to_exitcode(status) if ended else None
                case ["wait", child]:
                    answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(json.dumps(answer), file=requests, flush=True)


def start_fork(words: list[str], stdout: str, stderr: str) -> int:
    """Run ``python WORDS`` in a fork of this process, with these files as standard streams; returns its id."""
    import_what_commands_use()
    fork = os.fork()
    if fork == 0:
        code = 1
        signal.alarm(LONGEST)  # SIGALRM
        try:
            set_streams(stdout, stderr)
            code = exit_code_of(words)
        finally:
            os._exit(code)
    return fork


def leave_pytest() -> None:
    """Undo what pytest has set in this process."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AssertionRewritingHook)]
    logging.root.handlers.clear()
    warnings.resetwarnings()
    for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", hidden)
    warnings.showwarning = lambda *what: print(warnings.formatwarning(*what[:4]), file=sys.stderr)
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__


def import_what_commands_use() -> None:
    """Import it, compile the templates of pages, and leave out their charts."""
    from undrawn_charts import draw_charts

    from kleash.reports import page

    for module in PRELOADED:
        import_module(module)
    import_module("pyarrow").array([])  # imports pandas where it is there
    draw_charts(False)
    environment = page._environment()
    for template in environment.list_templates():
        environment.get_template(template)


def set_streams(stdout: str, stderr: str) -> None:
    """Use these files as standard streams, and signals as at a terminal."""
    written = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, (path, flags) in enumerate([(os.devnull, os.O_RDONLY), (stdout, written), (stderr, written)]):
        os.dup2(os.open(path, flags), number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def exit_code_of(words: list[str]) -> int:
    """Run ``python WORDS`` in this process."""
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        code: Any = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)
