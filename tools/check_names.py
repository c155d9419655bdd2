"""Fails on names that are a participle or a pronoun and nothing else, and on two classes of one name in the package.

python tools/check_names.py     src, benchmarks, tools and examples; exit 1 if there is one
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STOP_WORDS = frozenset(
    (
        *("found", "said", "told", "given", "asked", "kept", "held", "own", "apart"),
        *("wanted", "one", "others", "theirs", "together", "here"),
    )
)
EXEMPTIONS = {
    "kept": ("src/kleash/divergences", "src/kleash/estimators", "src/kleash/leash"),
    "apart": ("examples/markov_models.py",),
}
"""Documented fields and arguments, with the folders that may have them."""


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that a module defines, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case (
                ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                yield name, node.lineno
            case (
                ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name))
            ):
                yield name, node.lineno


def main() -> int:
    """Print the violations."""
    lines: list[str] = []
    classes: dict[str, list[str]] = defaultdict(list)
    for folder in ("src", "benchmarks", "tools", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            place, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
            for name, line in [(path.stem, 1), *names(tree)]:
                if name.strip("_") in STOP_WORDS and not place.startswith(
                    EXEMPTIONS.get(name.strip("_"), ())
                ):
                    lines.append(f"{place}:{line}: {name}: name what it is, with the field's noun or verb")
            for node in ast.walk(tree) if folder == "src" else ():
                if isinstance(node, ast.ClassDef):
                    classes[node.name].append(f"{place}:{node.lineno}")
    lines += [
        f"class {name} in {' and '.join(at)}: rename one" for name, at in classes.items() if len(at) > 1
    ]
    print("\n".join([*lines, f"{len(lines)} names break a rule"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
