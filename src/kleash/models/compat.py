"""Parts of transformers and PEFT beyond their documented interface: what kleash reads, switches and replaces.

Every private or undocumented attribute that the models floor relies on is in this module. transformers:
``config._name_or_path``, ``integrations.deepspeed._hf_deepspeed_config_weak_ref``, ``modeling_utils.safe_open``. PEFT:
``modules_to_save``, ``active_adapters``, ``disable_adapters``, ``token_adapter``, ``tied_adapter`` of tuner layers.
torch: the dictionaries of hooks, parameters and children of a module, and FSDP2's ``_get_fsdp_state()._mp_policy``,
FSDP1's ``_is_flat_param``, and ``_orig_mod`` and ``_compiled_call_impl`` of what ``torch.compile`` makes.
DeepSpeed: the modules in which its hooks are defined.
"""

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch

from kleash.extras import import_extra, replaced

HOOK_FLAGS = "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"
"""Attributes of ``torch.nn.Module`` that say how hooks are called."""
OF_THE_ORIGINAL = "forward", "_compiled_call_impl"
"""Attributes of an instance that are bound to it, so that a copy cannot have them."""


def run_uncompiled(network: Any) -> None:
    """Let the BitNet layers of a network run as they are written, not compiled.

    transformers compiles parts of them for each length of the input, which needs a C++ compiler on a CPU and takes
    seconds each time.
    """
    for layer in network.modules():
        if type(layer).__module__ == "transformers.integrations.bitnet":
            layer.forward = torch.compiler.set_stance("force_eager")(layer.forward)


class _UnmappedFile:
    """A safetensors file as ``safetensors.safe_open`` gives it, of which nothing is mapped."""

    def __init__(self, path: Any, framework: str = "pt", device: Any = "cpu", **_: Any) -> None:
        opened = import_extra("safetensors", "models").safe_open
        self.file = opened(path, framework=framework, device=device, backend="pread")

    def get_slice(self, name: str) -> "_UnmappedSlice":
        """A tensor that is read when it is indexed."""
        return _UnmappedSlice(self.file, name)

    def __enter__(self) -> "_UnmappedFile":
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class _UnmappedSlice:
    """A tensor of an ``_UnmappedFile``."""

    def __init__(self, file: Any, name: str) -> None:
        self.file, self.name, self.part = file, name, file.get_slice(name)

    def __getitem__(self, index: Any) -> Any:
        """A part of it; the whole is read in one piece, where safetensors would hold a copy meanwhile."""
        return self.file.get_tensor(self.name) if index is ... else self.part[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)


@contextmanager
def without_mapped_files() -> Iterator[None]:
    """Context in which transformers and PEFT read safetensors and do not map them, as ``open_safetensors``.

    Tensors of the file's dtype would otherwise stay mapped on a CPU, and change with the file.
    """
    of_transformers = import_extra("transformers.modeling_utils", "models")
    of_peft = import_extra("safetensors.torch", "models")
    with replaced(of_transformers, "safe_open", _UnmappedFile), replaced(of_peft, "safe_open", _UnmappedFile):
        yield


@contextmanager
def without_zero3_loading() -> Iterator[None]:
    """Context in which transformers loads whole networks, also where a Trainer with DeepSpeed's ZeRO-3 exists.

    With a ZeRO-3 configuration in the process, ``from_pretrained`` gives each rank a part of the weights, and networks
    cannot be built on the meta device.
    """
    integration = sys.modules.get("transformers.integrations.deepspeed")
    name = "_hf_deepspeed_config_weak_ref"
    is_set = getattr(integration, name, None) is not None
    with replaced(integration, name, None) if is_set else nullcontext():
        yield


def class_of_config(config: Any) -> Any:
    """The class in transformers that a configuration's network with a head has; None if there is none.

    It is the class of ``AutoModelForCausalLM``, or else that of ``AutoModelForMultimodalLM``, which has the models that
    read images, audio or video.
    """
    transformers = import_extra("transformers", "models")
    for auto_class in (transformers.AutoModelForCausalLM, transformers.AutoModelForMultimodalLM):
        mapping = auto_class._model_mapping
        if type(config) in mapping:
            classes = mapping[type(config)]
            return classes[0] if isinstance(classes, tuple) else classes
    return None


def find_backbone(network: Any) -> Any:
    """The submodule of a network that returns ``last_hidden_state``; the network itself if there is none.

    ``base_model`` is the network itself for a class whose ``base_model_prefix`` names no attribute. In Llama 4's
    composite class the language model is then a network with a head of its own, in which the submodule is.
    """
    if network.base_model is not network:
        return network.base_model
    embedding = network.get_input_embeddings()
    for module in network.children():
        if hasattr(module, "base_model") and any(part is embedding for part in module.modules()):
            return find_backbone(module) if module.get_output_embeddings() is not None else module
    return network


def use_exact_experts(network: Any) -> None:
    """Let a mixture of experts compute one expert after the other: its grouped product has no float64."""
    with contextlib.suppress(AttributeError, ValueError):  # networks without experts
        network.set_experts_implementation("eager")


def forget_renaming(network: Any) -> None:
    """Let a network be saved under the names of its class, not under those of the files that it was loaded from."""
    vars(network).pop("_weight_conversions", None)


def effective_weight_and_bias(layer: Any) -> tuple[Any, Any]:
    """Weight and bias of a linear layer with its active PEFT adapters merged into a copy.

    The copy is in at least float32, since the base's dtype could round the adapter's change away. Either value is
    None if the layer has none.
    """
    active = getattr(layer, "active_adapters", ())
    trained_copies = getattr(layer, "modules_to_save", None)
    if trained_copies is not None:
        copies = [
            trained_copies[name] for name in active if name in trained_copies and not layer.disable_adapters
        ]
        layer = copies[0] if copies else layer.original_module
    elif hasattr(layer, "get_base_layer"):
        if active and not layer.disable_adapters:
            weight = layer.get_base_layer().weight
            layer = deepcopy(layer).to(torch.promote_types(weight.dtype, torch.float32))
            layer.merge(adapter_names=list(active))
        layer = layer.get_base_layer()
    return getattr(layer, "weight", None), getattr(layer, "bias", None)


def has_adapter_on_one_embedding(embedding: Any, head: Any) -> bool:
    """Whether adapters change input and output embedding separately, so that merging adds both to a tied tensor.

    A trained copy of the whole layer (``modules_to_save``), and trained rows that both layers share, are not counted.
    """
    tuner_layer = import_extra("peft.tuners.tuners_utils", "models").BaseTunerLayer
    layers = [getattr(layer, "token_adapter", layer) for layer in (embedding, head)]
    if getattr(layers[1], "tied_adapter", None) is not None:
        return layers[1].tied_adapter is not layers[0]
    return any(isinstance(layer, tuner_layer) for layer in layers)


def fsdp_param_dtypes(modules: Iterable[Any]) -> set[torch.dtype]:
    """The dtypes in which FSDP2 gathers the weights of these modules (``MixedPrecisionPolicy.param_dtype``), if set."""
    policies = [module._get_fsdp_state()._mp_policy for module in modules]
    return {policy.param_dtype for policy in policies if policy.param_dtype is not None}


def copy_without_sharding(network: Any) -> Any:
    """A copy of a tree of modules that shares parameters and buffers, without hooks of FSDP and DeepSpeed.

    FSDP's classes are left out, too, and an instance's own ``forward`` (Accelerate's and TRL's wrappers), since it is
    bound to the original; so is what ``torch.compile`` made of a module, in its place or around it: the copy runs as it
    is written. A module that occurs twice is copied once.
    """
    kind = import_extra("torch.distributed.fsdp", "models").FSDPModule
    compiled: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    copies: dict[int, Any] = {}

    def copy(module: Any) -> Any:
        while isinstance(module, compiled):  # what torch.compile has wrapped
            module = module._orig_mod
        if id(module) in copies:
            return copies[id(module)]
        base = next(base for base in type(module).__mro__ if not issubclass(base, kind))
        result = copies[id(module)] = object.__new__(base)
        state = {name: value for name, value in vars(module).items() if name not in OF_THE_ORIGINAL}
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            state[name] = OrderedDict(
                (key, hook)
                for key, hook in state[name].items()
                if not str(getattr(hook, "__module__", "")).startswith(
                    ("torch.distributed.fsdp", "deepspeed.")
                )
            )
        for name in ("_buffers", *HOOK_FLAGS):
            state[name] = state[name].copy()
        # DeepSpeed's own dictionary gathers what is read from it.
        state["_parameters"] = dict(state["_parameters"])
        vars(result).update(state)
        children = state["_modules"].items()
        vars(result)["_modules"] = {name: None if child is None else copy(child) for name, child in children}
        return result

    return copy(network)
