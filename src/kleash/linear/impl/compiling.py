"""When the elementwise work is worth compiling, by which compiler, and whether it can be."""

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
from kleash.linear.impl.native.building import CannotBuildError, library
from kleash.linear.impl.pair import HeadPair
from kleash.linear.impl.vocab_shards import LOCAL_VOCAB
from kleash.linear.options import LinearOptions

PAYS_FROM = 5 * 10**9
"""Logits of one model from which on compiling (about 10 s) is cheaper than not (about 2 ns a logit)."""
NATIVE_PAYS_FROM = 2**20
"""Logits of one model from which on the library in C is asked for: it is built in two seconds, once on a machine."""


def goes_native(pair: HeadPair, options: LinearOptions) -> bool:
    """Whether this call's elementwise work is done by the library in C, where there is a function for it.

    It depends on the call alone, and on what is installed.
    """
    if options.compile == "never" or pair.across is not LOCAL_VOCAB:
        return False
    if pair.p.hidden.device.type != "cpu" or {pair.p.dtype, pair.q.dtype} != {torch.float32}:
        return False
    if options.compile == "auto" and pair.tokens * pair.p.vocabulary < NATIVE_PAYS_FROM:
        return False
    return missing_for_native() is None


@cache
def missing_for_native() -> str | None:
    """What is needed for the library in C and not there; None if nothing."""
    try:
        library()
    except CannotBuildError as error:
        return str(error)
    return None


def wanted(pair: HeadPair, options: LinearOptions) -> bool:
    """Whether this call has torch compile its core.

    It depends on the call alone, so that a number never depends on what was computed before it.

    Raises:
        CannotRunError: if it has to and something is missing.
    """
    if options.compile == "never":
        return False
    if pair.across is not LOCAL_VOCAB:
        if options.compile == "always":
            raise CannotRunError(
                "compile='always' cannot compile what the ranks of a vocabulary_group exchange; ask for 'auto'"
            )
        return False
    missing = missing_for(pair.p.hidden.device.type)
    if options.compile == "always":
        if missing is not None:
            raise CannotRunError(
                f"compile='always' needs {missing}; install it, or ask for 'auto' or 'never'"
            )
        return True
    return missing is None and pair.tokens * pair.p.vocabulary >= PAYS_FROM


@cache
def missing_for(device: str) -> str | None:
    """What is not installed and needed to compile for this kind of device; None if nothing."""
    if device != "cpu":
        return None
    compiler = os.environ.get("CXX", "g++")
    if which(compiler) is None:
        return f"a C++ compiler, and {compiler} is not there"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.exists() else f"Python's headers, and {header} is not there"


@cache
def compiled(core: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """``core`` compiled: for the first size of vocabulary it meets, then once more for all others."""
    return cast("Any", torch).compile(core, fullgraph=True)
