"""The worker process that renders chat templates.

``process.py`` starts it with the search path of its parent and a limit of CPU seconds. It reads requests as lines of
JSON and answers each with one line. It imports nothing of kleash: the folder of this file is not on its search path.
"""

import json
import math
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CPU_SECONDS = int(sys.argv[-1])
"""CPU time for one request; then the operating system ends the process."""
IMPORT_SECONDS = 60
MEMORY_BYTES = 1 << 30
"""Memory that a request may take in addition to that of the process after its imports."""
TODAY = datetime(2024, 7, 26)
"""The date that templates get on every day, so that a run is the same when it is resumed or repeated on another one;
that of Llama's templates where they cannot ask for it."""
MAX_TEXT_CHARACTERS = 1 << 24
"""A context of a million tokens is a quarter of this."""


def limit_memory() -> None:
    """Limit the address space to its present size plus ``MEMORY_BYTES``, where the system supports it."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def limit_time(seconds: int = CPU_SECONDS) -> None:
    """End the process after ``seconds`` to ``seconds`` + 1 more of CPU time, where the system supports it."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        limit = math.ceil(usage.ru_utime + usage.ru_stime) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def render(request: dict[str, Any]) -> dict[str, Any]:
    """The texts of conversations by a chat template, and the index ranges that the assistant generates."""
    from transformers.utils import chat_template_utils

    chat_template_utils.__dict__["datetime"] = SimpleNamespace(now=lambda: TODAY)
    texts, generation_indices = chat_template_utils.render_jinja_template(**request)
    if any(len(text) > MAX_TEXT_CHARACTERS for text in texts):
        return {"limit": f"its text is longer than {MAX_TEXT_CHARACTERS} characters"}
    return {"result": [texts, generation_indices]}


def main() -> None:
    """Answer requests until standard input ends."""
    responses, sys.stdout = sys.stdout.buffer, sys.stderr
    renderer_imported = False
    for line in sys.stdin.buffer:
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        try:
            if not renderer_imported:
                limit_time(IMPORT_SECONDS)
                from transformers.utils import chat_template_utils  # noqa: F401 (not charged to a template)

                limit_memory()
                renderer_imported = True
            limit_time()
            response = render(request)
        except MemoryError:
            response = {"limit": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"}
        except Exception as error:
            response = {"error": f"{error}"[:2000] or type(error).__name__}
        responses.write(json.dumps(response, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        responses.flush()


if __name__ == "__main__":
    main()
