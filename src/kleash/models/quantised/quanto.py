"""The layout of optimum-quanto for weights of 8 bits: codes with a scale of each row.

    W[o, i] = q[o, i] scale[o]

"X.weight" is stored as "X.weight._data" and "X.weight._scale". Weights of 4 and 2 bits are not read: their files have
neither the shape of the matrix nor the size of the groups.

Source: optimum-quanto, ``tensor/weights/qbytes.py`` and ``tensor/qbits.py``.
"""

from collections.abc import Mapping

from kleash.models.quantised.packed_modules import PackedModule, TensorHeader, TensorReader, renamed_tensors
from kleash.models.quantised.scaled_weights import describe_scaled_module
from kleash.models.quantised.settings import UnsupportedLayoutError

DATA, PACKED_DATA = ".weight._data", ".weight._data._data"


def find_quanto_modules(
    subject: str, headers: Mapping[str, TensorHeader], reader: TensorReader
) -> list[PackedModule]:
    """The modules that are stored in the layout of optimum-quanto.

    Args:
        subject: the model, for errors.
        headers: of all tensors of the checkpoint.
        reader: of the checkpoint.

    Raises:
        UnsupportedLayoutError: if weights have 4 or 2 bits.
        ModelError: if the tensors of a module do not fit together.
    """
    modules: list[PackedModule] = []
    for name in headers:
        if name.endswith(PACKED_DATA):
            raise UnsupportedLayoutError(
                f"its {name.removesuffix(PACKED_DATA):.80} has weights of 4 or 2 bits, whose shape is not stored"
            )
        if not name.endswith(DATA):
            continue
        module = name.removesuffix(DATA)
        names = {"weight": name, "weight_scale": f"{module}.weight._scale"}
        tensors = renamed_tensors(subject, module, names, headers)
        modules.append(describe_scaled_module(tensors, "quanto", [], reader))
    return modules
