"""Checks of a checkpoint's settings: no code to fetch, no files outside its folder, no sizes beyond its weights."""

import inspect
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

from kleash.errors import ModelError, summarise_error
from kleash.extras import import_extra
from kleash.models.checkpoints.files import (
    ADAPTER_WEIGHTS,
    list_weight_files,
    read_json,
    read_safetensors_header,
)

MEGATRON = "megatron.core"
"""Module name that PEFT writes into every adapter's settings and imports only with a megatron_config."""
MAX_SHOWN_CHARACTERS = 80
COUNT_SETTINGS = re.compile(r"layers?$|layers?_|blocks?$|depth|stages?$|experts?")
"""Names of settings that are numbers of modules."""
NON_SIZE_SETTINGS = re.compile(
    r"position|length|seq|token|theta|window|factor|alpha|beta|scal|seed|key|step|indices|version|eps|tinit|tfinal|deltat|_id|clip|logit"
)
"""Names of settings whose numbers do not determine the size of a tensor."""
RANK_SETTINGS = re.compile(r"(^|_)r$|rank")
"""Names of settings that are ranks of adapters."""
ALWAYS_ALLOWED_COUNT, ALWAYS_ALLOWED_SIZE, ALWAYS_ALLOWED_RANK = 256, 1 << 16, 512
"""Largest numbers of modules, sizes and ranks that are accepted for any weights, since they take little memory."""
ALWAYS_ALLOWED_BUFFER_ELEMENTS = 1 << 26
"""Number of elements of buffers (computed tables, which no file stores) that is accepted for any weights."""
MAX_RATIO, MAX_QUANTISED_RATIO = 2, 64
"""Largest ratio of a network's parameters to the elements in its files. Quantised files pack several weights into one
element."""


def check_model_settings(path: Path, settings: dict[str, Any]) -> None:
    """Refuse a config.json that makes transformers fetch and run kernels, or read weights that are not safetensors.

    Raises:
        ModelError: naming the setting.
    """
    for name, value in iterate_settings(settings):
        if "implementation" in name and isinstance(value, str) and ("/" in value or "\\" in value):
            raise ModelError(
                f"{path} takes {name} from {_abbreviate(value)}, whose code would be fetched and run; set it to null "
                "or to an implementation of transformers, such as 'sdpa'"
            )
    weights = settings.get("transformers_weights")
    if weights not in (None, "model.safetensors"):
        raise ModelError(
            f"{path} takes its weights from {_abbreviate(weights)}; name the file model.safetensors and remove "
            "transformers_weights"
        )


def check_index(path: Path, index: dict[str, Any]) -> None:
    """Refuse an index of shards that names files outside its folder, or files that are not safetensors.

    Raises:
        ModelError: naming the file.
    """
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards or not isinstance(index.get("metadata", {}), dict):
        raise ModelError(f"{path} has no weight_map from tensors to files; fetch or make it again")
    for shard in {str(shard): shard for shard in shards.values()}.values():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or Path(shard).name != shard:
            raise ModelError(
                f"{path} leads to {_abbreviate(shard)}; every shard must be a .safetensors file in the same folder"
            )
        if not (path.parent / shard).is_file():
            raise ModelError(
                f"{path} leads to {_abbreviate(shard)}, which is not there; fetch the checkpoint again"
            )


def check_adapter_files(name: str, folder: Path, settings: dict[str, Any]) -> None:
    """Refuse an adapter that makes PEFT import a module, or whose weights are not in adapter_model.safetensors.

    Raises:
        ModelError: naming the setting or the file.
    """
    core = settings.get("megatron_core")
    if settings.get("megatron_config") is not None or core not in (None, MEGATRON):
        raise ModelError(
            f"the adapter {name} has a megatron_config, for which the module {_abbreviate(core)} would be imported "
            "and run; set megatron_config to null and megatron_core to 'megatron.core' in adapter_config.json"
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        has_pickle = (folder / "adapter_model.bin").exists()
        raise ModelError(
            f"the adapter {name} has no {ADAPTER_WEIGHTS}"
            + (", only adapter_model.bin, a pickle that can run code when opened" if has_pickle else "")
            + "; where you trust it, load it with PEFT and save it again with save_pretrained"
        )


def iterate_settings(settings: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the leaf values of nested settings, each with the name of its key."""
    stack = [("", settings)]
    while stack:
        name, value = stack.pop()
        if isinstance(value, dict):
            # The keys of an implementation or pattern setting are module names, so the setting's name is added.
            stack += [
                (f"{key} of {name}" if "implementation" in name or "pattern" in name else str(key), child)
                for key, child in value.items()
            ]
        elif isinstance(value, list):
            stack += [(name, item) for item in value]
        else:
            yield name, value


def _abbreviate(value: Any) -> str:
    """The first 80 characters of a value's ``repr``, for errors."""
    return repr(value)[:MAX_SHOWN_CHARACTERS]


class _TooManyModulesError(Exception):
    """A network registers more modules and parameters than its files could fill."""


def check_config_sizes(subject: str, folder: Path) -> None:
    """Check that no number that its class reads from config.json is too large for the weights in the same folder.

    Raises:
        ModelError: naming the setting and its value.
    """
    headers = [read_safetensors_header(path) for path in list_weight_files(folder)]
    shapes = [entry["shape"] for header in headers for entry in header.values()]
    elements = sum(prod(shape) for shape in shapes)
    largest = max((size for shape in shapes for size in shape), default=0)
    max_count = max(ALWAYS_ALLOWED_COUNT, len(shapes), min(largest, 16 * len(shapes)))
    for name, value in _iterate_numbers(_read_by_class(read_json(folder / "config.json"))):
        limit = max_count if COUNT_SETTINGS.search(name) else max(ALWAYS_ALLOWED_SIZE, elements)
        if not abs(value) <= limit and not NON_SIZE_SETTINGS.search(name):
            raise ModelError(
                f"{subject} has {name} {value:.6g} in its config.json, and its weights are {len(shapes)} tensors of "
                f"{elements} numbers; correct config.json, or fetch the checkpoint again"
            )


def check_network_size(
    subject: str, folder: Path, config: Any, build: Any, *, is_quantised: bool = False
) -> Any:
    """Build the network of a configuration on the meta device and compare its parameters with those in its files.

    Args:
        subject: the model, for errors.
        folder: the folder of its weights.
        config: a transformers configuration.
        build: builds the network of a configuration, such as ``AutoModelForCausalLM.from_config``.
        is_quantised: whether its weights are quantised by settings that ``config`` does not have.

    Returns:
        The network on the meta device.

    Raises:
        ModelError: if it has too many parameters or buffers, or cannot be built.
    """
    headers = [read_safetensors_header(path) for path in list_weight_files(folder)]
    tensors = sum(len(header) for header in headers)
    elements = sum(prod(entry["shape"]) for header in headers for entry in header.values())
    return check_built_size(subject, tensors, elements, config, build, is_quantised=is_quantised)


def check_built_size(
    subject: str, tensors: int, elements: int, config: Any, build: Any, *, is_quantised: bool = False
) -> Any:
    """``check_network_size`` of files that hold ``tensors`` tensors of ``elements`` numbers together.

    Raises:
        ModelError: if the network has too many parameters or buffers, or cannot be built.
    """
    is_quantised |= getattr(config, "quantization_config", None) is not None
    try:
        with torch.device("meta"), _limit_registrations(4096 + 32 * tensors):
            network = build(deepcopy(config))
    except _TooManyModulesError as error:
        raise ModelError(
            f"{subject} describes in its config.json a network of {error} parts and more, and its files hold "
            f"{tensors} tensors; correct config.json, or fetch the checkpoint again"
        ) from error
    except Exception as error:  # the exception type depends on the configuration
        hint = "; add --trust-remote-code if you trust the code it brings" if "remote" in str(error) else ""
        raise ModelError(f"{subject} cannot be loaded: {summarise_error(error)}{hint}") from error
    parameters = sum(parameter.numel() for parameter in network.parameters())
    buffer_elements = sum(buffer.numel() for buffer in network.buffers())
    max_ratio = MAX_QUANTISED_RATIO if is_quantised else MAX_RATIO
    if parameters > max_ratio * elements or buffer_elements > max(
        ALWAYS_ALLOWED_BUFFER_ELEMENTS, 4 * elements
    ):
        raise ModelError(
            f"{subject} describes in its config.json a network of {parameters} weights and tables of "
            f"{buffer_elements} numbers, and its files hold {elements} numbers; correct config.json, or fetch the "
            "checkpoint again"
        )
    return network


def check_adapter_sizes(subject: str, adapter: Path, base: Path) -> None:
    """Check that no number in adapter_config.json is too large for the weights of the adapter and its base.

    Raises:
        ModelError: naming the setting and its value.
    """
    shapes = [entry["shape"] for entry in read_safetensors_header(adapter / ADAPTER_WEIGHTS).values()]
    largest = max((size for shape in shapes for size in shape), default=0)
    largest_of_base = max(
        (
            size
            for path in list_weight_files(base)
            for entry in read_safetensors_header(path).values()
            for size in entry["shape"]
        ),
        default=0,
    )
    settings = read_json(adapter / "adapter_config.json")
    classes = import_extra("peft.mapping", "models").PEFT_TYPE_TO_CONFIG_MAPPING
    for name, value in _iterate_numbers(_declared(settings, classes.get(settings.get("peft_type")))):
        limit = (
            max(ALWAYS_ALLOWED_RANK, largest)
            if RANK_SETTINGS.search(name)
            else max(ALWAYS_ALLOWED_SIZE, largest, largest_of_base)
        )
        if not abs(value) <= limit and not NON_SIZE_SETTINGS.search(name):
            raise ModelError(
                f"{subject} has {name} {value:.6g} in its adapter_config.json, and no tensor of it has a size above "
                f"{largest}; correct adapter_config.json, or fetch the adapter again"
            )
    layers = _count_replicated_layers(settings.get("layer_replication"))
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


def _read_by_class(settings: dict[str, Any], config_class: Any = None) -> dict[str, Any]:
    """The settings of a config.json that its class, or that of a part, declares; all of a class not of transformers.

    Others, such as what a trainer noted, size nothing.
    """
    transformers = import_extra("transformers", "models")
    if not isinstance(config_class, type) or config_class is transformers.AutoConfig:
        try:  # its get does not load the module of a class
            config_class = transformers.CONFIG_MAPPING[str(settings.get("model_type"))]
        except KeyError:
            config_class = None
    parts = getattr(config_class, "sub_configs", {})
    return {
        name: _read_by_class(value, parts[name]) if name in parts and isinstance(value, dict) else value
        for name, value in _declared(settings, config_class).items()
    }


def _declared(settings: dict[str, Any], config_class: Any) -> dict[str, Any]:
    """The settings that a class of configurations declares; all of them without a class."""
    if config_class is None:
        return settings
    aliases: dict[str, str] = getattr(config_class, "attribute_map", {})
    names = {*dir(config_class), *inspect.signature(config_class.__init__).parameters}
    names |= {*aliases, *aliases.values()}
    return {name: value for name, value in settings.items() if name in names}


def _iterate_numbers(settings: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Iterate over the numbers of nested settings, each with the name of its key in lower case."""
    for name, value in iterate_settings(settings):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name.lower(), value


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
