"""Networks and tokenizers out of checkpoints, each base in memory once."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from kleash.errors import ModelError
from kleash.extras import need
from kleash.models.checkpoints import Checkpoint, safetensors_header
from kleash.models.quiet import first_line

TOKENIZERS = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*", "tekken.json")
"""Files of which every tokenizer has one."""
OTHER_SENSES = ("vision", "audio", "image", "video", "vq")
"""What the parts of a configuration are called where a model is not of text alone."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Loaded:
    """A network as one side sees it."""

    network: Any
    adapters: Any
    adapter: str | None
    parameters: int
    notes: tuple[str, ...]


def load_network(
    sides: dict[str, Checkpoint],
    *,
    dtype: torch.dtype | str,
    device: torch.device,
    device_map: str | None,
    trust_remote_code: bool,
) -> dict[str, Loaded]:
    """The network of each side, in evaluation mode; sides over one folder share it.

    Raises:
        ModelError: if one cannot be loaded, is no decoder-only text model, or lacks weights.
    """
    bases: dict[str, tuple[Any, int, tuple[str, ...]]] = {}
    wrapped: dict[str, Any] = {}
    named: dict[tuple[str, str], str] = {}
    for role, side in sides.items():
        key = str(side.folder.resolve())
        if key not in bases:
            network, notes = _load_base(side, role, dtype, device_map, trust_remote_code)
            if device_map is None:
                network.to(device)
            bases[key] = network, sum(p.numel() for p in network.parameters()), notes
        if side.adapter is not None and (key, str(side.adapter.resolve())) not in named:
            wrapped[key] = _add_adapter(bases[key][0], wrapped.get(key), side, role)
            named[key, str(side.adapter.resolve())] = role
    loaded = {}
    for role, side in sides.items():
        key = str(side.folder.resolve())
        network, parameters, notes = bases[key]
        if side.adapter is not None:
            parameters += _adapter_parameters(side)
        loaded[role] = Loaded(
            network=network,
            adapters=wrapped.get(key),
            adapter=None if side.adapter is None else named[key, str(side.adapter.resolve())],
            parameters=parameters,
            notes=notes,
        )
        network.eval()
    return loaded


def load_tokenizer(side: Checkpoint, role: str, trust_remote_code: bool) -> Any:
    """The tokenizer of a side: an adapter's own, if its folder holds one, or else its base's.

    Raises:
        ModelError: if there is none.
    """
    transformers = need("transformers", "models")
    folder = tokenizer_folder(side)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raise bare Exceptions, and every other kind
        if not any(next(folder.glob(pattern), None) for pattern in TOKENIZERS):
            raise ModelError(
                f"the {role} {side.name} has no tokenizer: there is no tokenizer.json in {folder}; copy the "
                "tokenizer's files of the model it was made from into that folder"
            ) from error
        raise ModelError(
            f"the tokenizer of the {role} {side.name} cannot be loaded from {folder}: {first_line(error)}"
        ) from error


def tokenizer_folder(side: Checkpoint) -> Path:
    """Where the tokenizer of a side lies."""
    if side.adapter is not None and any(side.adapter.glob("tokenizer*")):
        return side.adapter
    return side.folder


def _load_base(
    side: Checkpoint, role: str, dtype: torch.dtype | str, device_map: str | None, trust_remote_code: bool
) -> tuple[Any, tuple[str, ...]]:
    transformers = need("transformers", "models")
    what = f"the {role} {side.name}"
    try:
        config = transformers.AutoConfig.from_pretrained(side.folder, trust_remote_code=trust_remote_code)
        _check_kind(config, what)
        network, report = transformers.AutoModelForCausalLM.from_pretrained(
            side.folder,
            config=config,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # not ignored, but named below
        )
    except ModelError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, AttributeError, TypeError) as error:
        hint = "; add --trust-remote-code if you trust the code it brings" if "remote" in str(error) else ""
        raise ModelError(f"{what} cannot be loaded: {first_line(error)}{hint}") from error
    _check_shapes(report, what)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{what} lacks {len(missing)} of its weights, which would be random: {', '.join(missing[:3])}; "
            "fetch the checkpoint again, or save it whole"
        )
    unused = sorted(report["unexpected_keys"])
    if not unused:
        return network, ()
    return network, (
        f"{len(unused)} tensors of {what} are not used by its architecture, such as {unused[0]}",
    )


def _check_shapes(report: Any, what: str) -> None:
    """See that the weights have the shapes that the configuration says."""
    others = sorted(report.get("mismatched_keys", ()))
    if others:
        # transformers 5 tells the shapes with each name, 4 the names alone.
        name, *shapes = [others[0]] if isinstance(others[0], str) else others[0]
        told = ": {}, and not {}".format(*map(tuple, shapes)) if shapes else ""
        raise ModelError(
            f"{what} has {len(others)} weights of other shapes than its config.json says, such as {name}{told}; "
            "mend config.json, or fetch the checkpoint again"
        )


def _check_kind(config: Any, what: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{what} is an encoder-decoder ({config.model_type}); kleash measures decoder-only models"
        )
    parts = sorted(getattr(config, "sub_configs", {}))
    other = [name for name in parts if any(sense in name for sense in OTHER_SENSES)]
    if other:
        raise ModelError(
            f"{what} is a multi-modal model ({config.model_type}, with {', '.join(other)}); kleash measures "
            "models of text alone"
        )


def _add_adapter(network: Any, wrapper: Any, side: Checkpoint, role: str) -> Any:
    """Put the adapter on the network, under the name of its role; returns the PEFT model around it."""
    peft = need("peft", "models")
    what = f"the adapter {side.name} of the {role}"
    try:
        config = peft.PeftConfig.from_pretrained(side.adapter)
        if config.is_prompt_learning:
            raise ModelError(
                f"{what} is of kind {config.peft_type}, which adds tokens of its own to the prompt; "
                "kleash measures adapters that change weights"
            )
        if wrapper is None:
            wrapper = peft.PeftModel.from_pretrained(network, str(side.adapter), adapter_name=role)
        else:
            wrapper.load_adapter(str(side.adapter), adapter_name=role)
    except ModelError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{what} cannot be put on {side.base}: {first_line(error)}") from error
    _check_adapter(wrapper, side, role, what)
    return wrapper


def _check_adapter(wrapper: Any, side: Checkpoint, role: str, what: str) -> None:
    """See that every tensor of the adapter found its place, and every place its tensor."""
    peft = need("peft", "models")
    stored = {name for path in _weights(side) for name in safetensors_header(path)}
    every, needed = (
        set(peft.get_peft_model_state_dict(wrapper, adapter_name=role, save_embedding_layers=embeddings))
        for embeddings in (True, False)
    )
    stray, missing = sorted(stored - every), sorted(needed - stored)
    if stray or missing:
        raise ModelError(
            f"{what} does not fit {side.base}: {len(stray)} of its {len(stored)} tensors have no place "
            f"there and {len(missing)} places no tensor, such as {(stray + missing)[0]}; give it the base "
            "it was trained on"
        )


def _adapter_parameters(side: Checkpoint) -> int:
    headers = [safetensors_header(path) for path in _weights(side)]
    return sum(prod(entry["shape"]) for header in headers for entry in header.values())


def _weights(side: Checkpoint) -> list[Path]:
    return [] if side.adapter is None else sorted(side.adapter.glob("*.safetensors"))
