"""Groups of a network's weights, and swapping them for those of another network of the same architecture."""

import math
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from kleash.errors import ModelError
from kleash.linear import Head
from kleash.models.heads import has_tied_embeddings, truncate_head
from kleash.models.pair import Model
from kleash.precision import bitwise_equal

SETTING_TOLERANCE = 1e-6
"""Relative difference up to which two numbers of a module count as equal: GGUF files hold them in float32."""
ORIGIN = ("_name_or_path", "name_or_path", "transformers_version")
"""Settings of a network and its configuration that say where it comes from."""


@dataclass(frozen=True, kw_only=True)
class WeightGroup:
    """A part of a network's weights, which is swapped as a whole."""

    name: str
    """Such as "layer 3", "self_attn.q_proj", "norms" or "embeddings"."""
    parts: tuple[str, ...]
    """Paths within the network of its modules, and of its parameters and buffers that stand beside submodules."""
    parameters: int
    """Number of its weights in the reference."""
    is_identical: bool
    """Whether policy and reference have the same weights in it, bit for bit."""


def weight_groups(policy: Model, reference: Model, grouping: str) -> tuple[WeightGroup, ...]:
    """The groups of weights of two networks of the same architecture.

    Modules that a quantisation or an adapter has replaced by others are groups as well: modules are swapped, and not
    the tensors in them. Embeddings and head are one group if either network ties them.

    Args:
        policy: a loaded model.
        reference: another one, with a network of its own.
        grouping: "layers" for a group per decoder layer; "modules" for a group per kind of module over all layers,
            such as "self_attn.q_proj".

    Returns:
        The groups in the order of the network; all weights and buffers that differ are in exactly one.

    Raises:
        ModelError: if the two differ in architecture, in the shape of a weight other than embeddings, or in dtype.
    """
    _check_alike(policy, reference)
    layers = _layer_list(policy)
    parts_by_name: dict[str, dict[str, None]] = {}
    for path in _parts(policy.network, reference.network):
        name = _group_name(path, policy, reference, layers, grouping)
        if grouping == "layers" and path.startswith(f"{layers}."):
            path = f"{layers}.{_layer_index(path, layers)}"  # a layer is swapped as one module
        parts_by_name.setdefault(name, {})[path] = None
    groups = [_group(name, tuple(parts), policy, reference) for name, parts in parts_by_name.items()]
    # groups of buffers alone only where they differ
    return tuple(group for group in groups if group.parameters or not group.is_identical)


@contextmanager
def swapped_weights(policy: Model, reference: Model, groups: Iterable[WeightGroup]) -> Generator[Model]:
    """Context with the policy in which these groups are the reference's; its network is the same object.

    Args:
        policy: whose network is changed within the context.
        reference: whose modules are used; its network must not run within the context.
        groups: from ``weight_groups`` of the two.
    """
    head_path = _path_of(policy.network, policy.network.get_output_embeddings())
    head, originals = policy.head, list[tuple[str, Any]]()
    try:
        for path in (path for group in groups for path in group.parts):
            originals.append((path, _get(policy.network, path)))
            _set(policy.network, path, _get(reference.network, path))
            if _is_within(path, head_path):
                # the network's logits if either has no head of its own
                has_heads = policy.head.weight is not None and reference.head.weight is not None
                head = truncate_head(reference.head, policy.vocab_size) if has_heads else Head(weight=None)
        yield replace(policy, head=head)
    finally:
        for path, original in reversed(originals):
            _set(policy.network, path, original)


def _check_alike(policy: Model, reference: Model) -> None:
    """Check that the networks have one dtype, and are two.

    Raises:
        ModelError: if not.
    """
    if policy.network is reference.network:
        raise ModelError("policy and reference share one network; load each by itself to swap their weights")
    if policy.dtype != reference.dtype:
        raise ModelError(
            f"the policy ran in {policy.dtype} and the reference in {reference.dtype}; give --dtype to swap their "
            "weights"
        )


def _layer_list(model: Model) -> str:
    """The path of the list of decoder layers: of the lists that have as many entries as layers, the largest.

    Raises:
        ModelError: if there is none.
    """
    count = getattr(model.network.config.get_text_config(decoder=True), "num_hidden_layers", None)
    sizes = {
        path: sum(parameter.numel() for parameter in module.parameters())
        for path, module in model.network.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    }
    if not sizes:
        raise ModelError(
            f"the {model.role} ({type(model.network).__name__}) has no list of its {count} decoder layers; its weights "
            "cannot be grouped"
        )
    return max(sizes, key=lambda path: sizes[path])


def _parts(policy: Any, reference: Any, path: str = "") -> Iterator[str]:
    """The paths of the smallest modules at which two trees of modules are alike, and of the tensors beside them."""
    children = {name: (module, getattr(reference, name, None)) for name, module in _children(policy).items()}
    is_alike = type(policy) is type(reference) and children.keys() == _children(reference).keys()
    if not is_alike or not children:
        if _tensors(policy) or _tensors(reference):
            yield path
        return
    for name in _tensors(policy, recurse=False) | _tensors(reference, recurse=False):
        yield f"{path}.{name}".lstrip(".")
    for name, (module, other) in children.items():
        yield from _parts(module, other, f"{path}.{name}".lstrip("."))


def _children(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The submodules by name; one that occurs under two names has both."""
    paths = dict(module.named_modules(remove_duplicate=False))
    return {path: child for path, child in paths.items() if path and "." not in path}


def _tensors(module: torch.nn.Module, *, recurse: bool = True) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module by name; without ``recurse``, those of its submodules are left out."""
    return {
        **dict(module.named_parameters(recurse=recurse, remove_duplicate=False)),
        **dict(module.named_buffers(recurse=recurse, remove_duplicate=False)),
    }


def _layer_index(path: str, layers: str) -> int:
    return int(path.removeprefix(f"{layers}.").partition(".")[0])


def _group_name(path: str, policy: Model, reference: Model, layers: str, grouping: str) -> str:
    """The name of the group that a module or tensor belongs to.

    Raises:
        ModelError: if whole layers differ in kind, so that they have no modules in common.
    """
    network = reference.network
    embeddings = _path_of(network, network.get_input_embeddings())
    head = _path_of(network, network.get_output_embeddings())
    is_embedding, is_head = _is_within(path, embeddings), _is_within(path, head)
    if (is_embedding or is_head) and (has_tied_embeddings(policy.network) or has_tied_embeddings(network)):
        return "embeddings and head"
    if is_embedding or is_head:
        return "embeddings" if is_embedding else "head"
    is_in_layer = path.startswith(f"{layers}.")
    if is_in_layer and grouping == "layers":
        return f"layer {_layer_index(path, layers)}"
    kinds = [
        f"{type(part).__name__} of {len(part)}"
        if isinstance(part, torch.nn.ModuleList)
        else type(part).__name__
        for part in (_get(model.network, path) for model in (policy, reference))
    ]
    if not path or _is_within(layers, path):
        raise ModelError(
            f"the policy's {path or 'network'} is a {kinds[0]} and the reference's a {kinds[1]}; weights are swapped "
            "between models of one architecture"
        )
    if "norm" in kinds[1].lower():
        return "norms" if grouping == "modules" else "other norms"
    parts = path.removeprefix(f"{layers}.").split(".")
    if not is_in_layer:
        return parts[-1]
    return ".".join(part for part in parts if not re.fullmatch(r"\d+", part)) or "layers"


def _path_of(network: Any, module: Any) -> str | None:
    """The first path at which a module is in a network; None if it is not."""
    return next((path for path, candidate in network.named_modules() if candidate is module), None)


def _is_within(path: str, module: str | None) -> bool:
    """Whether a path is that of a module, or of one in it."""
    return module is not None and f"{path}.".startswith(f"{module}.")


def _group(name: str, parts: tuple[str, ...], policy: Model, reference: Model) -> WeightGroup:
    """The group of these modules and tensors.

    Raises:
        ModelError: if a weight differs in shape.
    """
    pairs = {path: (_get(policy.network, path), _get(reference.network, path)) for path in parts}
    if not name.startswith(("embeddings", "head")):
        for path, pair in pairs.items():
            _check_shapes(path, *pair)
    parameters = {
        id(weight): weight.numel()
        for _, part in pairs.values()
        for weight in (part.parameters() if isinstance(part, torch.nn.Module) else [part])
        if isinstance(weight, torch.nn.Parameter)
    }
    return WeightGroup(
        name=name,
        parts=parts,
        parameters=sum(parameters.values()),
        is_identical=all(are_equal(*pair) for pair in pairs.values()),
    )


def _check_shapes(path: str, policy_part: Any, reference_part: Any) -> None:
    """Check that the parameters of two modules of one class have the same shapes.

    Raises:
        ModelError: if not.
    """
    if type(policy_part) is not type(reference_part):
        return
    shapes = [
        {name: tuple(weight.shape) for name, weight in module.named_parameters()}
        if isinstance(module, torch.nn.Module)
        else {"": tuple(module.shape)}
        for module in (policy_part, reference_part)
    ]
    for name in shapes[0].keys() & shapes[1].keys():
        if shapes[0][name] != shapes[1][name]:
            raise ModelError(
                f"{'.'.join(filter(None, (path, name)))} is {shapes[0][name]} in the policy and "
                f"{shapes[1][name]} in the reference; weights are swapped between models of one architecture"
            )


def are_equal(policy_part: Any, reference_part: Any) -> bool:
    """Whether two modules, or two tensors, are the same bit for bit, with the same settings."""
    if isinstance(policy_part, torch.Tensor):
        return bitwise_equal(policy_part, reference_part)
    modules = dict(policy_part.named_modules()), dict(reference_part.named_modules())
    tensors = _tensors(policy_part), _tensors(reference_part)
    if modules[0].keys() != modules[1].keys() or tensors[0].keys() != tensors[1].keys():
        return False
    return all(
        type(module) is type(modules[1][path]) and _have_equal_settings(module, modules[1][path])
        for path, module in modules[0].items()
    ) and all(bitwise_equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


def have_equal_weights(policy: Model, reference: Model) -> bool:
    """Whether two networks have the same code, settings and weights, bit for bit, from whatever files they come.

    False as well where that is not known: of networks in memory, models that are not loaded, adapters, quantised
    weights, and weights that several ranks store.
    """
    configs: list[dict[str, Any]] = []
    for model in (policy, reference):
        if model.checkpoint is None or model.adapters is not None or model.storage is not None:
            return False
        configs.append(model.network.config.to_dict() | dict.fromkeys(ORIGIN))
    is_plain = configs[0] == configs[1] and configs[0].get("quantization_config") is None
    return is_plain and are_equal(policy.network, reference.network)


def _have_equal_settings(policy_part: torch.nn.Module, reference_part: torch.nn.Module) -> bool:
    """Whether the numbers and words that two modules hold as public attributes are equal.

    The padding index of an embedding changes gradients only; a GGUF file without a padding token has none.
    """
    settings: list[dict[str, Any]] = [
        {
            name: value
            for name, value in vars(module).items()
            if not name.startswith("_")
            and name not in ORIGIN
            and isinstance(value, bool | int | float | str)
            and not (name == "padding_idx" and isinstance(module, torch.nn.Embedding))
        }
        for module in (policy_part, reference_part)
    ]
    first, second = settings
    return first.keys() == second.keys() and all(
        math.isclose(value, second[name], rel_tol=SETTING_TOLERANCE)
        if isinstance(value, float) and not isinstance(second[name], str)
        else value == second[name]
        for name, value in first.items()
    )


def _get(network: Any, path: str) -> Any:
    """The module or tensor at a path."""
    parent, _, name = path.rpartition(".")
    return getattr(network.get_submodule(parent), name) if path else network


def _set(network: Any, path: str, value: Any) -> None:
    """Put another module or tensor in the place of the one at a path."""
    parent, _, name = path.rpartition(".")
    setattr(network.get_submodule(parent), name, value)
