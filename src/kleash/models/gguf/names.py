"""The parameters of a network that the tensors of a GGUF file stand for.

Names follow from the table by which llama.cpp's converter names the parameters of a checkpoint. What the converter
renames before it looks there is an exception of the architecture.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kleash.extras import import_extra

LAYERS = "model.layers"
BLOCK_TENSOR = re.compile(r"blk\.(\d{1,6})\.([a-z0-9_.]+?)(?:\.(weight|bias|scale))?")
BLOCK_NUMBER = re.compile(r"blk\.(\d{1,6})\.")
OLD_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d{1,4})")
"""Part of a block that is one expert, as files of 2023 have them."""


@dataclass(frozen=True, kw_only=True)
class ParameterNames:
    """The names in a checkpoint of the parameters that a file's tensors stand for."""

    exceptions: Mapping[str, str]
    """Of the architecture: part of a block → module of a layer, part with its suffix → parameter, and tensor outside of
    blocks → parameter; "{expert}" stands for the number of an expert."""
    converted: Mapping[str, str]
    """Tensor → parameter by the table of the package gguf."""

    @classmethod
    def of(cls, name: str, exceptions: Mapping[str, str], network: Any) -> "ParameterNames":
        """The names for a network of the architecture ``name``, on any device."""
        gguf = import_extra("gguf", "models")
        (arch,) = (arch for arch, its_name in gguf.MODEL_ARCH_NAMES.items() if its_name == name)
        depth = len({match[1] for key in network.state_dict() if (match := re.search(r"\.(\d+)\.", key))})
        table = gguf.get_tensor_name_map(arch, depth)
        tensors = {
            parameter: table.get_name(parameter, try_suffixes=(".weight", ".bias"))
            for parameter in network.state_dict()
        }
        return cls(
            exceptions=exceptions,
            converted={tensor: parameter for parameter, tensor in tensors.items() if tensor is not None},
        )

    def find(self, name: str) -> str | None:
        """The parameter that a tensor such as "blk.3.attn_q.weight" stands for; None if there is none."""
        match = BLOCK_TENSOR.fullmatch(name)
        if match is None:
            return self.exceptions.get(name, self.converted.get(name))
        number, part, suffix = match.groups()
        expert = OLD_EXPERT.fullmatch(part)
        if expert is not None and f"{expert[1]}_exps" in self.exceptions:
            module = self.exceptions[f"{expert[1]}_exps"].replace("{expert}", expert[2])
            return f"{LAYERS}.{number}.{module}.{suffix}"
        if f"{part}.{suffix}" in self.exceptions:
            return f"{LAYERS}.{number}.{self.exceptions[f'{part}.{suffix}']}"
        if part in self.exceptions and suffix != "scale":
            return f"{LAYERS}.{number}.{self.exceptions[part]}" + (f".{suffix}" if suffix else "")
        return self.converted.get(name)
