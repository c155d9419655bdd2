"""The layouts of AutoRound, which are those of GPTQ, AWQ and compressed-tensors under names of its own.

Source: auto-round, ``inference/backend.py`` and ``export/export_to_autoround``; of version 0.3, ``export.py``.
"""

from collections.abc import Mapping
from typing import Any

from kleash.models.checkpoints.resolution import Checkpoint
from kleash.models.quantised.awq import find_gemm_modules
from kleash.models.quantised.gptq import find_word_modules
from kleash.models.quantised.packed_modules import PackedModule
from kleash.models.quantised.scaled_weights import WeightScheme, find_scaled_modules
from kleash.models.quantised.settings import UnsupportedLayoutError, read_group_size, read_integer

GPTQ_PACKINGS = {"auto_round:auto_gptq": True, "auto_round": False, "auto_round:gptqmodel": False}
"""``packing_format`` of GPTQ → whether zero points are stored less one."""
ALIASES = {
    "auto": "auto_round:auto_gptq",
    "auto_round:gptq": "auto_round:auto_gptq",
    "auto_round:awq": "auto_round:auto_awq",
}
"""Other names of AutoRound for its ``packing_format``."""
SCALED_PACKINGS = {"auto_round:llm_compressor": ("mx_fp", "nv_fp"), "auto_round:fp8_static": ("fp",)}
"""``packing_format`` of compressed-tensors → beginnings of the ``data_type`` of weights that are read."""


def find_auto_round_modules(checkpoint: Checkpoint) -> list[PackedModule]:
    """The packed modules of an AutoRound checkpoint.

    Raises:
        UnsupportedLayoutError: if its ``packing_format`` is not read.
        ModelError: if the tensors of a module do not fit together or contradict the settings.
    """
    settings: Mapping[str, Any] = checkpoint.quantisation or {}
    layout, data_type = read_auto_round_layout(settings), str(settings.get("data_type"))
    if layout == "auto_round:auto_awq":
        return find_gemm_modules(checkpoint)
    if layout in GPTQ_PACKINGS:
        return find_word_modules(checkpoint, has_shifted_zeros=GPTQ_PACKINGS[layout])
    if not data_type.startswith(SCALED_PACKINGS.get(layout, ())):
        raise UnsupportedLayoutError(f"its packing_format is {layout!r:.60} of {data_type!r:.40}")
    schemes: list[WeightScheme] = []  # scales of FP8 are of rows or of the matrix
    if not data_type.startswith("fp"):
        schemes = [WeightScheme(bits=read_integer(settings, "bits"), group_size=read_group_size(settings))]
    return find_scaled_modules(checkpoint, schemes)


def read_auto_round_layout(settings: Mapping[str, Any]) -> str:
    """The ``packing_format`` of an AutoRound checkpoint.

    Versions before 0.5 name a ``backend`` instead, and FP8 of version 0.16 neither.
    Their own backends, such as "auto_round:exllamav2", store zero points as they are; those of GPTQ, such as
    "auto_round:gptq:exllamav2", and of AWQ store them as these formats do.
    """
    layout, backend = settings.get("packing_format"), settings.get("backend")
    if layout is None and isinstance(backend, str) and backend != "auto":
        if "awq" in backend:
            layout = "auto_round:auto_awq"
        else:
            layout = "auto_round:auto_gptq" if "gptq" in backend else "auto_round"
    if layout is None and backend is None and str(settings.get("data_type")).startswith("fp"):
        layout = "auto_round:fp8_static"
    layout = str(layout or "auto")
    return ALIASES.get(layout, layout)
