"""Building a network no larger than its files and filling it with parameters, packed or not, until it is complete."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from kleash.checkpoints.quantised.packed_formats import PackedCheckpoint
from kleash.checkpoints.quantised.packed_modules import PackedModule
from kleash.checkpoints.resolution import GENERATION_CONFIG, Checkpoint
from kleash.errors import KleashError, ModelError, summarise_error
from kleash.extras import import_extra
from kleash.models.compat import without_mapped_files
from kleash.store.file_hashes import require_unchanged_files

ALWAYS_ALLOWED_BUFFER_ELEMENTS = 1 << 26
"""Number of elements of buffers (computed tables, which no file stores) that is accepted for any weights."""
MAX_RATIO, MAX_QUANTISED_RATIO = 2, 64
"""Largest ratio of a network's parameters to the elements in its files. Quantised files pack several weights into one
element."""
MAX_SHOWN_NAMES = 3
ACTIVATION_TENSORS = frozenset(
    (
        *("input_scale", "output_scale", "input_zero_point", "output_zero_point", "input_global_scale"),
        *("activation_scale",),
        *("q_scale", "k_scale", "v_scale", "q_zero_point", "k_zero_point", "v_zero_point"),
    )
)
"""Last parts of names of tensors by which activations and stored keys and values are quantised in serving."""
ON_META = "meta"
"""Device map of networks that have the shapes of their weights and no values."""
REMEDY = (
    "; fetch the checkpoint again, or save it whole and without a wrapper (torch.compile, DistributedDataParallel, a "
    "value head); models of embeddings or rewards have no head"
)


LOADING_LOCK = RLock()
"""Held while a network is loaded: transformers replaces functions of torch and of its own meanwhile, and they stay
replaced if two threads load at once."""


@contextmanager
def loading(subject: object, advice: str = "", action: str = "loaded") -> Iterator[None]:
    """Context in which transformers and PEFT map no file, and their errors, of any type, become one about the subject.

    One thread at a time is in it.

    Args:
        subject: what is loaded.
        advice: what to do; "" for what follows from the error.
        action: what cannot be done with it, after "cannot be".

    Raises:
        ChangedInputError: if there was an error, and a file has changed since it was found.
    """
    try:
        with LOADING_LOCK, without_mapped_files():
            yield
    except KleashError:
        raise
    except Exception as error:  # the exception type depends on the configuration, down to AssertionError
        require_unchanged_files()
        hint = "; add --trust-remote-code if you trust the code it brings" if "remote" in str(error) else ""
        raise ModelError(f"{subject} cannot be {action}: {summarise_error(error)}{advice or hint}") from error


def check_network_size(checkpoint: Checkpoint, config: Any, build: Any, *, is_quantised: bool = False) -> Any:
    """Build the network of a configuration on the meta device and compare its parameters with those in its files.

    Args:
        checkpoint: the files.
        config: a transformers configuration.
        build: builds the network of a configuration, such as ``AutoModelForCausalLM.from_config``.
        is_quantised: whether its weights are quantised by settings that ``config`` does not have.

    Returns:
        The network on the meta device.

    Raises:
        ModelError: if it has too many parameters or buffers, or cannot be built.
    """
    elements = sum(tensor.elements for tensor in checkpoint.tensors.values())
    is_quantised |= getattr(config, "quantization_config", None) is not None
    with loading(checkpoint), torch.device("meta"):
        layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None) or 0
        if layers > len(checkpoint.tensors):  # before memory is taken for their modules
            raise ModelError(
                f"{checkpoint} has {layers} layers by its settings, and its files hold {len(checkpoint.tensors)} "
                "tensors; correct them, or fetch the checkpoint again"
            )
        network = build(deepcopy(config))
    parameters = sum(parameter.numel() for parameter in network.parameters())
    buffer_elements = sum(buffer.numel() for buffer in network.buffers())
    max_ratio = MAX_QUANTISED_RATIO if is_quantised else MAX_RATIO
    if parameters > max_ratio * elements or buffer_elements > max(
        ALWAYS_ALLOWED_BUFFER_ELEMENTS, 4 * elements
    ):
        raise ModelError(
            f"{checkpoint} describes in its settings a network of {parameters} weights and tables of "
            f"{buffer_elements} numbers, and its files hold {elements} numbers; correct them, or fetch the "
            "checkpoint again"
        )
    return network


def fill_network(
    load: Callable[..., tuple[Any, Any]],
    config: Any,
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
    device_map: str | None,
) -> tuple[Any, Any]:
    """A network with these parameters, and transformers' report of how they fit.

    Args:
        load: ``from_pretrained`` of its class.
        config: of the network.
        parameters: by the names of a checkpoint.
        dtype: of the network.
        device_map: how transformers spreads the network over devices; None for the CPU.
    """
    return load(
        None,
        config=config,
        state_dict=parameters,
        dtype=dtype,
        device_map=device_map,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported by check_complete instead
    )


def check_complete(report: Any, subject: str, advice: str = "") -> None:
    """Check that all weights of a network were in the files, in the shapes of the configuration.

    Args:
        report: of transformers.
        subject: the model, for errors.
        advice: what to do about missing weights; "" for ``REMEDY``.

    Raises:
        ModelError: naming the first weights, and the first tensors that are none.
    """
    mismatches = sorted(report.get("mismatched_keys", ()), key=str)
    if mismatches:
        raise ModelError(
            f"{subject} has {len(mismatches)} weights of other shapes than its configuration says, such as "
            f"{str(mismatches[0])[:200]}; correct it, or fetch or convert the model again"
        )
    missing, unused = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if missing:
        raise ModelError(
            f"{subject} lacks {len(missing)} of its weights, which would be random: "
            f"{', '.join(missing[:MAX_SHOWN_NAMES])} (unused in its files: "
            f"{', '.join(unused[:MAX_SHOWN_NAMES]) or 'none'}){advice or REMEDY}"
        )


def load_unpacked_network(
    packed: PackedCheckpoint,
    load: Callable[..., tuple[Any, Any]],
    skeleton: Any,
    *,
    dtype: torch.dtype | str,
    device_map: str | None,
) -> tuple[Any, Any]:
    """Load a checkpoint with packed weights as an ordinary network, with each matrix unpacked into ``dtype``.

    Products are those of the unpacked matrices with unrounded activations. Beside the result, memory holds one
    matrix in float32, and the packed tensors that it is made of.

    Args:
        packed: its packed modules.
        load: ``from_pretrained`` of the network's class.
        skeleton: the network on the meta device.
        dtype: of the parameters; "auto" for that of config.json, or else bfloat16.
        device_map: how transformers spreads the model over devices; None for the CPU.

    Returns:
        The network, and transformers' report of how the tensors fit.

    Raises:
        ModelError: if the values of a packed tensor are invalid.
    """
    # A packed output embedding is another matrix than the input embedding.
    head = skeleton.get_output_embeddings()
    names = [name for name, module in skeleton.named_modules() if head is not None and module is head]
    ends = tuple(f".{name}.weight" for name in names)  # a name in a file may have the prefix of the text part
    has_packed_head = any(f".{module.parameter}".endswith(ends) for module in packed.modules)
    config = _without_quantisation(skeleton.config, tied=not has_packed_head)
    text_config = config.get_text_config(decoder=True)
    stored_dtype = getattr(text_config, "dtype", None) or getattr(config, "dtype", None) or torch.bfloat16
    resolved = dtype if isinstance(dtype, torch.dtype) else stored_dtype
    network, report = fill_network(
        load, config, dict(_read_parameters(packed, skeleton, resolved)), resolved, device_map
    )
    # AutoGPTQ writes biases of zeros for modules that have none.
    stored, weights = packed.checkpoint.safetensors, {module.parameter for module in packed.modules}
    report["unexpected_keys"] = {
        name
        for name in report["unexpected_keys"]
        if name not in stored
        or not name.endswith(".bias")
        or f"{name.removesuffix('bias')}weight" not in weights
        or stored.read(name).any()
    }
    folder = packed.checkpoint.folder
    network.config.name_or_path = str(folder)
    if (folder / GENERATION_CONFIG).is_file() and network.can_generate():
        transformers = import_extra("transformers", "models")
        network.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return network, report


def _read_parameters(
    packed: PackedCheckpoint, skeleton: Any, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the ordinary checkpoint by name."""
    stored = packed.checkpoint.safetensors
    modules = {module.parameter: module for module in packed.modules}
    used_by_modules = {part for module in packed.modules for part in module.parts}
    # GPT-2's ``Conv1D`` has [inputs, outputs], and formats store [outputs, inputs]; files may lack the name of the
    # base model.
    prefix = f"{skeleton.base_model_prefix}."
    transposed = tuple(
        f".{name.removeprefix(prefix)}.weight"
        for name, module in skeleton.named_modules()
        if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    )
    for name in [*(name for name in stored if name not in used_by_modules), *modules]:
        if name.rpartition(".")[2] in ACTIVATION_TENSORS:
            continue
        if name in modules:
            weight = unpack(modules[name], dtype)
            yield name, weight.T.contiguous() if f".{name}".endswith(transposed) else weight
        elif packed.arrange is not None:
            yield from packed.arrange(name, stored.read(name))
        else:
            yield name, stored.read(name)


def unpack(module: PackedModule, dtype: torch.dtype) -> Tensor:
    """The matrix of a packed module in ``dtype``, computed in at least float32.

    Raises:
        ModelError: if a value of its tensors is invalid.
    """
    return module.decode(torch.promote_types(dtype, torch.float32)).to(dtype)


def _without_quantisation(config: Any, *, tied: bool) -> Any:
    """A copy of a configuration without ``quantization_config``, and with a head of its own unless ``tied``."""
    config = deepcopy(config)
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
        if not tied:
            part.tie_word_embeddings = False  # the head has a matrix of its own
    return config
