"""PEFT adapters put on their base, which is shared with another model where it is proven to be unchanged."""

import re
from collections.abc import Mapping
from math import prod
from typing import Any, TypeGuard

from kleash.errors import ModelError
from kleash.extras import import_extra
from kleash.models.adapters.network_state import logits_of, probe_of, same_bits
from kleash.models.adapters.rules import kind_of, rule_of
from kleash.models.checkpoints.config_checks import check_adapter_sizes
from kleash.models.checkpoints.files import ADAPTER_WEIGHTS, read_json, safetensors_header
from kleash.models.checkpoints.resolution import Checkpoint
from kleash.models.compat import first_line
from kleash.models.sandbox.process import check_patterns


def adapter_settings(side: Checkpoint, role: str) -> dict[str, Any]:
    """The content of a side's adapter_config.json.

    Raises:
        ModelError: if the adapter is of a kind that cannot be measured.
    """
    assert side.adapter is not None
    settings = read_json(side.adapter / "adapter_config.json")
    rule = rule_of(settings)
    if rule is not None and rule.treatment == "refused":
        kind = kind_of(settings)[:40]
        raise ModelError(f"the adapter {side.name} of the {role} ({kind}) {rule.reason}; {rule.advice}")
    check_adapter_sizes(f"the adapter {side.name} of the {role}", side.adapter, side.folder)
    return settings


def require_unchanged_base(wrapper: Any, role: str, *, instead: str) -> None:
    """See that the base of a PEFT model in memory, all adapters switched off, is the model that it was.

    Args:
        wrapper: the PEFT model.
        role: what its base is taken for, for errors.
        instead: what to do where it has changed.

    Raises:
        ModelError: if putting an adapter on changed the base, or training it does.
    """
    for name, config in wrapper.peft_config.items():
        rule = rule_of(config.to_dict())
        if rule is not None and rule.changes_base:
            raise ModelError(
                f"the {role} would be the base with its adapters switched off, but the adapter {name!r} {rule.reason}; "
                f"{instead}"
            )
    trained = trained_base_tensors(wrapper)
    if trained:
        raise ModelError(
            f"the {role} would be the base with its adapters switched off, but {len(trained)} tensors of it are "
            f"trained, such as {trained[0]}; freeze them, or {instead}"
        )


def trained_base_tensors(wrapper: Any) -> list[str]:
    """The parameters of a PEFT model in memory that are trained and belong to none of its adapters."""
    adapters = set(wrapper.peft_config)  # every parameter of an adapter has its name in its path
    return [
        path
        for path, parameter in wrapper.named_parameters()
        if parameter.requires_grad and adapters.isdisjoint(path.split("."))
    ]


def _put_on(network: Any, wrapper: Any, side: Checkpoint, role: str) -> Any:
    """Put the adapter on the network, under the name of its role, make it active, and return the PEFT model around it.

    Raises:
        ModelError: if it does not fit.
    """
    peft = import_extra("peft", "models")
    what = f"the adapter {side.name} of the {role}"
    check_patterns(what, _patterns(side), (name for name, _ in network.named_modules()))
    try:
        if wrapper is None:
            wrapper = peft.PeftModel.from_pretrained(network, str(side.adapter), adapter_name=role)
        else:
            wrapper.load_adapter(str(side.adapter), adapter_name=role)
            wrapper.set_adapter(role)
        _check_fits(wrapper, side, role, what)
    except ModelError:
        raise
    except Exception as error:  # settings decide what is raised, down to re.error
        raise ModelError(f"{what} cannot be put on {side.base}: {first_line(error)}") from error
    return wrapper


def _patterns(side: Checkpoint) -> list[str]:
    """What PEFT matches the names of modules against as regular expressions."""
    assert side.adapter is not None
    settings = read_json(side.adapter / "adapter_config.json")
    named = [
        settings.get(name)
        for name in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save")
    ]
    tables = [settings.get(name) for name in ("rank_pattern", "alpha_pattern")]
    patterns = [one for one in named if _is_pattern(one) and one != "all-linear"]
    patterns += [one for some in named if isinstance(some, list) for one in some if _is_pattern(one)]
    return patterns + [
        one for table in tables if isinstance(table, dict) for one in table if _is_pattern(one)
    ]


def _is_pattern(text: Any) -> TypeGuard[str]:
    """Whether a name holds more than letters, digits, dots and underscores, of which each matches in one way."""
    return isinstance(text, str) and re.fullmatch(r"[\w.]*", text) is None


def _check_fits(wrapper: Any, side: Checkpoint, role: str, what: str) -> None:
    """See that every tensor of the adapter found its place, and every place its tensor."""
    peft = import_extra("peft", "models")
    stored = set(_header(side))
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


def _check_acts_on_weights(wrapper: Any, network: Any, side: Checkpoint, role: str, tied: bool) -> None:
    """See that the adapter acts within the network, and that there is one way to read it.

    Raises:
        ModelError: if it needs PEFT's own forward pass, is random, or is on one of two embeddings that are one tensor.
    """
    what = f"the adapter {side.name} of the {role}"
    if tied and _are_adapted_apart(network.get_input_embeddings(), network.get_output_embeddings()):
        raise ModelError(
            f"{what} is on an embedding whose tensor is also the other embedding, so that running it and merging it "
            "give two models; leave both embeddings out of the adapter, or merge it and give that folder"
        )
    probe = probe_of(network, _special_tokens({role: side}))
    try:
        inner, outer = logits_of(network, probe), logits_of(wrapper, probe)
    except Exception as error:
        raise ModelError(f"{what} cannot be run on {side.base}: {first_line(error)}") from error
    if not same_bits(inner, outer):
        raise ModelError(
            f"{what} gives other logits through PEFT's forward pass than through the network's, so that it does not "
            "act by weights alone; merge it into its base and give that folder"
        )


def _tied(network: Any) -> bool:
    """Whether input and output embedding are one tensor."""
    embeddings = network.get_input_embeddings(), network.get_output_embeddings()
    weights = [getattr(layer, "weight", None) for layer in embeddings]
    return weights[0] is not None and weights[0] is weights[1]


def _are_adapted_apart(embedding: Any, head: Any) -> bool:
    """Whether adapters change input and output embedding in two ways, so that merging would add both to one tensor.

    A copy that is trained whole, and rows that are trained for both at once, are read in one way only.
    """
    tuner_layer = import_extra("peft.tuners.tuners_utils", "models").BaseTunerLayer
    layers = [getattr(layer, "token_adapter", layer) for layer in (embedding, head)]
    if getattr(layers[1], "tied_adapter", None) is not None:
        return layers[1].tied_adapter is not layers[0]
    return any(isinstance(layer, tuner_layer) for layer in layers)


def _special_tokens(sides: Mapping[str, Checkpoint]) -> tuple[int, ...]:
    """Token ids whose embeddings adapters have trained apart from the others."""
    tokens: list[Any] = []
    for side in sides.values():
        settings = {} if side.adapter is None else read_json(side.adapter / "adapter_config.json")
        for name in ("trainable_token_indices", "token_indices"):
            named = settings.get(name)
            tokens += (
                [token for part in named.values() for token in part]
                if isinstance(named, dict)
                else named or []
            )
    return tuple(token for token in tokens if type(token) is int)


def _adapter_parameters(side: Checkpoint) -> int:
    return 0 if side.adapter is None else sum(prod(entry["shape"]) for entry in _header(side).values())


def _header(side: Checkpoint) -> dict[str, Any]:
    assert side.adapter is not None
    return safetensors_header(side.adapter / ADAPTER_WEIGHTS)
