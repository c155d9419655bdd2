"""The layouts of torchao: plain codes with scales and zero points of blocks, named in the metadata of the files.

For each quantised parameter the metadata has the class of its tensor and the size of its blocks; the codes and scales
of "X.weight" are tensors "X._weight_qdata", "X._weight_scale" and "X._weight_zero_point".

    W[o, i] = (q[o, i] - zeros[b]) scale[b]

AWQ and SmoothQuant multiply the inputs of a matrix by "X._weight_act_pre_scale", which are factors of its columns here.

Source: torchao, ``prototype/safetensors`` and ``quantization/quantize_/workflows``.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kleash.models.quantised.packed_modules import PackedModule, TensorHeader, TensorReader, renamed_tensors
from kleash.models.quantised.scaled_weights import COLUMN_FACTORS, WeightScheme, describe_scaled_module
from kleash.models.quantised.settings import UnsupportedLayoutError, read_block

PLAIN_CLASSES = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")
"""Classes of tensors that hold a code in each element."""
PART_NAMES = {
    "weight": "qdata",
    "weight_scale": "scale",
    "weight_zero_point": "zero_point",
    COLUMN_FACTORS: "act_pre_scale",
}
"""Names in ``scaled_weights`` → torchao's."""
CODES = "_qdata"
"""End of the name of the tensor of a parameter's codes."""
SMALL_INTEGERS = tuple(f"int{bits}" for bits in range(1, 8))
ACTIVATION_SETTINGS = ("act_quant_kwargs", "activation_quantization")


def read_parameters(headers: Mapping[str, TensorHeader], reader: TensorReader) -> dict[str, dict[str, Any]]:
    """The quantised parameters by name: the class of each ("_type") and its attributes ("_data").

    Raises:
        UnsupportedLayoutError: if the metadata are damaged.
    """
    parameters: dict[str, dict[str, Any]] = {}
    for path in dict.fromkeys(header.path for header in headers.values()):
        for name, text in reader.read_metadata(path).items():
            if "." not in name or name in headers:
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise UnsupportedLayoutError(f"its metadata of {name:.80} are not JSON") from error
            attributes = value.get("_data", {}) if isinstance(value, dict) else None
            if not isinstance(attributes, dict) or not isinstance(value.get("_type"), str):
                raise UnsupportedLayoutError(f"its metadata of {name:.80} have no type")
            if value["_type"] != "Tensor":
                parameters[name] = {"_type": value["_type"], "_data": attributes}
    return parameters


def find_torchao_modules(
    subject: str, headers: Mapping[str, TensorHeader], reader: TensorReader
) -> list[PackedModule]:
    """The modules that are stored in a layout of torchao.

    Args:
        subject: the model, for errors.
        headers: of all tensors of the checkpoint.
        reader: of the checkpoint.

    Raises:
        UnsupportedLayoutError: if the class of a tensor is not one of ``PLAIN_CLASSES``.
        ModelError: if the tensors of a module do not fit together.
    """
    modules: list[PackedModule] = []
    parameters = read_parameters(headers, reader)
    stored_names = _match_stored_names(parameters, headers)
    for network_name, parameter in parameters.items():
        name = stored_names.get(network_name, network_name)
        kind, attributes = parameter["_type"], parameter["_data"]
        if kind not in PLAIN_CLASSES:
            raise UnsupportedLayoutError(
                f"its {name:.80} is a torchao {kind:.40}, whose codes are packed for the kernels of one device"
            )
        module, _, part = name.rpartition(".")
        names = {canonical: f"{module}._{part}_{suffix}" for canonical, suffix in PART_NAMES.items()}
        tensors = renamed_tensors(subject, module, names, headers, parameter=name)
        block = read_block(attributes, "block_size")
        schemes = [] if block is None else [WeightScheme(bits=8, block=block)]
        packed = describe_scaled_module(tensors, "torchao", schemes, reader)
        modules.append(replace(packed, kind=packed.kind.replace("int8", _integer_type(attributes))))
    return modules


def _match_stored_names(parameters: Iterable[str], headers: Mapping[str, TensorHeader]) -> dict[str, str]:
    """The names in the files of the parameters that the metadata call otherwise.

    transformers writes tensors of composite models under the names of older versions
    ("language_model.model.layers.0…"), and metadata under those of the network ("model.language_model.layers.0…"). A
    parameter belongs to the stored one with the same numbers and last parts that has most parts of its name; it is left
    out if there are two of them.
    """
    stored = [
        f"{module}.{part.removeprefix('_').removesuffix(CODES)}"
        for module, _, part in (name.rpartition(".") for name in headers)
        if part.startswith("_") and part.endswith(CODES)
    ]
    other_names = set(parameters) - set(stored)
    candidates: dict[tuple[str, ...], list[str]] = {}
    for name in set(stored) - set(parameters):
        candidates.setdefault(_fixed_parts(name), []).append(name)
    matches: dict[str, str] = {}
    for name in other_names:
        shared = {
            candidate: (Counter(candidate.split(".")) & Counter(name.split("."))).total()
            for candidate in candidates.get(_fixed_parts(name), [])
        }
        best = [candidate for candidate, count in shared.items() if count == max(shared.values())]
        if len(best) == 1:
            matches[name] = best[0]
    counts = Counter(matches.values())
    return {name: match for name, match in matches.items() if counts[match] == 1}


def _fixed_parts(name: str) -> tuple[str, ...]:
    """The parts of a parameter's name that stay when its model is renamed: the numbers and the last two."""
    parts = name.split(".")
    return (*(part for part in parts if part.isdigit()), *parts[-2:])


def _integer_type(attributes: Mapping[str, Any]) -> str:
    """The type of codes that are stored as int8, of which some have fewer bits: "int4"."""
    target = attributes.get("target_dtype")
    name = target.get("_data") if isinstance(target, dict) else None
    return name if name in SMALL_INTEGERS else "int8"


def rounds_activations(headers: Mapping[str, TensorHeader], reader: TensorReader) -> bool:
    """Whether a matrix product also quantises its activations."""
    return any(
        parameter["_data"].get(setting)
        for parameter in read_parameters(headers, reader).values()
        for setting in ACTIVATION_SETTINGS
    )
