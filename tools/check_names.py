"""Fails on names without a meaning, on classes and modules of one name, and on old names that came back.

python tools/check_names.py [FOLDER ...]     src, benchmarks, tools and examples; exit 1 if a rule is broken
    --tests      tests, too
    --report     print everything, also modules that are short or long; exit 0
    --summary    only how often each rule is broken, by top-level package
    --list       one-word variables and attributes in -ed, -en and -ing, to be read through

The rules, old names and exemptions are tables in ``name_rules.py``.
"""

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from name_rules import (
    EXEMPTIONS,
    FORBIDDEN_MODULES,
    LONGEST,
    MOST_EXEMPTIONS,
    NOUNS,
    OLD_NAMES,
    SHARED_NOUNS,
    SHARED_ROLES,
    SHORT_MODULES,
    SHORTEST,
    STOP_WORDS,
    Exemption,
    SharedNoun,
)

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "benchmarks", "tools", "examples")
PACKAGE = "src/kleash"
ENFORCED = ("stop-word", "old-name", "class-twice", "module-twice", "module-name")
REPORTED = ("short-module", "long-module")
SUFFIXES = ("ed", "en", "ing")


class Definition(NamedTuple):
    """A place where code gives something a name."""

    name: str
    kind: str
    """function, class, argument, variable, attribute or module."""
    path: str
    line: int


class Hit(NamedTuple):
    """A rule that a name breaks."""

    rule: str
    definition: Definition
    message: str

    def __str__(self) -> str:
        """The hit as an editor reads it."""
        place = self.definition
        return f"{place.path}:{place.line}: {self.rule}: {place.kind} {place.name}: {self.message}"


def definitions(path: str, text: str) -> Iterator[Definition]:
    """Every name that a file defines; what it only uses is defined elsewhere."""
    tree = ast.parse(text)
    fields = {
        id(statement.target if isinstance(statement, ast.AnnAssign) else target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
    }
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield Definition(name, "function", path, node.lineno)
            case ast.ClassDef(name=name):
                yield Definition(name, "class", path, node.lineno)
            case ast.arg(arg=name):
                yield Definition(name, "argument", path, node.lineno)
            case ast.Name(id=name, ctx=ast.Store()):
                yield Definition(name, "attribute" if id(node) in fields else "variable", path, node.lineno)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield Definition(name, "attribute", path, node.lineno)
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield Definition(name, "variable", path, node.lineno)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield Definition(name, "variable", path, node.lineno)
            case _:
                pass


def top_level(path: str) -> str:
    """The package of the project's that a file belongs to; outside of it the folder."""
    parts = Path(path).parts
    if path.startswith(PACKAGE + "/"):
        return Path(parts[2]).stem
    return parts[0]


def modules_of(paths: Iterable[str]) -> Iterator[Definition]:
    """The modules and packages of the project's package."""
    for path in paths:
        if path.startswith(PACKAGE + "/"):
            file = Path(path)
            name = file.parent.name if file.stem == "__init__" else file.stem
            if path != f"{PACKAGE}/__init__.py":
                yield Definition(name, "module", path, 1)


def stop_words(names: Iterable[Definition]) -> Iterator[Hit]:
    """Names that are a participle or a pronoun and nothing else."""
    for name in names:
        if name.name.strip("_") in STOP_WORDS:
            yield Hit("stop-word", name, "name what it is, with the field's noun or verb")


def old_names(names: Iterable[Definition]) -> Iterator[Hit]:
    """Names that were replaced."""
    table = defaultdict(list)
    for entry in OLD_NAMES:
        table[entry.old].append(entry)
    for name in names:
        kind = name.kind if name.kind in ("module", "class") else "name"
        for entry in table[name.name.lstrip("_")]:
            if (
                entry.kind == kind
                and name.path.startswith("src/")
                and entry.package in ("", top_level(name.path))
            ):
                yield Hit("old-name", name, f"is {entry.new} now")


def repeated(names: Iterable[Definition], rule: str, *, allowed: Iterable[str] = ()) -> Iterator[Hit]:
    """Names that are defined in more than one place."""
    places = defaultdict(list)
    for name in names:
        places[name.name].append(name)
    for several in places.values():
        paths = sorted({name.path for name in several})
        if len(several) > 1 and several[0].name not in allowed:
            for name in several:
                yield Hit(
                    rule, name, f"also in {', '.join(p for p in paths if p != name.path) or 'this file'}"
                )


def repeated_modules(modules: Sequence[Definition], nouns: Iterable[SharedNoun]) -> Iterator[Hit]:
    """Modules of one name that are neither the same role nor the same noun in each package."""
    packages = {noun.name: noun.packages for noun in nouns}
    counts = Counter((module.name, top_level(module.path)) for module in modules)
    for hit in repeated(modules, "module-twice", allowed={*SHARED_ROLES, *FORBIDDEN_MODULES}):
        name, package = hit.definition.name, top_level(hit.definition.path)
        if package not in packages.get(name, ()) or counts[name, package] > 1:
            yield hit


def sizes(texts: dict[str, str]) -> Iterator[Hit]:
    """Modules of the package that are short without a stated reason, or long."""
    for path, text in texts.items():
        if not path.startswith(PACKAGE + "/") or path.endswith("/__init__.py"):
            continue
        lines = text.count("\n")
        module = Definition(Path(path).stem, "module", path, 1)
        if lines < SHORTEST and path not in SHORT_MODULES:
            yield Hit("short-module", module, f"{lines} lines: merge it, or state the reason")
        if lines > LONGEST:
            yield Hit("long-module", module, f"{lines} lines")


def hits_of(texts: dict[str, str]) -> list[Hit]:
    """Every rule that is broken, nothing exempt.

    Args:
        texts: the files' contents by their paths from the root, with forward slashes.
    """
    names = [name for path, text in texts.items() for name in definitions(path, text)]
    modules = list(modules_of(texts))
    classes = [name for name in names if name.kind == "class" and name.path.startswith(PACKAGE + "/")]
    hits = [
        *stop_words([*names, *modules]),
        *old_names([*names, *modules]),
        *repeated(classes, "class-twice"),
        *repeated_modules(modules, SHARED_NOUNS),
        *(Hit("module-name", m, "name what it holds") for m in modules if m.name in FORBIDDEN_MODULES),
        *sizes(texts),
    ]
    return sorted(hits, key=lambda hit: (hit.definition.path, hit.definition.line, hit.rule))


def covers(exemption: Exemption, hit: Hit) -> bool:
    """Whether an exemption is about a hit."""
    path = hit.definition.path
    is_there = path == exemption.where or path.startswith(exemption.where.rstrip("/") + "/")
    return (exemption.rule, exemption.name) == (hit.rule, hit.definition.name) and is_there


def table_errors(
    hits: Sequence[Hit],
    exemptions: Sequence[Exemption],
    texts: dict[str, str],
    short: dict[str, str],
    nouns: Sequence[SharedNoun] = (),
) -> list[str]:
    """What is wrong with the tables: entries that apply to nothing, entries without a reason, too many exemptions."""
    folders = {Path(path).parts[0] for path in texts}
    errors = []
    for entry in exemptions:
        title = f"exemption of {entry.rule} {entry.name} in {entry.where}"
        if not entry.reason.strip():
            errors.append(f"{title} has no reason")
        if Path(entry.where).parts[0] in folders and not any(covers(entry, hit) for hit in hits):
            errors.append(f"{title}: nothing there breaks the rule; remove it")
    if len(exemptions) > MOST_EXEMPTIONS:
        errors.append(f"{len(exemptions)} exemptions; at most {MOST_EXEMPTIONS}")
    for path, reason in short.items():
        if Path(path).parts[0] in folders and texts.get(path, "\n" * SHORTEST).count("\n") >= SHORTEST:
            errors.append(f"{path} is listed as short and is not; remove it")
        if not reason.strip():
            errors.append(f"{path} is listed as short without a reason")
    modules = {(module.name, top_level(module.path)) for module in modules_of(texts)}
    for entry in nouns if modules else ():
        if absent := [package for package in entry.packages if (entry.name, package) not in modules]:
            errors.append(f"shared noun {entry.name}: no such module in {', '.join(absent)}")
        if len(entry.packages) < 2 or not entry.noun.strip():
            errors.append(f"shared noun {entry.name} has no two packages, or no reason")
    return errors


def to_be_read(texts: dict[str, str]) -> dict[str, list[Definition]]:
    """One-word variables and attributes in -ed, -en or -ing, by name."""
    names = defaultdict(list)
    for path, text in texts.items():
        for name in definitions(path, text):
            word = name.name.strip("_")
            is_value = name.kind in ("variable", "attribute") and "_" not in word
            if is_value and word.endswith(SUFFIXES) and word not in STOP_WORDS | NOUNS:
                names[word].append(name)
    return dict(sorted(names.items(), key=lambda item: -len(item[1])))


def read_files(root: Path, folders: Iterable[str]) -> dict[str, str]:
    """The Python files of the folders, by their paths from the root."""
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
    }


def summary(hits: Sequence[Hit]) -> str:
    """How often each rule is broken, by top-level package."""
    counts = Counter((top_level(hit.definition.path), hit.rule) for hit in hits)
    rules = [*ENFORCED, *REPORTED]
    packages = sorted({package for package, _ in counts})
    width = max([len("package"), *map(len, packages)])
    lines = ["  ".join(["package".ljust(width), *rules])]
    for package in [*packages, "total"]:
        row = [
            sum(n for (p, r), n in counts.items() if r == rule and package in (p, "total")) for rule in rules
        ]
        lines.append(
            "  ".join([package.ljust(width), *(f"{n:>{len(r)}}" for n, r in zip(row, rules, strict=True))])
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Check, and print what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    for flag in ("tests", "report", "summary", "list"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args(arguments)
    texts = read_files(options.root, [*options.folders, *(["tests"] if options.tests else [])])
    if options.list:
        for word, names in to_be_read(texts).items():
            print(f"{word} ({len(names)}): {', '.join(f'{n.path}:{n.line}' for n in names[:8])}")
        return 0
    every = hits_of(texts)
    hits = [hit for hit in every if not any(covers(entry, hit) for entry in EXEMPTIONS)]
    errors = table_errors(every, EXEMPTIONS, texts, SHORT_MODULES, SHARED_NOUNS)
    broken = [hit for hit in hits if hit.rule in ENFORCED]
    if options.summary:
        print(summary(hits))
    else:
        for line in [*(hits if options.report else broken), *errors]:
            print(line)
        print(f"{len(broken)} names break a rule, {len(errors)} exemptions are wrong")
    return 0 if options.report else int(bool(broken or errors))


if __name__ == "__main__":
    sys.exit(main())
