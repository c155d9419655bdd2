"""A function from a file of a checkout: of its module, only the statements that it needs are executed."""

import __future__

import ast
import builtins
import hashlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from difflib import get_close_matches
from pathlib import Path
from symtable import SymbolTable, symtable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from kleash.auditing.targets.packages import quiet
from kleash.dotted import get_attribute
from kleash.errors import CannotRunError, KleashError, MissingExtraError, OptionError, UnknownNameError
from kleash.extras import replaced

STRING_ANNOTATIONS = "from __future__ import annotations\n"
"""Before a statement, so that it does not use the names of its annotations, which are not evaluated."""
ALWAYS_DEFINED = {*dir(builtins), "__name__", "__file__", "__doc__"}


class LoadedFunction(NamedTuple):
    """A function, or a class, of a file of a checkout."""

    function: Callable[..., Any]
    file: str
    """Relative to the checkout."""
    commit: str
    """"commit 7ea279a…", or that no commit has the file as it is."""
    notes: tuple[str, ...]
    """What else of the file was executed, and which imports are stand-ins."""


class Statement(NamedTuple):
    """A statement of a module, with the names of the module that it binds and that it uses."""

    node: ast.stmt
    binds: frozenset[str]
    uses: frozenset[str]


class NotLoaded:
    """Stands for an import that was not loaded; any use but ``isinstance`` and ``is`` says what was used of it.

    Comparing it is such a use: labels compared with a constant of another file would select the padding.
    """

    def __init__(self, path: str, reason: str) -> None:
        """Stand for the module, or the name in a module, at ``path``."""
        self.path, self.reason = path, reason

    def __getattr__(self, name: str) -> "NotLoaded":
        """The stand-in of a name in it."""
        if name.startswith("__"):
            raise AttributeError(name)
        return NotLoaded(f"{self.path}.{name}", self.reason)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        """No base class, where a class inherits from it."""
        return ()

    def __instancecheck__(self, instance: object) -> bool:
        """False: nothing was made by what is not there."""
        return False

    def refuse(self, *_: Any, **__: Any) -> Any:
        """Raise ``MissingExtraError``, which says what was used of the import."""
        raise MissingExtraError(
            f"{self.path} is needed, but {self.reason}; write it into one file with what is audited"
        )

    __call__ = __getitem__ = __iter__ = __bool__ = __enter__ = __add__ = __mul__ = refuse
    __radd__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __lt__ = __gt__ = __float__ = refuse
    __eq__ = __ne__ = refuse
    __hash__ = object.__hash__


def load_function(source: Path, target: str) -> LoadedFunction:
    """The function that ``FILE:function``, ``FOLDER:function`` or ``FILE:Class.method`` names in the folder ``source``.

    What it uses is executed with it: variables, functions and classes of the same file, transitively, and imports of
    installed packages. Any other import, also of the checkout, is a ``NotLoaded``. Annotations are not evaluated, and
    ``torch.compile`` returns a function as it is.

    Raises:
        OptionError: if ``target`` does not have this form or names a method of objects, or ``source`` is no folder.
        UnknownNameError: if the file, the function or a name that it uses does not exist.
        CannotRunError: if the file is no Python, or executing one of the statements raises.
        MissingExtraError: if one of the statements needs an import that was not loaded.
    """
    path, colon, name = target.rpartition(":")
    if not colon or not all(map(str.isidentifier, name.split("."))):
        raise OptionError(
            f"a function of a checkout is written FILE:function, or FILE:Class.method; it is {target!r}"
        )
    source = source.expanduser().resolve()
    if not source.is_dir():
        raise OptionError(f"--source is the folder of a checkout; there is no folder {source}")
    defined = name.partition(".")[0]
    file = _find_file(source, path, defined)
    where = file.relative_to(source).as_posix()
    needed = _needed_statements([*_statements_of(file, where)], defined, where)
    module = ModuleType(f"checkout:{where}")
    with _being_loaded(module), replaced(torch, "compile", _uncompiled), quiet():
        for statement in needed:
            _execute(statement, module, source, where)
    definitions = (part for part in needed if not isinstance(part.node, ast.Import | ast.ImportFrom))
    companions = dict.fromkeys(word for part in definitions for word in sorted(part.binds - {defined}))
    absent = [value.path for value in vars(module).values() if isinstance(value, NotLoaded)]
    notes = [f"runs `{name}` of `{where}`{', with its ' if companions else ''}{', '.join(companions)}"]
    notes += [f"stand-ins, whose use is an error, replace {', '.join(absent)}"] if absent else []
    return LoadedFunction(get_attribute(module, name, where), where, commit_of(source, where), tuple(notes))


def commit_of(source: Path, file: str) -> str:
    """The git commit that ``source`` is at, if it has ``file`` as it is there; otherwise that no commit has it."""
    content = (source / file).read_bytes()
    blob = hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest()
    try:
        words = ["git", "-C", str(source), "rev-parse", "HEAD", f"HEAD:./{file}"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, no repository, or not a file of its commit
        return "no git commit"
    commit, committed = done.stdout.split()
    return f"commit {commit}{'' if blob == committed else f', with changes in {file}'}"


def _find_file(source: Path, path: str, name: str) -> Path:
    """The file at ``path`` in ``source``; in a folder, the one that defines ``name``."""
    place = (source / path).resolve()
    if not place.exists() or not place.is_relative_to(source):
        raise UnknownNameError(f"there is no file {path} in {source}")
    if place.is_file():
        return place
    definition = re.compile(rf"^(?:async def|def|class) {name}\b", re.MULTILINE)
    files = [file for file in sorted(place.rglob("*.py")) if definition.search(_text_of(file))]
    if len(files) != 1:
        names = ", ".join(file.relative_to(source).as_posix() for file in files[:5])
        raise UnknownNameError(
            f"{len(files)} files in {place} define {name}, among them {names}; name one"
            if files
            else f"no file in {place} defines {name}"
        )
    return files[0]


def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8-sig", errors="replace")


def _statements_of(file: Path, where: str) -> Iterator[Statement]:
    """The statements of a module in order; an import of several names is one for each."""
    try:
        nodes = ast.parse(_text_of(file), where).body
    except (SyntaxError, ValueError) as error:
        raise CannotRunError(f"{where} is not Python: {error}") from error
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                single = copy(node)
                single.names = [alias]
                yield _statement(single)
        else:
            yield _statement(node)


def _statement(node: ast.stmt) -> Statement:
    """A statement with the names that it binds, and the global names that it uses."""
    table = symtable(STRING_ANNOTATIONS + ast.unparse(node), "", "exec")
    binds = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    return Statement(node, frozenset(binds - {"annotations"}), frozenset(_names_used(table)))


def _names_used(table: SymbolTable) -> set[str]:
    """The global names that a statement's scopes use."""
    is_module = table.get_type() == "module"
    names = {s.get_name() for s in table.get_symbols() if (s.is_referenced() if is_module else s.is_global())}
    return names.union(*map(_names_used, table.get_children()))


def _needed_statements(statements: Sequence[Statement], name: str, where: str) -> list[Statement]:
    """The statements that bind ``name`` and, transitively, the names that they use, or change what a variable holds.

    The latter bind nothing: ``CONFIG.kind = "k3"``, ``TABLE["k3"] = k3``, ``NAMES.append("k3")``.
    """
    defined = {word: part for part in statements for word in part.binds}
    variables = {
        word
        for word, part in defined.items()
        if isinstance(part.node, ast.Assign | ast.AnnAssign | ast.AugAssign)
    }
    needed: set[int] = set()
    queue = [(name, "")]
    while queue:
        word, user = queue.pop()
        if word not in defined and word not in ALWAYS_DEFINED:
            near = get_close_matches(word, defined, n=1)
            sentence = (
                f"{user} uses {word}, which {where} does not define" if user else f"{where} has no {word!r}"
            )
            raise UnknownNameError(f"{sentence}{f'; did you mean {near[0]}?' if near else ''}")
        for at, part in enumerate(statements):
            is_change = word in part.uses & variables and not part.binds
            if (word in part.binds or is_change) and at not in needed:
                needed.add(at)
                queue += [(used, word) for used in part.uses]
    return [statements[at] for at in sorted(needed)]


@contextmanager
def _being_loaded(module: ModuleType) -> Iterator[None]:
    """Context in which dataclasses find ``module``."""
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules[module.__name__]


def _uncompiled(function: Any = None, **_: Any) -> Any:
    """``function``; as a decorator with options, what returns it."""
    return _uncompiled if function is None else function


def _execute(statement: Statement, module: ModuleType, source: Path, where: str) -> None:
    """Execute a statement in ``module``; an import that cannot be made binds a ``NotLoaded``."""
    node, flags = statement.node, __future__.annotations.compiler_flag
    code = compile(ast.Module([node], []), str(source / where), "exec", flags, dont_inherit=True)
    try:
        if _imports_from(node, source, where):
            raise ImportError("one file of a checkout is loaded alone")
        exec(code, vars(module))
    except (KleashError, KeyboardInterrupt):
        raise
    except BaseException as error:  # foreign code may raise anything
        message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        if not isinstance(node, ast.Import | ast.ImportFrom):
            raise CannotRunError(f"{where}, line {node.lineno}, raises {message}") from error
        stand_in = NotLoaded(_path_of_import(node), f"it cannot be imported ({message})")
        vars(module).update(dict.fromkeys(statement.binds, stand_in))


def _imports_from(node: ast.stmt, source: Path, where: str) -> bool:
    """Whether a statement imports from the checkout, which may also be installed, in another version.

    That is what is relative, in the folder of the checkout, or of the package, anywhere in it, that has the file.
    """
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return False
    top = _path_of_import(node).partition(".")[0]
    packages = [folder.name for folder in (source / where).parents if (folder / "__init__.py").exists()]
    return top in ("", *packages[-1:]) or any(
        (source / name).exists() for name in (top, f"{top}.py", f"src/{top}")
    )


def _path_of_import(node: ast.Import | ast.ImportFrom) -> str:
    """What an import of one name binds: "torch", "ray.util" or "..losses.masked_mean"."""
    (alias,) = node.names
    if isinstance(node, ast.Import):
        return alias.name if alias.asname else alias.name.partition(".")[0]
    return "." * node.level + ".".join(filter(None, (node.module, alias.name)))
