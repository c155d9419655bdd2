"""The program of a process that renders chat templates and tries patterns, and can be killed where they do not end.

It is started by ``bounded_work`` with the search path of its parent and a number of seconds, reads requests as lines of
JSON and answers each with one. Nothing of kleash is imported: the folder of this file is not on its search path.
"""

import json
import re
import sys
from typing import Any

SECONDS = int(sys.argv[-1])
"""Of computing for one request; then the system ends the process."""
IMPORT_SECONDS = 60
MEMORY_BYTES = 1 << 30
"""Beyond what the process has when it starts."""
LONGEST_TEXT = 1 << 24
"""Characters; a context of a million tokens is a quarter of it."""


def limit_memory() -> None:
    """Let the process have so much more memory and no more, where the system can do that."""
    try:
        import resource
        from pathlib import Path

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (ImportError, OSError, ValueError):
        return


def limit_time(seconds: int = SECONDS) -> None:
    """End the process after so many more seconds of computing, where the system can do that."""
    try:
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        most = int(used.ru_utime + used.ru_stime) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
    except (ImportError, OSError, ValueError):
        return


def render(request: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of conversations by a template, and where in it the assistant speaks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, places = render_jinja_template(**request)
    if any(len(text) > LONGEST_TEXT for text in texts):
        return {"limit": f"its text is longer than {LONGEST_TEXT} characters"}
    return {"result": [texts, places]}


def match(request: dict[str, Any]) -> dict[str, Any]:
    """Try each pattern on each name; all that matters is that this ends."""
    for pattern in request["patterns"]:
        compiled = re.compile(pattern)
        for name in request["names"]:
            compiled.fullmatch(name)
            compiled.search(name)
    return {"result": []}


def main() -> None:
    """Answer requests until there are no more."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    ready = False
    for line in sys.stdin.buffer:
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        try:
            if request["kind"] == "match":
                limit_time()
                answer = match(request["request"])
            else:
                if not ready:
                    limit_time(IMPORT_SECONDS)
                    from transformers.utils import chat_template_utils  # noqa: F401 (what this takes is no template's)

                    limit_memory()
                    ready = True
                limit_time()
                answer = render(request["request"])
        except MemoryError:
            answer = {"limit": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"}
        except Exception as error:
            answer = {"error": f"{error}"[:2000] or type(error).__name__}
        answers.write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
