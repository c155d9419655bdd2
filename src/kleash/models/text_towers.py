"""Text towers: the language model and head of a checkpoint with vision, audio or video parts, without those parts."""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kleash.checkpoints.files import INDEX, open_model_files
from kleash.extras import import_extra
from kleash.models.compat import class_of_config, forget_renaming, loaded_from

OTHER_CONFIG_NAMES = re.compile(
    r"vision|audio|image|video|vq|speech|speaker|talker|thinker|projector|qformer|perceiver|protein"
)
"""Names of sub-configurations of models that read or write more than text."""
OTHER_PART_NAMES = re.compile(
    r"vision|visual|image|img|audio|video|speech|sound|vq|multi_?modal|mm_|projector|connector|aligner|merger|abstractor"
    r"|resampler|perceiver|qformer|talker|token2wav|codec|protein|generation_(embeddings|aligner|head)"
)
"""Attribute names of modules and parameters that read or write something other than text."""
TEXT_CONFIG_NAMES = re.compile(r"text|llm|language|decoder|generator")
"""Names of sub-configurations of the text part."""
COMPOSITE_TEXT_NAME = re.compile(r"(^|\.)(language_model|text_model|llm)\.")
"""Part of a tensor's name in files that hold more than the text part."""
META_PROBE = ((3, 4, 5, 6), (6, 5, 4, 3))
"""Token ids of the forward pass that shows whether a network runs without its other parts."""


@dataclass(frozen=True, kw_only=True)
class NetworkClass:
    """A class that a checkpoint's network can be loaded as, with the configuration and the names of tensors for it."""

    config: Any
    from_config: Any
    """Builds the network of a configuration."""
    from_pretrained: Any
    """Loads the network of a folder."""
    from_state_dict: Any = None
    """Loads the network of a ``state_dict``, with None for the folder; None for ``from_pretrained`` of the class that
    ``from_config`` builds."""


def has_other_parts(config: Any) -> bool:
    """Whether a configuration is of a model that reads or writes more than text."""
    return any(OTHER_CONFIG_NAMES.search(name) for name in getattr(config, "sub_configs", {}))


def _names_other_part(config: Any, attribute: str) -> bool:
    """Whether an attribute of a network, or its sub-configuration, is called what other parts than text are."""
    sub_config = f"{attribute}_config"
    is_configured = sub_config in getattr(config, "sub_configs", {})
    return OTHER_PART_NAMES.search(attribute) is not None or (
        is_configured and TEXT_CONFIG_NAMES.search(sub_config) is None
    )


def list_network_classes(
    config: Any, tensor_names: Collection[str], *, trust_remote_code: bool
) -> Iterator[NetworkClass]:
    """Iterate over the classes that a checkpoint's network may be loaded as, the preferred first.

    A checkpoint of text alone has one, the class of ``AutoModelForCausalLM``; so has one with other parts (vision,
    audio) whose class there is that of the text part (Qwen3.5, Llama 4). Otherwise the first is the composite class
    without its other parts, and the second the causal class of the text part, if transformers has one. The second is
    for composite classes that cannot be built here, or whose forward pass runs other parts on text as well (Gemma 3n).

    Args:
        config: a transformers configuration.
        tensor_names: the names of the tensors in the checkpoint's files.
        trust_remote_code: whether the checkpoint's own code may run.
    """
    auto_class = import_extra("transformers", "models").AutoModelForCausalLM
    has_remote_class = trust_remote_code and "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    )
    text_config = config.get_text_config(decoder=True)
    composite = None if has_remote_class or not has_other_parts(config) else class_of_config(config)
    if composite is None or (text_config is not config and composite.config_class is type(text_config)):
        remote = {"trust_remote_code": trust_remote_code}
        yield NetworkClass(
            config=config,
            from_config=partial(auto_class.from_config, **remote),
            from_pretrained=partial(auto_class.from_pretrained, **remote),
        )
        return
    is_text_only = not any(COMPOSITE_TEXT_NAME.search(name) for name in tensor_names)
    tower = _tower_class(composite)
    yield NetworkClass(
        config=config,
        from_config=tower._from_config,
        from_pretrained=partial(_load_tower, tower, is_text_only),
        from_state_dict=partial(_load_tower, tower, is_text_only),
    )
    text_class = class_of_config(text_config)
    if text_config is not config and text_class is not None:
        prefixes = {
            r"^(model\.)?(language_model|text_model)\.model\.": "model.",
            r"^model\.(language_model|text_model)\.": "model.",
            r"^(model\.)?(language_model|text_model)\.lm_head\.": "lm_head.",
        }
        load = partial(_load_renamed, text_class, key_mapping=prefixes)
        yield NetworkClass(
            config=text_config,
            from_config=text_class._from_config,
            from_pretrained=load,
            from_state_dict=load,
        )


def is_of_other_part(config: Any, name: str) -> bool:
    """Whether a tensor that the text part of a model does not use belongs to another part, by its name."""
    before_layers = re.split(r"\.(?:layers|blocks|h)\.", name)[0]
    return has_other_parts(config) and any(
        _names_other_part(config, part) for part in before_layers.split(".")
    )


def needs_other_parts(network: Any) -> bool:
    """Whether the forward pass of a network on the meta device needs a part of it that was left out."""
    try:
        network(input_ids=torch.tensor(META_PROBE, device="meta"), use_cache=False)
    except (AttributeError, TypeError) as error:
        return "NoneType" in str(error)
    except Exception:  # a forward pass may not run without memory, for many reasons
        return False
    return False


def leave_out_other_parts(network: Any, kind: type = torch.nn.Module) -> list[str]:
    """Remove what text does not run through from a network: modules, or with ``kind`` parameters; return their names.

    transformers initialises the parameters beside modules, so that they are removed only once it has done that.
    """
    names = [name for name, part in iterate_other_parts(network) if isinstance(part, kind)]
    for name in names:
        parent, _, attribute = name.rpartition(".")
        setattr(network.get_submodule(parent), attribute, None)
    return names


def iterate_other_parts(network: Any) -> Iterator[tuple[str, torch.nn.Module | torch.nn.Parameter]]:
    """Iterate over the modules and parameters of a network that text does not run through, by their names.

    They are those beside the language model and the embeddings whose names say what they read or write.
    """
    text_modules = [network.get_decoder(), network.get_input_embeddings(), network.get_output_embeddings()]
    text_modules = [module for module in text_modules if module is not None]
    pending = [("", network)]
    while pending:
        prefix, parent = pending.pop()
        for attribute, parameter in parent.named_parameters(recurse=False):
            if _names_other_part(network.config, attribute):
                yield f"{prefix}.{attribute}" if prefix else attribute, parameter
        for attribute, module in parent.named_children():
            name = f"{prefix}.{attribute}" if prefix else attribute
            holds_text = any(module is part or part in module.modules() for part in text_modules)
            if not holds_text and _names_other_part(network.config, attribute):
                yield name, module
            elif not isinstance(module, torch.nn.ModuleList) and (
                not any(module is part for part in text_modules) or module is network.base_model
            ):
                pending.append((name, module))


def count_text_parameters(network: Any) -> int:
    """The number of a network's parameters without those of parts that text does not run through."""
    if not has_other_parts(network.config):
        return sum(p.numel() for p in network.parameters())
    ids_of_other_parts = {
        id(p)
        for _, part in iterate_other_parts(network)
        for p in ([part] if isinstance(part, torch.nn.Parameter) else part.parameters())
    }
    return sum(p.numel() for p in network.parameters() if id(p) not in ids_of_other_parts)


def _tower_class(composite: Any) -> Any:
    """A subclass of a composite class whose networks are made without their other parts."""

    class Tower(composite):
        def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
            super().__init__(config, *arguments, **named)
            leave_out_other_parts(self)

    # transformers looks up by the name of a class how tensors are renamed.
    Tower.__name__, Tower.__qualname__, Tower.__module__ = (
        composite.__name__,
        composite.__qualname__,
        composite.__module__,
    )
    return Tower


def _load_tower(tower: Any, is_text_only: bool, folder: Any, **options: Any) -> tuple[Any, Any]:
    """``from_pretrained`` of a class of ``_tower_class``; the network has the composite class itself.

    If ``is_text_only``, the names in the files are those of the text part alone, and get its prefix in the composite,
    unless transformers itself knows the names of the files.
    """
    mapping: dict[str, str] = {}
    if is_text_only:
        with torch.device("meta"):
            skeleton = tower._from_config(options["config"])
        decoder = next(name for name, module in skeleton.named_modules() if module is skeleton.get_decoder())
        if decoder.startswith("model."):
            mapping = {rf"^model\.(?!{decoder[6:]}\.)": f"{decoder}."}
    network, report = _load_renamed(tower, folder, **options, **({"key_mapping": mapping} if mapping else {}))
    if mapping and report["missing_keys"]:
        network, report = _load_renamed(tower, folder, **options)
    leave_out_other_parts(network, torch.nn.Parameter)
    network.__class__ = tower.__base__
    return network, report


def _load_renamed(network_class: Any, folder: Any, **options: Any) -> tuple[Any, Any]:
    """``from_pretrained`` of a class; a ``key_mapping`` is for loading, and not reversed when the network is saved."""
    network, report = network_class.from_pretrained(folder, **options)
    if "key_mapping" in options:
        forget_renaming(network)
    return network, report


def copy_other_parts(network: Any, folder: Path) -> None:
    """Add the tensors of the parts that a network was loaded without to its saved files, from the files it came from.

    So a text tower that was trained is a whole composite model again.

    Args:
        network: loaded from a folder.
        folder: has the network's ``config.json`` and safetensors, as ``save_pretrained`` writes them.
    """
    source = Path(loaded_from(network))
    if not has_other_parts(network.config) or not source.is_dir() or not (folder / "config.json").is_file():
        return
    stored = open_model_files(source)
    tensors = {name: stored.read(name) for name in stored if is_of_other_part(network.config, name)}
    if not tensors:
        return
    paths: dict[Path, list[str]] = {}
    for name, tensor in open_model_files(folder).items():
        paths.setdefault(tensor.path, []).append(name)
    shards: dict[str, str] = {}
    for number, (path, names) in enumerate(paths.items(), start=1):
        shard = path.rename(folder / f"model-{number:05}-of-{len(paths) + 1:05}.safetensors")
        shards |= dict.fromkeys(names, shard.name)
    last = folder / f"model-{len(paths) + 1:05}-of-{len(paths) + 1:05}.safetensors"
    import_extra("safetensors.torch", "models").save_file(tensors, last, metadata={"format": "pt"})
    shards |= dict.fromkeys(tensors, last.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}), encoding="utf-8")
