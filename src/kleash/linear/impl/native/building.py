"""Builds the library of ``rows.c`` and ``products.c`` once for this machine, in the user's cache folder."""

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
"""No option that ignores NaN or reorders sums."""
X86 = ("x86_64", "AMD64", "i686")
TIMEOUT_SECONDS = 120.0


class CannotBuildError(Exception):
    """The library cannot be built; the message is what is missing, as the end of "needs ..."."""


@cache
def library() -> ctypes.CDLL:
    """The library, built if this machine does not have it.

    Raises:
        CannotBuildError: if there is no compiler, or it fails.
    """
    command = compile_command()
    name = f"rows-{fingerprint(command)}.so"
    for folder in (cache_folder(), None):
        try:
            return loaded(folder, name, command)
        except OSError as error:
            reason = str(error)
    raise CannotBuildError(f"a folder for what it compiles, and none could be written and read: {reason}")


def loaded(folder: Path | None, name: str, command: tuple[str, ...]) -> ctypes.CDLL:
    """The library from the folder, built there if it is missing or broken; None is a temporary folder.

    A library is code: a file that another user could have written is not loaded but built again in its place.
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


def compile_command() -> tuple[str, ...]:
    """The compiler and its options for the library.

    Raises:
        CannotBuildError: if there is no compiler.
    """
    return (*compiler(), *FLAGS, *machine_flags())


def build(path: Path, command: tuple[str, ...], *sources: Path) -> None:
    """Compile the sources, by default the library's, to ``path``; the file is renamed when it is complete.

    Raises:
        CannotBuildError: if the compiler fails.
        OSError: if the folder cannot be written.
    """
    handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        result = subprocess.run(
            [*command, *map(str, sources or SOURCES), "-o", unfinished, "-lm"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        if result.returncode != 0:
            message = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[0]
            raise CannotBuildError(f"a C compiler with OpenMP, and {command[0]} refused: {message}")
        Path(unfinished).chmod(0o700)
        Path(unfinished).replace(path)
    except subprocess.TimeoutExpired as error:
        raise CannotBuildError(
            f"a C compiler, and {command[0]} had not ended after {TIMEOUT_SECONDS:g} s"
        ) from error
    finally:
        Path(unfinished).unlink(missing_ok=True)


def compiler() -> tuple[str, ...]:
    """The command of the C compiler: $CC, or cc.

    Raises:
        CannotBuildError: if it is not installed.
    """
    command = tuple(shlex.split(os.environ.get("CC", ""))) or ("cc",)
    if which(command[0]) is None:
        raise CannotBuildError(f"a C compiler, and {command[0]} is not there")
    return command


def machine_flags() -> tuple[str, ...]:
    """The options for the instructions of this processor."""
    if platform.machine() in X86:
        return "-march=native", "-mprefer-vector-width=512"
    return ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ()


def fingerprint(command: tuple[str, ...]) -> str:
    """A hash of everything that the library depends on: source, command, compiler, processor.

    Raises:
        CannotBuildError: if the compiler cannot be run.
    """
    version_command = [*command, "-dumpfullversion", "-dumpversion", "-dumpmachine"]
    try:
        version = subprocess.run(
            version_command, capture_output=True, check=False, timeout=TIMEOUT_SECONDS
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuildError(f"a C compiler, and {command[0]} cannot be run: {error}") from error
    return sha256(
        b"\0".join(
            [*(path.read_bytes() for path in SOURCES), " ".join(command).encode(), version, processor()]
        )
    ).hexdigest()[:24]


def processor() -> bytes:
    """A description of this processor, since machines may share a cache folder."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        cpuinfo = ""
    lines = [
        line
        for line in cpuinfo.splitlines()
        if line.startswith(("flags", "Features", "model name", "CPU part"))
    ]
    return "\n".join([platform.machine(), platform.processor(), *lines]).encode()


def cache_folder() -> Path | None:
    """The folder of the library: $XDG_CACHE_HOME/kleash, by default ~/.cache/kleash.

    None if another user could write to it, or if there is no home folder: the library is then built in a temporary
    folder of the process, in about two seconds.
    """
    return user_cache_folder()
