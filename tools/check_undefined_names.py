"""Fails on names that are used and defined nowhere in src, tests, benchmarks, tools and examples.

The linter and the type checker cannot check this with the settings in ``pyproject.toml``: they take the words in the
shape of ``Float[Tensor, "*tokens vocab"]`` for names. This check runs ruff's rule F821 and drops the reports in such a
shape. Names in other string annotations are checked.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "benchmarks", "tools", "examples")
IN_SHAPE = re.compile(r'\b(Float|Int|UInt|Integer|Real|Bool|Num|Shaped)\d*\[[\w.|\[\] ]+, "[^"]*$')
"""What stands before a name in the shape of an annotation of jaxtyping."""


def main() -> int:
    """Print the undefined names, and files that ruff cannot parse."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821"]
    command += ["--ignore-noqa", "--extend-exclude", "*.ipynb", "--target-version", "py310"]
    ruff = subprocess.run(
        [*command, "--output-format", "json", *FOLDERS], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    lines = []
    for report in json.loads(ruff.stdout):
        path, place = Path(report["filename"]), report["location"]
        lines_of_file = path.read_text(encoding="utf-8").splitlines()
        before = "".join(lines_of_file[place["row"] - 1 : place["row"]])[: place["column"] - 1]
        if report["code"] != "F821" or not IN_SHAPE.search(before):
            lines.append(f"{path.relative_to(ROOT)}:{place['row']}: {report['message']}")
    print("\n".join([*lines, f"{len(lines)} undefined names"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
