"""When the elementwise core is worth compiling, and whether it can be."""

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
from kleash.linear.impl.across import ALONE
from kleash.linear.impl.pair import Pair
from kleash.linear.options import LinearOptions

PAYS_FROM = 5 * 10**9
"""Logits of one model from which on compiling (about 10 s) is cheaper than not (about 2 ns a logit)."""


def wanted(pair: Pair, options: LinearOptions) -> bool:
    """Whether this call compiles its core.

    It depends on the call alone, so that a number never depends on what was computed before it.

    Raises:
        CannotRunError: if it has to and something is missing.
    """
    if options.compile == "never":
        return False
    if pair.across is not ALONE:
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
