"""What a checkpoint's author wrote and this program runs, templates and patterns, bounded in time and memory.

Neither a thread nor a regular expression can be stopped, and a template can ask for any amount of memory in one
operation. So both are done in a process of their own, which is killed when it takes too long.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kleash.errors import ModelError, SourceError
from kleash.extras import import_extra

WORKER = Path(__file__).with_name("worker.py")
START = """
import sys
sys.path[:] = sys.argv[1].split("\\n")
import runpy
runpy.run_path(sys.argv[2], run_name="__main__")
"""
"""Nothing is imported before the folder where the command stands is off the search path."""
SECONDS = 5
"""Of computing for one request; then the system ends the worker."""
LONGEST_WAIT = 120.0
"""Seconds by the clock for one request, where the system does not count those of computing."""


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

    def ask(self, kind: str, request: dict[str, Any]) -> Any:
        """The worker's result.

        Raises:
            StoppedError: if it takes too long, or too much memory.
            FailedError: if it raised an error.
        """
        with self._lock:
            try:
                answer = self._answer(
                    json.dumps({"kind": kind, "request": request}, default=str).encode() + b"\n"
                )
            except BaseException:
                self.stop()
                raise
        if "limit" in answer:
            raise StoppedError(answer["limit"])
        if "error" in answer:
            raise FailedError(answer["error"])
        return answer["result"]

    def stop(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what was not read by a dead process cannot be flushed to it
                        pipe.close()

    def _answer(self, request: bytes) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(LONGEST_WAIT, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            received = process.stdout.readline()
        except OSError:
            received = b""
        finally:
            timer.cancel()
        if not received.endswith(b"\n"):
            raise StoppedError(f"it does not end within {SECONDS} s of computing, or takes too much memory")
        return json.loads(received.decode("utf-8", "surrogatepass"))

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self.stop()
            one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    START,
                    "\n".join(filter(os.path.isabs, sys.path)),
                    str(WORKER),
                    str(SECONDS),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "USE_TORCH": "0", "USE_TF": "0", "USE_FLAX": "0", **one_thread},
            )
        return self._process


WORK = Worker()
atexit.register(WORK.stop)
if hasattr(os, "register_at_fork"):  # the parent's process answers the parent alone
    os.register_at_fork(after_in_child=WORK.__init__)


def check_patterns(what: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """See that regular expressions are valid, and that matching them against names ends.

    Raises:
        ModelError: if not.
    """
    request = {"patterns": list(patterns), "names": list(names)}
    if not request["patterns"]:
        return
    try:
        WORK.ask("match", request)
    except (StoppedError, FailedError) as error:
        raise ModelError(
            f"{what} has a pattern in its adapter_config.json that cannot be used ({error}); mend it, such as by "
            "naming the modules in a list"
        ) from error


_LOCK = threading.RLock()


class TemplateError(SourceError):
    """A chat template that does not end, makes too long a text, or refuses the messages."""


def chat_text(tokenizer: Any, messages: list[Any], **options: Any) -> str:
    """The text that a tokenizer's chat template makes of messages, as ``apply_chat_template`` gives it.

    Args:
        tokenizer: of transformers.
        messages: a conversation.
        options: of ``apply_chat_template``, but for ``tokenize``.

    Raises:
        TemplateError: if the template does not end, or takes too much memory.
    """
    with bounded_templates():
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@contextmanager
def bounded_templates() -> Iterator[None]:
    """Inside, every tokenizer of transformers has its templates rendered in the process that can be killed."""
    module: Any = import_extra("transformers.tokenization_utils_base", "models")
    with _LOCK:
        own = module.render_jinja_template
        module.render_jinja_template = _render
    try:
        yield
    finally:
        with _LOCK:
            module.render_jinja_template = own


def _render(conversations: Any, tools: Any = None, **request: Any) -> Any:
    """Stands in for transformers' ``render_jinja_template``: the same arguments, the same texts."""
    if tools is not None and any(callable(tool) for tool in tools):
        schema = import_extra("transformers.utils.chat_template_utils", "models").get_json_schema
        tools = [schema(tool) if callable(tool) else tool for tool in tools]
    try:
        texts, places = WORK.ask("render", {"conversations": conversations, "tools": tools, **request})
    except StoppedError as error:
        raise TemplateError(
            f"it was stopped, since {error}; give a template that ends, or prompts as text"
        ) from error
    except FailedError as error:
        raise TemplateError(str(error)) from error
    return texts, places
