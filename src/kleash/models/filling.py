"""Filling a network with decoded parameters, and checking that a network got all of its weights."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kleash.errors import ModelError

MAX_SHOWN_NAMES = 3


def fill_network(
    load: Callable[..., tuple[Any, Any]],
    config: Any,
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
    device_map: str | None,
) -> tuple[Any, Any]:
    """A network with these parameters, and transformers' report of how they fit.

    Args:
        load: ``from_pretrained`` of its class.
        config: of the network.
        parameters: by the names of a checkpoint.
        dtype: of the network.
        device_map: how transformers spreads the network over devices; None for the CPU.
    """
    return load(
        None,
        config=config,
        state_dict=parameters,
        dtype=dtype,
        device_map=device_map,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported by check_complete instead
    )


def check_complete(report: Any, subject: str, advice: str = "") -> None:
    """Check that all weights of a network were in the files, in the shapes of the configuration.

    Args:
        report: of transformers.
        subject: the model, for errors.
        advice: what to do about missing weights; "" for what follows from their names.

    Raises:
        ModelError: naming the first weights.
    """
    mismatches = sorted(report.get("mismatched_keys", ()))
    if mismatches:
        # transformers 5 reports each name with two shapes, transformers 4 names alone.
        name, *shapes = [mismatches[0]] if isinstance(mismatches[0], str) else mismatches[0]
        difference = ": {}, and not {}".format(*map(tuple, shapes)) if shapes else ""
        raise ModelError(
            f"{subject} has {len(mismatches)} weights of other shapes than its configuration says, such as "
            f"{name}{difference}; correct it, or fetch or convert the model again"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{subject} lacks {len(missing)} of its weights, which would be random: "
            f"{', '.join(missing[:MAX_SHOWN_NAMES])}{advice or _explain_missing(missing, report['unexpected_keys'])}"
        )


def _explain_missing(missing: Sequence[str], unused: Collection[str]) -> str:
    """What to do about weights that are missing: by a prefix that all tensors have, or since there is no head."""
    prefixes = {name.removesuffix(missing[0]) for name in unused if name.endswith(f".{missing[0]}")}
    for prefix in sorted(prefixes):
        if all(f"{prefix}{name}" in unused for name in missing):
            return (
                f"; all of them are there with the prefix {prefix[:60]!r}, so save the model without its wrapper "
                "(torch.compile, DistributedDataParallel, a value head)"
            )
    if list(missing) == ["lm_head.weight"]:
        return (
            "; fetch the checkpoint again, unless it is a model of embeddings or rewards, which have no head"
        )
    return "; fetch the checkpoint again, or save it whole"
