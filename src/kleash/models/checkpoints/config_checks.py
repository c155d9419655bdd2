"""Checks of a checkpoint's settings: no code to fetch, no files outside its folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kleash.errors import ModelError
from kleash.models.checkpoints.files import ADAPTER_WEIGHTS

MEGATRON = "megatron.core"
"""Module name that PEFT writes into every adapter's settings and imports only with a megatron_config."""
MAX_SHOWN_CHARACTERS = 80


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
