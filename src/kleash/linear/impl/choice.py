"""Which implementation does what is asked for, and why triton cannot."""

from importlib import import_module
from importlib.util import find_spec
from os import environ
from typing import Any

import torch

from kleash.divergences import DIVERGENCES, Divergence
from kleash.errors import CannotRunError
from kleash.linear.impl.pair import HeadPair
from kleash.linear.impl.vocab_shards import LOCAL_VOCAB
from kleash.linear.options import LinearOptions

COVERED = DIVERGENCES["kl"], DIVERGENCES["reverse_kl"]
"""The divergences that there are kernels for."""


def implementation(options: LinearOptions, pair: HeadPair, record: Divergence | None = None) -> Any:
    """The module that was asked for.

    Raises:
        CannotRunError: if it cannot do this.
    """
    return import_module(f"kleash.linear.impl.{chosen(options, pair, record)}")


def chosen(options: LinearOptions, pair: HeadPair, record: Divergence | None) -> str:
    """The name of the module that does it; ``record`` is None where no divergence is chosen.

    Raises:
        CannotRunError: if triton or reference is asked for by its name and cannot.
    """
    if options.impl == "reference" and options.skip_below != 0.0:
        raise CannotRunError(
            f"impl='reference' leaves nothing out and skip_below is {options.skip_below}; ask for 'chunked'"
        )
    if pair.across is not LOCAL_VOCAB and options.skip_below != 0.0:
        raise CannotRunError(
            f"skip_below is {options.skip_below}, and with a vocabulary_group nothing is left out; leave it at 0"
        )
    if options.impl not in ("auto", "triton"):
        return options.impl
    if options.impl == "auto" and pair.p.hidden.device.type != "cuda":
        return "chunked"
    obstacle = triton_obstacle(options, pair, record)
    if obstacle is None:
        return "triton"
    if options.impl == "auto":
        return "chunked"
    raise CannotRunError(f"impl='triton' {obstacle}; ask for 'chunked'")


def triton_obstacle(options: LinearOptions, pair: HeadPair, record: Divergence | None) -> str | None:
    """Why the kernels cannot do this; None if they can."""
    if find_spec("triton") is None:
        return "needs triton, which is not installed"
    device = pair.p.hidden.device.type
    if device != "cuda" and not (device == "cpu" and environ.get("TRITON_INTERPRET") == "1"):
        return f"runs on CUDA tensors and these are on {device}"
    if pair.p.dtype != torch.float32:
        return f"computes in float32 and something given is {pair.p.dtype}"
    if record is not None and record not in COVERED:
        return "has kernels for KL in both directions and for no other divergence"
    if pair.across is not LOCAL_VOCAB:
        return "cannot use a head split over a vocabulary_group"
    if options.skip_below != 0.0:
        return f"leaves nothing out and skip_below is {options.skip_below}"
    return None
