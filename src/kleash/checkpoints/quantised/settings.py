"""Values of the settings of quantised checkpoints, checked before they are used."""

import re
from collections.abc import Mapping
from typing import Any

MAX_GROUP_SIZE = 1 << 24
SCALE_MEANING = "weight_scale_semantics"
"""Setting of GPTQModel's FP8."""
ROTATION_SETTINGS = re.compile(r"rotation|hadamard|quarot|spinquant|transform_config")
"""Names of settings of formats that also change activations while the model runs."""
MODELOPT_ALGORITHMS = frozenset(
    ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
)
"""``quant_algo`` of ModelOpt that is read."""
MODELOPT_MIXED = "MIXED_PRECISION"
"""``quant_algo`` of ModelOpt whose ``quantized_layers`` have algorithms of their own."""


class UnsupportedLayoutError(Exception):
    """A layout that no decoder reads; the message says which."""


def check_rotations(settings: Mapping[str, Any]) -> None:
    """Refuse settings by which activations are rotated while the model runs, since the weights alone are another model.

    Raises:
        UnsupportedLayoutError: naming the setting.
    """
    for name, value in settings.items():
        is_given = any(value.values()) if isinstance(value, dict) else bool(value)
        if ROTATION_SETTINGS.search(name) and is_given:
            raise UnsupportedLayoutError(f"its {name} rotates activations while the model runs")


def read_integer(settings: Mapping[str, Any], *names: str) -> int:
    """The first of these settings that is there.

    Raises:
        UnsupportedLayoutError: if there is none, or it is not an integer.
    """
    value = next((settings[name] for name in names if name in settings), None)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_GROUP_SIZE:
        raise UnsupportedLayoutError(f"its {names[0]} is {value!r:.60}")
    return value


def read_group_size(settings: Mapping[str, Any]) -> int:
    """The number of inputs in a group; -1 for all.

    Raises:
        UnsupportedLayoutError: if it is another number.
    """
    size = read_integer(settings, "group_size", "q_group_size")
    if size == 0 or size < -1:
        raise UnsupportedLayoutError(f"its group_size is {size}")
    return size


def read_module_group_sizes(settings: Mapping[str, Any], name: str) -> dict[str, int]:
    """The group sizes of single modules in a setting, by the names or patterns that it has; -1 for all inputs.

    Raises:
        UnsupportedLayoutError: if the setting is no object, or a size is another number.
    """
    modules = read_object(settings, name)
    return {
        module: read_group_size(values)
        for module, values in modules.items()
        if isinstance(values, dict) and values.get("group_size") is not None
    }


def read_block(settings: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None if there is no such setting.

    Raises:
        UnsupportedLayoutError: if it is not two positive integers.
    """
    value = settings.get(name)
    if value is None:
        return None
    sizes = value.split("x") if isinstance(value, str) else value
    if isinstance(sizes, list) and len(sizes) == 2 and all(str(size).isdigit() for size in sizes):
        rows, columns = (int(size) for size in sizes)
        if 0 < rows <= MAX_GROUP_SIZE and 0 < columns <= MAX_GROUP_SIZE:
            return rows, columns
    raise UnsupportedLayoutError(f"its {name} is {value!r:.60}")


def has_reciprocal_scales(settings: Mapping[str, Any]) -> bool:
    """Whether ``weight_scale_inv`` holds the reciprocals of scales, as GPTQModel's FP8 says, and not the scales.

    Raises:
        UnsupportedLayoutError: if the setting has another value.
    """
    meaning = settings.get(SCALE_MEANING)
    if meaning not in (None, "inverse"):
        raise UnsupportedLayoutError(f"its {SCALE_MEANING} is {meaning!r:.60}")
    return meaning is not None


def read_object(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A setting that is an object; empty if it is not there.

    Raises:
        UnsupportedLayoutError: if it is another value.
    """
    value = settings.get(name)
    if value is not None and not isinstance(value, dict):
        raise UnsupportedLayoutError(f"its {name} is a {type(value).__name__}")
    return value or {}


def read_weight_groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of modules in the settings of compressed-tensors.

    Raises:
        UnsupportedLayoutError: if one is no object.
    """
    groups = read_object(settings, "config_groups")
    return [read_object(groups, name) for name in groups]


def check_modelopt_algorithms(settings: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of ModelOpt with an algorithm that is not read.

    Raises:
        UnsupportedLayoutError: naming the algorithm.
    """
    algorithms = [settings.get("quant_algo", "FP8")]
    if algorithms == [MODELOPT_MIXED]:
        layers = read_object(settings, "quantized_layers")
        algorithms = [read_object(layers, name).get("quant_algo") for name in layers] or algorithms
    unknown = sorted(set(map(str, algorithms)) - MODELOPT_ALGORITHMS)
    if unknown:
        raise UnsupportedLayoutError(f"its quant_algo is {unknown[0]!r:.60}")
