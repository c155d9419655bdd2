"""Building a network no larger than its files, filling it with parameters, and checking that it got all of them."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_modules

from kleash.checkpoints.resolution import Checkpoint
from kleash.errors import ModelError, summarise_error

ALWAYS_ALLOWED_BUFFER_ELEMENTS = 1 << 26
"""Number of elements of buffers (computed tables, which no file stores) that is accepted for any weights."""
MAX_RATIO, MAX_QUANTISED_RATIO = 2, 64
"""Largest ratio of a network's parameters to the elements in its files. Quantised files pack several weights into one
element."""
MAX_SHOWN_NAMES = 3


@contextmanager
def loading(checkpoint: Checkpoint, advice: str = "") -> Iterator[None]:
    """Context in which the errors of transformers, of any type, become one that names the checkpoint.

    Args:
        checkpoint: that is loaded.
        advice: what to do; "" for what follows from the error.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # the exception type depends on the configuration, down to AssertionError
        hint = "; add --trust-remote-code if you trust the code it brings" if "remote" in str(error) else ""
        raise ModelError(
            f"{checkpoint} cannot be loaded: {summarise_error(error)}{advice or hint}"
        ) from error


def check_network_size(checkpoint: Checkpoint, config: Any, build: Any, *, is_quantised: bool = False) -> Any:
    """Build the network of a configuration on the meta device and compare its parameters with those in its files.

    Args:
        checkpoint: the files.
        config: a transformers configuration.
        build: builds the network of a configuration, such as ``AutoModelForCausalLM.from_config``.
        is_quantised: whether its weights are quantised by settings that ``config`` does not have.

    Returns:
        The network on the meta device.

    Raises:
        ModelError: if it has too many parameters or buffers, or cannot be built.
    """
    elements = sum(tensor.elements for tensor in checkpoint.tensors.values())
    is_quantised |= getattr(config, "quantization_config", None) is not None
    limit = 4096 + 32 * len(checkpoint.tensors)
    with loading(checkpoint), torch.device("meta"), _limit_registrations(checkpoint, limit):
        network = build(deepcopy(config))
    parameters = sum(parameter.numel() for parameter in network.parameters())
    buffer_elements = sum(buffer.numel() for buffer in network.buffers())
    max_ratio = MAX_QUANTISED_RATIO if is_quantised else MAX_RATIO
    if parameters > max_ratio * elements or buffer_elements > max(
        ALWAYS_ALLOWED_BUFFER_ELEMENTS, 4 * elements
    ):
        raise ModelError(
            f"{checkpoint} describes in its settings a network of {parameters} weights and tables of "
            f"{buffer_elements} numbers, and its files hold {elements} numbers; correct them, or fetch the "
            "checkpoint again"
        )
    return network


@contextmanager
def _limit_registrations(checkpoint: Checkpoint, limit: int) -> Iterator[None]:
    """Context in which this thread cannot register more than ``limit`` modules and parameters of networks."""
    thread, registered = threading.get_ident(), count(1)

    def refuse_too_many(*_: Any) -> None:
        if threading.get_ident() == thread and next(registered) > limit:
            raise ModelError(
                f"{checkpoint} describes in its settings a network of {limit} parts and more, and its files hold "
                f"{len(checkpoint.tensors)} tensors; correct them, or fetch the checkpoint again"
            )

    handles = [
        torch_modules.register_module_parameter_registration_hook(refuse_too_many),
        torch_modules.register_module_module_registration_hook(refuse_too_many),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
