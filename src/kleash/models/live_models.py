"""Measuring a network that is in memory, such as a trainer's, without changing its training state."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kleash.errors import CannotRunError, ModelError, OptionError
from kleash.linear import Head
from kleash.linear.zero3 import is_zero3, zero3_as_dtensor
from kleash.models.adapters import find_rule, require_unchanged_base, trainable_base_parameters
from kleash.models.heads import first_rows
from kleash.models.model_building import build_model
from kleash.models.pair import Model
from kleash.models.pair_loading import DTYPES
from kleash.models.sharded_networks import MeanGradient, reshard, shard_storage, view_of_shards
from kleash.models.shared_base import LoadedNetwork
from kleash.models.transformers_formats import is_packed

ACTIVE_ADAPTER = "the one in use"
"""Value of ``adapter`` for the adapter that is active in the PEFT model."""


def live_model(
    network: Any,
    tokenizer: Any,
    *,
    role: str = "policy",
    adapter: str | None = ACTIVE_ADAPTER,
    name: str | None = None,
) -> Model:
    """Wrap a transformers or PEFT model in memory as a ``Model`` for a ``Pair``.

    The weights are not copied, so a measurement uses them as they are at that time. Only an adapter on the output
    embedding is merged into a copy when this is called; so call it again for each measurement. The network must be in
    evaluation mode (``at_rest``), since dropout would be measured too.

    A network that FSDP2 or ZeRO-3 shards is used through a view of its modules, which gathers one weight at a time. All
    ranks call this together. They then make the same calls of the model, or take turns (``in_lockstep``).

    Args:
        network: not wrapped for distribution (``accelerator.unwrap_model``).
        tokenizer: of the network.
        role: "policy" or "reference", for errors.
        adapter: of a PEFT model, the name of the adapter to measure; None for the base with all adapters disabled.
        name: the model's name in errors and records; None for the name that it was loaded by.

    Raises:
        ModelError: if it is not a causal language model of text, is in training mode, or is sharded in a way that
            is not supported; if an adapter has changed the base to be measured, or needs a forward pass of PEFT's; if
            several adapters act at once, or not everywhere.
    """
    checked_language_model(network, role)
    storage = shard_storage(network, f"the {role}")
    is_peft = hasattr(network, "get_base_model")
    with nullcontext() if storage is None else storage.raising_together():
        adapter_name = _resolve_adapter(network if is_peft else None, adapter, role)
        _check_at_rest(base_network(network), role)
        if is_peft:
            _check_adapters(network, adapter_name, role)
    if storage is not None:
        network = view_of_shards(network, storage)
    base = base_network(network)
    packed_note = f"the {role} in memory runs on packed weights, with the kernels of its format"
    loaded = LoadedNetwork(
        network=base,
        parameters=sum(parameter.numel() for parameter in base.parameters()),
        notes=(packed_note,) if storage is None and is_packed(base) else (),
        storage=storage,
        adapters=network if is_peft else None,
        adapter=adapter_name,
    )
    return build_model(loaded, tokenizer, role=role, path=name or base.name_or_path or type(base).__name__)


def base_network(network: Any) -> Any:
    """The transformers model inside a PEFT model; any other network as it is."""
    return network.get_base_model() if hasattr(network, "get_base_model") else network


def checked_language_model(network: Any, role: str) -> Any:
    """The network in memory, checked to be one of transformers with a head that gives logits of all tokens.

    Raises:
        ModelError: if it is not, such as a reward model or an encoder with a decoder.
    """
    base = base_network(network)
    has_head = hasattr(base, "get_input_embeddings") and (
        hasattr(base, "generate") or base.get_output_embeddings() is not None
    )
    if not has_head or base.config.is_encoder_decoder:
        raise ModelError(
            f"the {role} is of type {type(base).__name__}; give a transformers model with a language-model head, as "
            "AutoModelForCausalLM.from_pretrained loads"
            + (", which is the .module of this one" if hasattr(base, "module") else "")
        )
    return network


def dropouts_of(network: Any) -> list[tuple[torch.nn.Module, str]]:
    """Modules of a network, each with the name of an attribute that is a probability of dropout above 0."""
    return [
        (module, name)
        for module in network.modules()
        for name, value in vars(module).items()
        # attention dropout is an attribute
        if isinstance(value, float)
        and value > 0
        and (isinstance(module, torch.nn.Dropout) or "dropout" in name)
    ]


def require_two_networks(policy: Any, reference: Any) -> None:
    """Check that policy and reference, or teacher, are not one network in memory: the same tensors, in any wrapper.

    Raises:
        OptionError: if they are: their KL would be 0.
    """
    tensors = [{id(x) for x in (*each.parameters(), *each.buffers())} for each in (policy, reference)]
    if tensors[0] == tensors[1]:
        raise OptionError(
            "the policy and its reference or teacher are one network in memory, so that what changes it is in both: "
            "training, or PEFT, which puts an adapter into the model that it is given. Load the other anew, or leave a "
            "reference out to have a policy with an adapter compared with its base"
        )


def require_plain_head(network: Any, role: str) -> None:
    """Check that no adapter is on the head of a model in memory.

    Raises:
        CannotRunError: if one is.
    """
    layer = base_network(network).get_output_embeddings()
    if any(hasattr(layer, name) for name in ("base_layer", "modules_to_save", "token_adapter")):
        raise CannotRunError(
            f"the head of the {role} has an adapter, and the exact KL is computed from a plain head; leave the "
            "output embedding out of the adapter, or in TRL's trainers take the KL k3"
        )


def current_head(network: Any, layout: Head, *, requires_grad: bool) -> Head:
    """``layout`` with the current weights of the network's head, detached unless ``requires_grad``.

    Weights that FSDP2 has gathered are used as they are; those that it or ZeRO-3 stores on several ranks stay there.
    """
    layer = base_network(network).get_output_embeddings()
    rows = 0 if layout.weight is None else len(layout.weight)
    weight, bias = (
        None if x is None else _current_rows(x, rows, layout, requires_grad=requires_grad)
        for x in (layer.weight, getattr(layer, "bias", None))
    )
    return replace(layout, weight=weight, bias=bias)


def _current_rows(tensor: Tensor, rows: int, layout: Head, *, requires_grad: bool) -> Tensor:
    """The rows of a head that are tokens; the gradient of stored ones is the mean over the ranks, as that of FSDP."""
    if is_zero3(tensor):  # which takes the mean itself
        return first_rows(zero3_as_dtensor(tensor, requires_grad=requires_grad), rows)
    tensor = first_rows(tensor if requires_grad else tensor.detach(), rows)
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor
    if layout.weight is not None and tensor.dtype != layout.weight.dtype:
        tensor = tensor.to(layout.weight.dtype)  # FSDP's param_dtype, in which the network computes
    return MeanGradient.apply(tensor, mesh.size())


AT_REST_LOCK = RLock()
"""Held while networks are at rest: random states are the process's, and a network may be that of several threads."""


@contextmanager
def at_rest(*networks: Any) -> Iterator[None]:
    """Context with the networks in evaluation mode; on exit the state of training is restored.

    Restored are the mode of each module (some may have been set to evaluation on purpose), the active adapter, which
    parameters require gradients, and the random states of Python, NumPy, and PyTorch on the CPU and on the devices of
    the networks. So a measurement during training does not change its further course by a bit. One thread at a time is
    in this context; another one waits.
    """
    with AT_REST_LOCK:
        for network in networks:
            reshard(network)  # so that flags of parameters are restored where they are set
        modes = [(module, module.training) for network in networks for module in network.modules()]
        gradient_flags = [(p, p.requires_grad) for network in networks for p in network.parameters()]
        active_adapters = [
            (network, network.active_adapter)
            for network in networks
            if isinstance(getattr(network, "active_adapter", None), str)
        ]
        devices = {p.device for network in networks for p in network.parameters() if p.device.type == "cuda"}
        python_state = random.getstate()
        numpy_state = np.random.get_state()  # noqa: NPY002 (the global generator, which other libraries use)
        with torch.random.fork_rng(devices=sorted(device.index or 0 for device in devices)):
            try:
                for network in networks:
                    network.eval()
                yield
            finally:
                for network, adapter in active_adapters:
                    if network.active_adapter != adapter:
                        network.set_adapter(adapter)
                for module, training in modes:
                    module.training = training
                for parameter, requires_grad in gradient_flags:
                    parameter.requires_grad_(requires_grad)
                random.setstate(python_state)
                np.random.set_state(numpy_state)  # noqa: NPY002


def _resolve_adapter(peft_model: Any, adapter: str | None, role: str) -> str | None:
    """The name of the adapter to measure: of the one in use, the one that acts in PEFT's layers; None for the base."""
    names = () if peft_model is None else tuple(peft_model.peft_config)
    if adapter not in (ACTIVE_ADAPTER, None, *names):
        raise ModelError(
            f"the {role} has no adapter {adapter!r} (its adapters: {', '.join(names) or 'none'}); name one of "
            "them, or leave the name out"
        )
    if peft_model is None or adapter != ACTIVE_ADAPTER:
        return None if peft_model is None else adapter
    acting = {
        () if layer.disable_adapters else tuple(layer.merged_adapters or layer.active_adapters)
        for layer in peft_model.modules()
        if hasattr(layer, "merged_adapters")
    } or {(peft_model.active_adapter,)}  # of prompts, which are refused by their kind
    first = min(acting)
    if len(acting) > 1 or len(first) > 1:
        raise ModelError(
            f"one adapter of the {role} must act in all layers, and in some act: "
            f"{', '.join(' with '.join(names) or 'none' for names in sorted(acting))}; enable and activate one"
        )
    return first[0] if first else None


def _check_adapters(peft_model: Any, adapter_name: str | None, role: str) -> None:
    """Check that the adapters leave the base unchanged, if it is measured, or that the adapter is of a known kind.

    PEFT switches from a merged adapter by subtracting its change from the weights, for good.

    Args:
        peft_model: the PEFT model around the network.
        adapter_name: the adapter to measure; None for the base.
        role: "policy" or "reference", for errors.
    """
    instead = "name a reference that is loaded by itself"
    if any(
        name != adapter_name or name != peft_model.active_adapter
        for layer in peft_model.modules()
        for name in getattr(layer, "merged_adapters", ())
    ):
        raise ModelError(
            f"an adapter is merged into the network of the {role}, and PEFT would unmerge it in place, which rounds "
            f"the weights; call unmerge_adapter() first, or {instead}"
        )
    if adapter_name is None:
        require_unchanged_base(peft_model, role, instead=instead)
        return
    rule = find_rule(peft_model.peft_config[adapter_name].to_dict())
    if rule is not None and rule.treatment == "refused" and not rule.changes_base:
        raise ModelError(f"the adapter {adapter_name!r} of the {role} {rule.reason}; {rule.advice}")
    trainable = trainable_base_parameters(peft_model)
    if trainable and adapter_name != peft_model.active_adapter:
        raise ModelError(
            f"the {role} would be the adapter {adapter_name!r} beside one that is trained, but {len(trainable)} "
            f"tensors under both are trained too, such as {trainable[0]}; freeze them, or {instead}"
        )


def _check_at_rest(network: Any, role: str) -> None:
    """Check that a network is in evaluation mode, whole or sharded by FSDP2 or ZeRO-3, and in a supported dtype."""
    if network.training:
        raise ModelError(
            f"the {role} is in training mode, so that dropout would be measured; put it at_rest first"
        )
    embedding = network.get_input_embeddings().weight
    is_matrix = embedding.dim() == 2 and embedding.numel() > 0
    has_flat_parameters = any(getattr(weight, "_is_flat_param", False) for weight in network.parameters())
    if (not is_matrix and not is_zero3(embedding)) or has_flat_parameters:
        raise ModelError(
            f"the weights of the {role} are sharded over processes, of which each holds a part; a live network is "
            "measured with FSDP2 (fully_shard) or ZeRO-3, or where every process holds it whole "
            "(DistributedDataParallel)"
        )
    if network.dtype not in DTYPES.values():
        raise ModelError(f"the {role} has weights in {network.dtype}; kleash runs {', '.join(DTYPES)}")
