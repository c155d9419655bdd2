"""Adapters of a composite model or of its text part alone: their tensors under the names of the loaded network."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kleash.checkpoints.files import ADAPTER_WEIGHTS
from kleash.checkpoints.resolution import Checkpoint
from kleash.errors import ModelError
from kleash.extras import import_extra
from kleash.models.compat import adapter_tensor_prefixes
from kleash.models.text_towers import OTHER_PART_NAMES

WRAPPER_PREFIX = "base_model.model."
"""What PEFT puts before the name of a network's module."""
BODY_NAMES = (
    *("model.language_model.model.", "model.language_model.", "language_model.model.", "model.text_model."),
    *("language_model.", "text_model.model.", "text_model.", "model."),
)
"""What the names of a text part's modules begin with, in composite classes of several versions and in text classes."""


def fit_adapter_names(
    network: Any, checkpoint: Checkpoint, scratch: Path
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return a checkpoint whose adapter has the tensor names of ``network``, and notes on tensors that were left out.

    An adapter of a model with vision, audio or video parts names its tensors by the class that it was trained on: the
    composite class (``model.language_model.layers.0``), the same in older versions of transformers
    (``language_model.model.layers.0``), or the class of the text part (``model.layers.0``). If the network has modules
    of the stored names, the checkpoint is returned as it is. Otherwise its adapter is written to ``scratch`` with the
    names of the network, and without the tensors of parts that are not loaded. If no renaming fits all tensors,
    nothing is renamed.

    Args:
        network: the base.
        checkpoint: of an adapter.
        scratch: an empty folder.

    Raises:
        ModelError: if all tensors of the adapter belong to parts that are not loaded.
    """
    modules = {name for name, _ in network.named_modules()}
    stored = list(checkpoint.adapter_tensors)
    names = [name.removeprefix(WRAPPER_PREFIX) for name in stored if name.startswith(WRAPPER_PREFIX)]
    if len(names) < len(stored) or all(_module_of(name, modules) for name in names):
        return checkpoint, ()
    text_names = [name for name in names if not _is_of_other_part(name, modules)]
    if not text_names:
        raise ModelError(
            f"the adapter {checkpoint.name} changes no tensor of the language model of {checkpoint.base}, such as "
            f"{names[0]}; kleash measures text"
        )
    rename = _find_renaming(text_names, modules)
    if rename is None:
        return checkpoint, ()
    _write_renamed(checkpoint, scratch, text_names, rename, modules)
    num_left_out = len(names) - len(text_names)
    note = (
        f"{num_left_out} of {len(names)} tensors of the adapter {checkpoint.name} belong to parts of "
        f"{checkpoint.base} that do not read text, and are left out"
    )
    return replace(checkpoint, adapter=scratch), (note,) if num_left_out else ()


def _module_of(name: str, modules: Collection[str]) -> str:
    """The module of a network that a tensor of an adapter is on, by its name; "" if the network has no such module."""
    parts = name.split(".")
    ends = [end for end, part in enumerate(parts) if part.startswith(adapter_tensor_prefixes())]
    module = ".".join(parts[: ends[0] if ends else -1])
    return module if module in modules else ""


def _is_of_other_part(name: str, modules: Collection[str]) -> bool:
    """Whether a tensor belongs to a part that is not loaded, by the part of its name before the layers."""
    before_layers = re.split(r"\.(?:layers|blocks|h)\.", name)[0]
    return not _module_of(name, modules) and OTHER_PART_NAMES.search(before_layers) is not None


def _find_renaming(names: list[str], modules: Collection[str]) -> Callable[[str], str] | None:
    """The change of names after which all tensors lead to modules; None if there is none."""
    bodies = [body for body in BODY_NAMES if body.removesuffix(".") in modules]
    for body in bodies:

        def rename(name: str, body: str = body) -> str:
            if re.match(r"(.*\.)?lm_head(\.|$)", name):
                return name[name.index("lm_head") :]
            old = next((prefix for prefix in BODY_NAMES if name.startswith(prefix)), "")
            return body + name.removeprefix(old)

        if all(_module_of(rename(name), modules) for name in names):
            return rename
    return None


def _write_renamed(
    checkpoint: Checkpoint,
    folder: Path,
    names: list[str],
    rename: Callable[[str], str],
    modules: Collection[str],
) -> None:
    """Write an adapter with renamed tensors and settings."""
    safetensors = import_extra("safetensors.torch", "models")
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.save_file(
        {
            WRAPPER_PREFIX + rename(name): checkpoint.adapter_tensors.read(WRAPPER_PREFIX + name)
            for name in names
        },
        folder / ADAPTER_WEIGHTS,
        metadata={"format": "pt"},
    )
    settings = dict(checkpoint.adapter_settings)
    targets = settings.get("target_modules")
    is_by_suffix = isinstance(targets, list) and not any("." in str(target) for target in targets)
    saved = settings.get("modules_to_save") or []
    if targets and not is_by_suffix:
        paths = {_module_of(rename(name), modules) for name in names}
        settings["target_modules"] = sorted(path for path in paths if path.rpartition(".")[2] not in saved)
        settings |= dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern"))
    for name in ("rank_pattern", "alpha_pattern"):
        table = settings.get(name)
        if isinstance(table, Mapping):
            settings[name] = {
                rename(key) if key.startswith(BODY_NAMES) else key: x for key, x in table.items()
            }
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
