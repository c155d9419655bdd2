"""Prints how large the code is: statements, functions, modules, lines and nodes of the syntax tree, by floor.

python tools/count.py [FOLDER]     a checkout; this one if not given

Statements are those of ``ast`` without imports and docstrings. Nodes are counted too, so that dense expressions are no
gain. A report, which no check depends on.
"""

import ast
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

COLUMNS = ("statements", "functions", "modules", "lines", "ast nodes")
OTHERS = ("tests", "benchmarks", "tools", "examples")


def counts(text: str) -> np.ndarray:
    """The numbers of ``COLUMNS`` of a module."""
    nodes = list(ast.walk(ast.parse(text)))
    statements = sum(isinstance(node, ast.stmt) and not _is_left_out(node) for node in nodes)
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    return np.array([statements, functions, 1, text.count("\n"), len(nodes)])


def _is_left_out(node: ast.stmt) -> bool:
    """Whether a statement is an import or a docstring, also one below a field."""
    is_text = (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    return is_text or isinstance(node, ast.Import | ast.ImportFrom)


def by_floor(root: Path) -> dict[str, np.ndarray]:
    """The sums of each package of ``src/kleash``, of the modules beside them, and of the other folders."""
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(COLUMNS), dtype=int))
    package = root / "src" / "kleash"
    for path in sorted(package.rglob("*.py")):
        first, *below = path.relative_to(package).parts
        sums[first if below else "(modules of kleash)"] += counts(path.read_text(encoding="utf-8"))
    sums["src/kleash"] = sum(sums.values(), np.zeros(len(COLUMNS), dtype=int))
    for name in OTHERS:
        for path in sorted((root / name).rglob("*.py")):
            sums[name] += counts(path.read_text(encoding="utf-8"))
    return sums


def main() -> None:
    """Print the table."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    print(f"{'':20}" + "".join(f"{name:>12}" for name in COLUMNS))
    for name, numbers in by_floor(root).items():
        print(f"{name:20}" + "".join(f"{number:12,}" for number in numbers))


if __name__ == "__main__":
    main()
