"""What the settings of a checkpoint may not ask for: code that is imported, or files outside the checkpoint."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

from kleash.errors import ModelError
from kleash.models.checkpoints.files import (
    ADAPTER_WEIGHTS,
    read_json,
    safetensors_header,
    weight_files,
)
from kleash.models.compat import first_line

MEGATRON = "megatron.core"
"""What PEFT writes into every adapter's settings; it is imported only with a megatron_config."""
SHOWN = 80


def check_model_settings(path: Path, settings: dict[str, Any]) -> None:
    """Refuse a config.json that has kernels fetched and run, or weights read that are no safetensors.

    Raises:
        ModelError: naming the setting.
    """
    for name, value in named_values(settings):
        if "implementation" in name and isinstance(value, str) and ("/" in value or "\\" in value):
            raise ModelError(
                f"{path} takes {name} from {_shown(value)}, whose code would be fetched and run; set it to null or "
                "to an implementation of transformers, such as 'sdpa'"
            )
    weights = settings.get("transformers_weights")
    if weights not in (None, "model.safetensors"):
        raise ModelError(
            f"{path} takes its weights from {_shown(weights)}; name the file model.safetensors and remove "
            "transformers_weights"
        )


def check_index(path: Path, index: dict[str, Any]) -> None:
    """Refuse an index of shards that leads out of its folder, or to files that are no safetensors.

    Raises:
        ModelError: naming the file that it leads to.
    """
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards or not isinstance(index.get("metadata", {}), dict):
        raise ModelError(f"{path} has no weight_map from tensors to files; fetch or make it again")
    for shard in {str(shard): shard for shard in shards.values()}.values():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or Path(shard).name != shard:
            raise ModelError(
                f"{path} leads to {_shown(shard)}; every shard must be a .safetensors file in the same folder"
            )
        if not (path.parent / shard).is_file():
            raise ModelError(
                f"{path} leads to {_shown(shard)}, which is not there; fetch the checkpoint again"
            )


def check_adapter_files(name: str, folder: Path, settings: dict[str, Any]) -> None:
    """Refuse an adapter that has a module imported, or whose weights are not in adapter_model.safetensors.

    Raises:
        ModelError: naming the setting or the file.
    """
    core = settings.get("megatron_core")
    if settings.get("megatron_config") is not None or core not in (None, MEGATRON):
        raise ModelError(
            f"the adapter {name} has a megatron_config, for which the module {_shown(core)} would be imported and "
            "run; set megatron_config to null and megatron_core to 'megatron.core' in adapter_config.json"
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").exists()
        raise ModelError(
            f"the adapter {name} has no {ADAPTER_WEIGHTS}"
            + (", only adapter_model.bin, a pickle that can run code when opened" if pickled else "")
            + "; where you trust it, load it with PEFT and save it again with save_pretrained"
        )


def named_values(settings: Any) -> Iterator[tuple[str, Any]]:
    """Every value of nested settings with the name that it stands under."""
    unread = [("", settings)]
    while unread:
        name, value = unread.pop()
        if isinstance(value, dict):
            # The keys of a dictionary of implementations, or of patterns, are names of parts of the model.
            unread += [
                (f"{key} of {name}" if "implementation" in name or "pattern" in name else str(key), one)
                for key, one in value.items()
            ]
        elif isinstance(value, list):
            unread += [(name, one) for one in value]
        else:
            yield name, value


def _shown(value: Any) -> str:
    return repr(value)[:SHOWN]


COUNTS = re.compile(r"layers?$|layers?_|blocks?$|depth|stages?$|experts?")
"""Settings that say how often something is built."""

NO_SIZES = re.compile(
    r"position|length|seq|token|theta|window|factor|alpha|beta|scal|seed|key|step|indices|version|eps|tinit|tfinal|deltat|_id"
)
"""Settings whose numbers size nothing."""

RANKS = re.compile(r"(^|_)r$|rank")

FEWEST_COUNTS, SMALLEST_SIZE, SMALLEST_RANK = 256, 1 << 16, 512
"""What is always allowed, since it costs little."""

MOST_BUFFERED = 1 << 26
"""Elements of tables that are computed and not stored, which are always allowed."""

SURPLUS, QUANTISED_SURPLUS = 2, 64
"""How many times the elements of its files a network may have; packed weights are stored as a few large numbers."""


class _TooManyError(Exception):
    """A network that registers more modules and parameters than its files could fill."""


def check_config_sizes(what: str, folder: Path) -> None:
    """See that no number in config.json is larger than the weights beside it can explain.

    Raises:
        ModelError: naming the setting and its value.
    """
    headers = [safetensors_header(path) for path in weight_files(folder)]
    shapes = [entry["shape"] for header in headers for entry in header.values()]
    elements = sum(prod(shape) for shape in shapes)
    largest = max((size for shape in shapes for size in shape), default=0)
    most_counts = max(FEWEST_COUNTS, len(shapes), min(largest, 16 * len(shapes)))
    for name, value in _numbers(read_json(folder / "config.json")):
        most = most_counts if COUNTS.search(name) else max(SMALLEST_SIZE, elements)
        if not abs(value) <= most and not NO_SIZES.search(name):
            raise ModelError(
                f"{what} has {name} {value:.6g} in its config.json, and its weights are {len(shapes)} tensors of "
                f"{elements} numbers; mend config.json, or fetch the checkpoint again"
            )


def check_network_size(what: str, folder: Path, config: Any, build: Any) -> None:
    """See that the network of a configuration has no more parameters than its files, by building it without memory.

    Args:
        what: the model, for errors.
        folder: where its weights are.
        config: of transformers.
        build: makes the network of a configuration, such as ``AutoModelForCausalLM.from_config``.

    Raises:
        ModelError: if it has, or cannot be built.
    """
    headers = [safetensors_header(path) for path in weight_files(folder)]
    tensors = sum(len(header) for header in headers)
    elements = sum(prod(entry["shape"]) for header in headers for entry in header.values())
    quantised = getattr(config, "quantization_config", None) is not None
    try:
        with torch.device("meta"), _limited(4096 + 32 * tensors):
            network = build(deepcopy(config))
    except _TooManyError as error:
        raise ModelError(
            f"{what} describes in its config.json a network of {error} parts and more, and its files hold {tensors} "
            "tensors; mend config.json, or fetch the checkpoint again"
        ) from error
    except Exception as error:  # a configuration decides what is raised
        hint = "; add --trust-remote-code if you trust the code it brings" if "remote" in str(error) else ""
        raise ModelError(f"{what} cannot be loaded: {first_line(error)}{hint}") from error
    described = sum(parameter.numel() for parameter in network.parameters())
    buffered = sum(buffer.numel() for buffer in network.buffers())
    surplus = QUANTISED_SURPLUS if quantised else SURPLUS
    if described > surplus * elements or buffered > max(MOST_BUFFERED, 4 * elements):
        raise ModelError(
            f"{what} describes in its config.json a network of {described} weights and tables of {buffered} numbers, "
            f"and its files hold {elements} numbers; mend config.json, or fetch the checkpoint again"
        )


def check_adapter_sizes(what: str, adapter: Path, base: Path) -> None:
    """See that no number in adapter_config.json is larger than the adapter's and the base's weights can explain.

    Raises:
        ModelError: naming the setting and its value.
    """
    shapes = [entry["shape"] for entry in safetensors_header(adapter / ADAPTER_WEIGHTS).values()]
    largest = max((size for shape in shapes for size in shape), default=0)
    below = max(
        (
            size
            for path in weight_files(base)
            for entry in safetensors_header(path).values()
            for size in entry["shape"]
        ),
        default=0,
    )
    settings = read_json(adapter / "adapter_config.json")
    for name, value in _numbers(settings):
        most = max(SMALLEST_RANK, largest) if RANKS.search(name) else max(SMALLEST_SIZE, largest, below)
        if not abs(value) <= most and not NO_SIZES.search(name):
            raise ModelError(
                f"{what} has {name} {value:.6g} in its adapter_config.json, and no tensor of it has a size above "
                f"{largest}; mend adapter_config.json, or fetch the adapter again"
            )
    ranges = settings.get("layer_replication") or []
    spans = (
        [part for part in ranges if isinstance(part, list) and len(part) == 2]
        if isinstance(ranges, list)
        else []
    )
    layers = sum(abs(end - start) for start, end in spans if type(start) is int and type(end) is int)
    if layers > max(FEWEST_COUNTS, len(shapes)):
        raise ModelError(
            f"{what} makes {layers} layers by its layer_replication, and holds {len(shapes)} tensors; mend "
            "adapter_config.json, or fetch the adapter again"
        )


def _numbers(settings: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number of nested settings with the name that it stands under, in small letters."""
    for name, value in named_values(settings):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name.lower(), value


@contextmanager
def _limited(most: int) -> Iterator[None]:
    """Inside, networks of this thread that register more modules and parameters than ``most`` are not finished."""
    thread, registered = threading.get_ident(), 0

    def count(*_: Any) -> None:
        nonlocal registered
        if threading.get_ident() == thread:
            registered += 1
            if registered > most:
                raise _TooManyError(registered)

    handles = [
        torch_modules.register_module_parameter_registration_hook(count),
        torch_modules.register_module_module_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
