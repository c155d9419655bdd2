"""The layouts of torchao: plain codes with scales and zero points of blocks, named in the metadata of the files.

For each quantised parameter the metadata has the class of its tensor and the size of its blocks; the codes and scales
of "X.weight" are tensors "X._weight_qdata", "X._weight_scale" and "X._weight_zero_point".

    W[o, i] = (q[o, i] - zeros[b]) scale[b]

AWQ and SmoothQuant multiply the inputs of a matrix by "X._weight_act_pre_scale", which are factors of its columns here.

Source: torchao, ``prototype/safetensors`` and ``quantization/quantize_/workflows``.
"""

import json
from collections.abc import Mapping
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
    for name, parameter in read_parameters(headers, reader).items():
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
