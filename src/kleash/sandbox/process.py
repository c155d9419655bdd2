"""A separate process for the chat templates of a checkpoint, with limits on time and memory.

A thread cannot be interrupted, and a template can allocate any amount of memory in one operation. It therefore runs in
a worker process (``worker.py``), which is killed when it exceeds its limits.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kleash.errors import SourceError
from kleash.extras import import_extra, replaced

WORKER = Path(__file__).with_name("worker.py")
START = """
import sys
sys.path[:] = sys.argv[1].split("\\n")
import runpy
runpy.run_path(sys.argv[2], run_name="__main__")
"""
"""The worker's first statements: the current directory is removed from the search path before any import."""
CPU_SECONDS = 5
"""CPU time for one request, enforced by the operating system."""
MAX_WALL_SECONDS = 120.0
"""Wall-clock time for one request, for systems that do not limit CPU time."""


class TemplateError(SourceError):
    """A chat template that refuses the messages, with its message, or exceeds a limit."""


class TemplateLimitError(TemplateError):
    """A chat template that does not end, produces too long a text, or takes too much memory."""

    def __init__(self, limit: str) -> None:
        """Say which ``limit`` it exceeds, and what to do."""
        super().__init__(f"it was stopped, since {limit}; give a template that ends, or prompts as text")


class SandboxProcess:
    """A worker process, started at the first request and restarted after it was killed."""

    def __init__(self) -> None:
        """Create the object without starting a process."""
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(self, request: dict[str, Any]) -> Any:
        """Send one request to the worker and return its result.

        Args:
            request: the arguments of ``render_jinja_template``, as JSON.

        Raises:
            TemplateLimitError: if it takes too long, or too much memory.
            TemplateError: if it raises an error.
        """
        with self._lock:
            try:
                response = self._exchange(json.dumps(request, default=str).encode() + b"\n")
            except BaseException:
                self.stop()
                raise
        if "limit" in response:
            raise TemplateLimitError(response["limit"])
        if "error" in response:
            raise TemplateError(response["error"])
        return response["result"]

    def stop(self) -> None:
        """Kill the process if it runs."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(OSError), process:  # unread input of a dead process cannot be flushed
                process.kill()

    def _exchange(self, request: bytes) -> dict[str, Any]:
        """Write one line to the worker and read one line from it."""
        process = self._ensure_started()
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(MAX_WALL_SECONDS, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            raise TemplateLimitError(
                f"it does not end within {CPU_SECONDS} s of computing, or takes too much memory"
            )
        return json.loads(line.decode("utf-8", "surrogatepass"))

    def _ensure_started(self) -> "subprocess.Popen[bytes]":
        """The running worker process; started if there is none."""
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
                    str(CPU_SECONDS),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "USE_TORCH": "0", "USE_TF": "0", "USE_FLAX": "0", **one_thread},
            )
        return self._process


SANDBOX = SandboxProcess()
atexit.register(SANDBOX.stop)
if hasattr(os, "register_at_fork"):  # a forked child must not share the parent's worker
    os.register_at_fork(after_in_child=SANDBOX.__init__)


def render_chat(tokenizer: Any, messages: list[Any], **options: Any) -> str:
    """The text that a tokenizer's chat template makes of messages, as ``apply_chat_template`` returns it.

    Args:
        tokenizer: of transformers.
        messages: a conversation.
        options: of ``apply_chat_template``, except ``tokenize``.

    Raises:
        TemplateError: if the template does not end, takes too much memory, or raises.
    """
    with sandboxed_templates():
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@contextmanager
def sandboxed_templates() -> Iterator[None]:
    """Context in which every transformers tokenizer renders its chat templates in the worker process.

    Replaces ``transformers.tokenization_utils_base.render_jinja_template``. If transformers renames that function,
    entering the context raises ``AttributeError``.
    """
    module: Any = import_extra("transformers.tokenization_utils_base", "models")
    with replaced(module, "render_jinja_template", _render):
        yield


def _render(conversations: Any, tools: Any = None, **request: Any) -> Any:
    """Replaces transformers' ``render_jinja_template``: same arguments, same return value."""
    if tools is not None and any(callable(tool) for tool in tools):
        schema = import_extra("transformers.utils.chat_template_utils", "models").get_json_schema
        tools = [schema(tool) if callable(tool) else tool for tool in tools]
    return SANDBOX.run({"conversations": conversations, "tools": tools, **request})
