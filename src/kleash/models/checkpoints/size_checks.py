"""Checks that what a checkpoint's settings describe is no larger than what its files hold."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

from kleash.errors import ModelError, summarise_error
from kleash.models.checkpoints.config_checks import iterate_settings
from kleash.models.checkpoints.resolution import Checkpoint

RANK_SETTINGS = re.compile(r"(^|_)r$|rank")
"""Names of settings that are ranks of adapters."""
ALWAYS_ALLOWED_COUNT, ALWAYS_ALLOWED_RANK = 256, 512
"""Largest numbers of layers and ranks that are accepted for any adapter, since they take little memory."""
ALWAYS_ALLOWED_BUFFER_ELEMENTS = 1 << 26
"""Number of elements of buffers (computed tables, which no file stores) that is accepted for any weights."""
MAX_RATIO, MAX_QUANTISED_RATIO = 2, 64
"""Largest ratio of a network's parameters to the elements in its files. Quantised files pack several weights into one
element."""


class _TooManyModulesError(Exception):
    """A network registers more modules and parameters than its files could fill."""


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
    tensors = len(checkpoint.tensors)
    elements = sum(tensor.elements for tensor in checkpoint.tensors.values())
    is_quantised |= getattr(config, "quantization_config", None) is not None
    try:
        with torch.device("meta"), _limit_registrations(4096 + 32 * tensors):
            network = build(deepcopy(config))
    except _TooManyModulesError as error:
        raise ModelError(
            f"{checkpoint} describes in its settings a network of {error} parts and more, and its files hold "
            f"{tensors} tensors; correct them, or fetch the checkpoint again"
        ) from error
    except Exception as error:  # the exception type depends on the configuration
        hint = "; add --trust-remote-code if you trust the code it brings" if "remote" in str(error) else ""
        raise ModelError(f"{checkpoint} cannot be loaded: {summarise_error(error)}{hint}") from error
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


def check_adapter_sizes(checkpoint: Checkpoint) -> None:
    """Check that no rank and no number of layers in adapter_config.json is too large for the adapter's tensors.

    Raises:
        ModelError: naming the setting and its value.
    """
    shapes = [tensor.shape for tensor in checkpoint.adapter_tensors.values()]
    largest = max((size for shape in shapes for size in shape), default=0)
    subject = checkpoint.adapter_subject
    for name, value in iterate_settings(checkpoint.adapter_settings):
        is_rank = isinstance(value, int | float) and RANK_SETTINGS.search(name.lower())
        if is_rank and not abs(value) <= max(ALWAYS_ALLOWED_RANK, largest):
            raise ModelError(
                f"{subject} has {name} {value:.6g} in its adapter_config.json, and no tensor of it has a size above "
                f"{largest}; correct adapter_config.json, or fetch the adapter again"
            )
    layers = _count_replicated_layers(checkpoint.adapter_settings.get("layer_replication"))
    if layers > max(ALWAYS_ALLOWED_COUNT, len(shapes)):
        raise ModelError(
            f"{subject} makes {layers} layers by its layer_replication, and holds {len(shapes)} tensors; correct "
            "adapter_config.json, or fetch the adapter again"
        )


def _count_replicated_layers(ranges: Any) -> int:
    """The number of layers that the setting ``layer_replication`` makes, a list of [start, end]."""
    if not isinstance(ranges, list):
        return 0
    spans = [span for span in ranges if isinstance(span, list) and len(span) == 2]
    return sum(abs(end - start) for start, end in spans if type(start) is int and type(end) is int)


@contextmanager
def _limit_registrations(limit: int) -> Iterator[None]:
    """Context in which this thread cannot register more than ``limit`` modules and parameters of networks."""
    thread, num_registered = threading.get_ident(), 0

    def count(*_: Any) -> None:
        nonlocal num_registered
        if threading.get_ident() == thread:
            num_registered += 1
            if num_registered > limit:
                raise _TooManyModulesError(num_registered)

    handles = [
        torch_modules.register_module_parameter_registration_hook(count),
        torch_modules.register_module_module_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
