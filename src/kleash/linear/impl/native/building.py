"""Builds ``rows.c`` and ``products.c`` for this machine, once: the library is kept in the user's cache folder."""

import ctypes
import os
import platform
import shlex
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from shutil import which

from kleash.user_cache import is_private_file, user_cache_folder

SOURCES = tuple(Path(__file__).with_name(name) for name in ("rows.c", "products.c"))
FLAGS = ("-std=c11", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
"""Nothing that would let a NaN pass for a number, or a sum be taken in an order that the source does not allow."""
X86 = ("x86_64", "AMD64", "i686")
LONGEST_S = 120.0


class CannotBuildError(Exception):
    """There is no library, and why: what is missing, as the end of "needs …"."""


@cache
def library() -> ctypes.CDLL:
    """The library, built if it never was on this machine.

    Raises:
        CannotBuildError: if there is no compiler, or it refuses.
    """
    command = usual_command()
    name = f"rows-{fingerprint(command)}.so"
    for folder in (cache_folder(), None):
        try:
            return loaded(folder, name, command)
        except OSError as error:
            why = str(error)
    raise CannotBuildError(f"a folder for what it compiles, and none could be written and read: {why}")


def loaded(folder: Path | None, name: str, command: tuple[str, ...]) -> ctypes.CDLL:
    """The library from the folder, built there if it is missing or broken; None is a folder that goes at once.

    A library is code: one that another user could have written is not loaded, but made anew in its place.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as private:
            return loaded(Path(private), name, command)
    path = folder / name
    with suppress(OSError):
        if is_private_file(path):
            return ctypes.CDLL(str(path))
    build(path, command)
    return ctypes.CDLL(str(path))


def usual_command() -> tuple[str, ...]:
    """The compiler and its options.

    Raises:
        CannotBuildError: if there is no compiler.
    """
    return (*compiler(), *FLAGS, *for_this_machine())


def build(path: Path, command: tuple[str, ...], *sources: Path) -> None:
    """Compile the sources, by default the library's, to ``path``, which is there whole or not at all.

    Raises:
        CannotBuildError: if the compiler refuses.
        OSError: if the folder cannot be written.
    """
    handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        result = subprocess.run(
            [*command, *map(str, sources or SOURCES), "-o", unfinished, "-lm"],
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
        if result.returncode != 0:
            said = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[0]
            raise CannotBuildError(f"a C compiler with OpenMP, and {command[0]} refused: {said}")
        Path(unfinished).chmod(0o700)
        Path(unfinished).replace(path)
    except subprocess.TimeoutExpired as error:
        raise CannotBuildError(
            f"a C compiler, and {command[0]} had not ended after {LONGEST_S:g} s"
        ) from error
    finally:
        Path(unfinished).unlink(missing_ok=True)


def compiler() -> tuple[str, ...]:
    """The command of the C compiler: $CC, or cc.

    Raises:
        CannotBuildError: if it is not there.
    """
    command = tuple(shlex.split(os.environ.get("CC", ""))) or ("cc",)
    if which(command[0]) is None:
        raise CannotBuildError(f"a C compiler, and {command[0]} is not there")
    return command


def for_this_machine() -> tuple[str, ...]:
    """What lets the compiler use all that this processor can."""
    if platform.machine() in X86:
        return "-march=native", "-mprefer-vector-width=512"
    return ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ()


def fingerprint(command: tuple[str, ...]) -> str:
    """Of all that the library depends on: source, command, compiler, processor.

    Raises:
        CannotBuildError: if the compiler cannot be run.
    """
    asked = [*command, "-dumpfullversion", "-dumpversion", "-dumpmachine"]
    try:
        version = subprocess.run(asked, capture_output=True, check=False, timeout=LONGEST_S).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuildError(f"a C compiler, and {command[0]} cannot be run: {error}") from error
    return sha256(
        b"\0".join(
            [*(path.read_bytes() for path in SOURCES), " ".join(command).encode(), version, processor()]
        )
    ).hexdigest()[:24]


def processor() -> bytes:
    """What this processor is: a cache folder may be shared between machines."""
    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        said = ""
    kept = [
        line for line in said.splitlines() if line.startswith(("flags", "Features", "model name", "CPU part"))
    ]
    return "\n".join([platform.machine(), platform.processor(), *kept]).encode()


def cache_folder() -> Path | None:
    """Where the library is kept: $XDG_CACHE_HOME/kleash, by default ~/.cache/kleash.

    None where another user could put a library there, and where nobody is at home: it is then built in a private
    folder that goes at once, in about two seconds.
    """
    return user_cache_folder()
