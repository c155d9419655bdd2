"""Decides whether a call's elementwise work is compiled, and by which compiler."""

import os
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import which
from typing import Any, cast

import torch
from torch import Tensor

from kleash.errors import CannotRunError
from kleash.linear.impl.base import HeadPair
from kleash.linear.impl.native.building import CannotBuildError, library
from kleash.linear.options import LinearOptions

PAYS_FROM = 5 * 10**9
"""Logits of one model above which compiling by torch (about 10 s) saves time (about 2 ns a logit)."""
NATIVE_PAYS_FROM = 2**20
"""Logits of one model above which the library in C is used; it is built once on a machine, in two seconds."""


def uses_native(pair: HeadPair, options: LinearOptions) -> bool:
    """Whether the library in C does this call's elementwise work, where it has a function for it.

    This depends on the call and the installation only.
    """
    if options.compile == "never" or pair.is_sharded:
        return False
    if pair.p.hidden.device.type != "cpu" or {pair.p.dtype, pair.q.dtype} != {torch.float32}:
        return False
    if options.compile == "auto" and pair.tokens * pair.local_vocab_size < NATIVE_PAYS_FROM:
        return False
    return missing_for_native() is None


@cache
def missing_for_native() -> str | None:
    """What the library in C needs and is missing; None if nothing is."""
    try:
        library()
    except CannotBuildError as error:
        return str(error)
    return None


def should_compile(pair: HeadPair, options: LinearOptions) -> bool:
    """Whether torch compiles this call's row functions.

    This depends on the call and the installation only, so that a number never depends on earlier calls.

    Raises:
        CannotRunError: if ``compile="always"`` and something is missing.
    """
    if options.compile == "never":
        return False
    if pair.is_sharded:
        if options.compile == "always":
            raise CannotRunError(
                "compile='always' cannot compile the collectives of a vocabulary_group; use 'auto'"
            )
        return False
    missing = missing_for(pair.p.hidden.device.type)
    if options.compile == "always":
        if missing is not None:
            raise CannotRunError(
                f"compile='always' needs {missing}; install it, or ask for 'auto' or 'never'"
            )
        return True
    return missing is None and pair.tokens * pair.local_vocab_size >= PAYS_FROM


@cache
def missing_for(device: str) -> str | None:
    """What torch's compiler needs for this type of device and is missing; None if nothing is."""
    if device != "cpu":
        return None
    compiler = os.environ.get("CXX", "g++")
    if which(compiler) is None:
        return f"a C++ compiler, and {compiler} is not there"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.exists() else f"Python's headers, and {header} is not there"


@cache
def compiled(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """The function compiled by torch: for the first vocabulary size, then once more for all other sizes."""
    return cast("Any", torch).compile(function, fullgraph=True)
