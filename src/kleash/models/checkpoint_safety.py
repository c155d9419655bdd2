"""What the settings of a checkpoint may not ask for: code that is imported, or files outside the checkpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kleash.errors import ModelError

INDEX = "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
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
