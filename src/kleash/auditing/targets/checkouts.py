"""A function from a file of a checkout: of its files, only the statements that it needs are executed."""

import __future__

import ast
import builtins
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
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
MAX_NAMES = 5
"""Other files, and changed files, of a checkout that are named."""
ALWAYS_DEFINED = {*dir(builtins), "__name__", "__file__", "__doc__"}


class LoadedFunction(NamedTuple):
    """A function, or a class, of a file of a checkout."""

    function: Callable[..., Any]
    file: str
    """Relative to the checkout."""
    commit: str
    """"commit 7ea279a…", with the Python files that have changed since; or that no commit has the file."""
    notes: tuple[str, ...]
    """What else of the checkout was executed, and which imports are stand-ins."""


class Statement(NamedTuple):
    """A statement of a module, with the names of the module that it binds and that it uses."""

    node: ast.stmt
    binds: frozenset[str]
    """"*" for a ``from module import *``, which binds what the module has."""
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
    __radd__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __lt__ = __gt__ = __float__ = __eq__ = __ne__ = (
        refuse
    )
    __hash__ = object.__hash__


def load_function(source: Path, target: str) -> LoadedFunction:
    """The function that ``FILE:function``, ``FOLDER:function`` or ``FILE:Class.method`` names in the folder ``source``.

    What it uses is executed with it: variables, functions and classes of the same file and of those that it imports
    from, transitively, and imports of installed packages. An import that fails is a ``NotLoaded``. Annotations are not
    evaluated, and ``torch.compile`` returns a function as it is.

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
    checkout = Checkout(source)
    checkout.load(file, defined)
    module = checkout.module(file)
    definitions = (
        part
        for part in checkout.statements[file]
        if part in checkout.executed and not isinstance(part.node, ast.Import | ast.ImportFrom)
    )
    companions = dict.fromkeys(word for part in definitions for word in sorted(part.binds - {defined}))
    absent = [value.path for value in vars(module).values() if isinstance(value, NotLoaded)]
    files = [path.relative_to(source).as_posix() for path in checkout.modules if path.is_file()]
    notes = [f"runs `{name}` of `{where}`{', with its ' if companions else ''}{', '.join(companions)}"]
    if files[1:]:
        notes.append(f"runs what it uses of {', '.join(files[1 : MAX_NAMES + 1])}, and of what these import")
    if absent:
        notes.append(f"stand-ins, whose use is an error, replace {', '.join(absent)}")
    return LoadedFunction(get_attribute(module, name, where), where, commit_of(source, where), tuple(notes))


def commit_of(source: Path, file: str) -> str:
    """The git commit that ``source`` is at, with what has changed since; or that none has ``file``."""
    git = ["git", "-C", str(source), "--no-optional-locks"]
    commands = [*git, "rev-parse", "HEAD", f"HEAD:./{file}"], [*git, "status", "--porcelain", "-uall", "*.py"]
    try:
        done = [subprocess.run(words, capture_output=True, text=True, check=True) for words in commands]
    except (OSError, subprocess.CalledProcessError):  # no git, no repository, or not a file of its commit
        return "no git commit"
    commit, changed = (each.stdout.splitlines() for each in done)
    names = ", ".join(line[3:] for line in changed[:MAX_NAMES])
    return f"commit {commit[0]}{', with changes in ' if names else ''}{names}"


@dataclass(frozen=True, eq=False)
class Checkout:
    """Files of a checkout as modules, each of which executes what is asked of it, every statement once."""

    source: Path
    modules: dict[Path, ModuleType] = field(default_factory=dict[Path, ModuleType])
    statements: dict[Path, list[Statement]] = field(default_factory=dict[Path, list[Statement]])
    executed: list[Statement] = field(default_factory=list[Statement])

    def module(self, place: Path) -> ModuleType:
        """The module of a file, or of a folder of modules; a name in it is loaded when it is asked for."""
        if place not in self.modules:
            where = place.relative_to(self.source).as_posix()
            self.statements[place] = [*_statements_of(place, where)] if place.is_file() else []
            self.modules[place] = ModuleType(f"checkout:{where}")
            vars(self.modules[place]).update(
                __builtins__=vars(builtins) | {"__import__": partial(self._import, place)},
                __getattr__=partial(self.attribute, place),
            )
        return self.modules[place]

    def load(self, place: Path, name: str) -> None:
        """Execute what binds a name of a file, with what that uses; raises as ``load_function``."""
        module, where = self.module(place), place.relative_to(self.source).as_posix()
        with _being_loaded(module), replaced(torch, "compile", _uncompiled), quiet():
            for statement in _needed_statements(self.statements[place], name, where):
                if statement not in self.executed:
                    self.executed.append(statement)
                    self._execute(statement, place)

    def attribute(self, place: Path, name: str) -> Any:
        """A name that a module does not have yet: of its file, or a module of its folder.

        Raises:
            AttributeError: if there is none.
        """
        module, folder = self.module(place), place.parent if place.name == "__init__.py" else place
        bound = frozenset[str]().union(*(part.binds for part in self.statements[place]))
        inside = self.find(folder / name)
        if name in bound or ("*" in bound and inside is None and not name.startswith("__")):
            self.load(place, name)
        value = vars(module).get(name, inside)
        if name not in bound and (value is None or isinstance(value, NotLoaded)):
            raise AttributeError(f"{module.__name__} has no {name}")
        return value

    def find(self, path: Path) -> ModuleType | None:
        """The module at a path without a suffix, a package before a file before a folder; None if there is none."""
        places = (path / "__init__.py", path.with_name(f"{path.name}.py"), path)
        modules = (
            self.module(place) for place in places if place.exists() and place.is_relative_to(self.source)
        )
        return next(modules, None)

    def _import(
        self, place: Path, name: str, names: Any = None, _: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        """``__import__`` in the code of a file: of the checkout, which may be installed in another version as well.

        That is what is relative, in the folder of the checkout, or of the outermost package that has the file.

        Raises:
            ImportError: if there is no such module.
        """
        parts = name.split(".")
        packages = [folder for folder in place.parents if (folder / "__init__.py").exists()]
        roots = [*(folder.parent for folder in packages[-1:]), self.source, self.source / "src"]
        within = (
            [place.parents[level - 1]]
            if level
            else [root for root in roots if self.find(root / parts[0]) is not None]
        )
        if not within:
            return builtins.__import__(name, names, None, fromlist)
        holder = self.find(within[0].joinpath(*parts))
        if holder is None:
            raise ImportError(f"the checkout has no {name}")
        return holder if fromlist else self.find(within[0] / parts[0]) or holder

    def _execute(self, statement: Statement, place: Path) -> None:
        """Execute a statement of a file; an import that cannot be made binds a ``NotLoaded``."""
        node, flags, module = statement.node, __future__.annotations.compiler_flag, self.module(place)
        code = compile(ast.Module([node], []), str(place), "exec", flags, dont_inherit=True)
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        try:
            exec(code, vars(module))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # foreign code may raise anything
            if not is_import and isinstance(error, KleashError):
                raise
            message = f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(".")
            if not is_import:
                raise CannotRunError(
                    f"{place.relative_to(self.source)}, line {node.lineno}, raises {message}; write what is audited "
                    "into one file without it"
                ) from error
            stand_in = NotLoaded(_path_of_import(node), f"it cannot be imported ({message})")
            known = vars(module) if "*" in statement.uses else {}  # from another module
            vars(module).update({name: known.get(name, stand_in) for name in statement.binds})


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
            else f"no file in {place} defines {name} at its top level"
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
    binds |= {"*"} if ast.unparse(node).endswith(" import *") else set()
    return Statement(node, frozenset(binds - {"annotations"}), frozenset(_names_used(table)))


def _names_used(table: SymbolTable) -> set[str]:
    """The global names that a statement's scopes use."""
    is_module = table.get_type() == "module"
    names = {s.get_name() for s in table.get_symbols() if (s.is_referenced() if is_module else s.is_global())}
    return names.union(*map(_names_used, table.get_children()))


def _needed_statements(statements: Sequence[Statement], name: str, where: str) -> list[Statement]:
    """The statements that bind ``name`` and, transitively, the names that they use, or change what a variable holds.

    The latter bind nothing: ``CONFIG.kind = "k3"``, ``TABLE["k3"] = k3``, ``NAMES.append("k3")``. A name that none of
    them binds is imported from the modules of each ``from module import *``.
    """
    defined = {word: part for part in statements for word in part.binds}
    variables = {
        word
        for word, part in defined.items()
        if isinstance(part.node, ast.Assign | ast.AnnAssign | ast.AugAssign)
    }
    needed: set[int] = set()
    of_stars: list[Statement] = []
    queue = [(name, "")]
    while queue:
        word, user = queue.pop()
        if word not in defined and word not in ALWAYS_DEFINED:
            of_stars += [
                Statement(
                    ast.parse(ast.unparse(part.node).replace("*", word)).body[0],
                    frozenset({word}),
                    frozenset("*"),
                )
                for part in statements
                if "*" in part.binds
            ]
            if not of_stars:
                near = get_close_matches(word, defined, n=1)
                sentence = (
                    f"{user} uses {word}, which {where} does not define"
                    if user
                    else f"{where} has no {word!r} at its top level"
                )
                raise UnknownNameError(f"{sentence}{f'; did you mean {near[0]}?' if near else ''}")
        for at, part in enumerate(statements):
            is_change = word in part.uses & variables and not part.binds
            if (word in part.binds or is_change) and at not in needed:
                needed.add(at)
                queue += [(used, word) for used in part.uses]
    return [*of_stars, *(statements[at] for at in sorted(needed))]


@contextmanager
def _being_loaded(module: ModuleType) -> Iterator[None]:
    """Context in which dataclasses find ``module``; one may be inside another of the same module."""
    is_first = module.__name__ not in sys.modules
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        if is_first:
            del sys.modules[module.__name__]


def _uncompiled(function: Any = None, **_: Any) -> Any:
    """``function``; as a decorator with options, what returns it."""
    return _uncompiled if function is None else function


def _path_of_import(node: ast.Import | ast.ImportFrom) -> str:
    """What an import of one name binds: "torch", "ray.util" or "..losses.masked_mean"."""
    (alias,) = node.names
    if isinstance(node, ast.Import):
        return alias.name if alias.asname else alias.name.partition(".")[0]
    return "." * node.level + ".".join(filter(None, (node.module, alias.name)))
