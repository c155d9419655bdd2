"""Quantises a matrix with the packages of formats, each case into a folder with what the package dequantises it to.

    python tests/helpers/format_packages.py FOLDER PATH

A process of its own, since transformers imports some of these packages wherever it finds them; PATH, as in PYTHONPATH,
is where they are. Each folder has config.json and model.safetensors of the module "m", and expected.safetensors with
the matrix "weight".
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

ROWS, COLUMNS = 160, 96


class FormatCase(NamedTuple):
    """A matrix as a package stores it, and as the package dequantises it."""

    name: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    expected: Tensor
    metadata: Mapping[str, str] | None = None


def compressed_tensors(weight: Tensor) -> Iterator[FormatCase]:
    """Integers of compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    packed = [{"num_bits": bits, "strategy": "group", "group_size": 32} for bits in (2, 3, 4, 5, 8)]
    for layout, weights in (
        *(("pack-quantized", values) for values in (*packed, {"num_bits": 4, "strategy": "channel"})),
        *(("int-quantized", {"num_bits": 8, "strategy": strategy}) for strategy in ("channel", "tensor")),
    ):
        for symmetric in (True, False):
            arguments = QuantizationArgs(type="int", symmetric=symmetric, **weights)
            scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
            strategy = weights["strategy"]
            size = {"group": 32, "channel": COLUMNS, "tensor": ROWS * COLUMNS}[strategy]
            groups = weight.reshape(1 if strategy == "tensor" else ROWS, -1, size)
            scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), arguments)
            if strategy == "tensor":
                scale, zero = scale.reshape(1), zero.reshape(1)
            state = {"weight": weight, "weight_scale": scale}
            if not symmetric:
                state["weight_zero_point"] = zero.to(torch.int8)
            compressor = BaseCompressor.get_value_from_registry(layout)
            compressed = compressor.compress(state, scheme)
            group = {"weights": arguments.model_dump(mode="json"), "targets": ["Linear"]}
            settings = {"quant_method": "compressed-tensors", "format": layout}
            yield FormatCase(
                f"compressed-tensors-{layout}-{weights['num_bits']}-{strategy}-{symmetric}",
                {f"m.{part}": tensor for part, tensor in compressed.items()},
                {"quantization_config": settings | {"config_groups": {"group_0": group}}},
                compressor.decompress(compressed, scheme)["weight"],
            )


def bitsandbytes(weight: Tensor) -> Iterator[FormatCase]:
    """NF4 and FP4, with and without double quantisation, and LLM.int8()."""
    from bitsandbytes import functional

    # Whole blocks in a row: where blocks cross rows, the CPU kernel of 0.50.2 takes the scales of other blocks, and its
    # weights are further from the original than those of its own GPU kernel and of kleash.
    whole_blocks = weight[:, :64].contiguous()
    for kind in ("nf4", "fp4"):
        for is_nested in (False, True):
            packed, state = functional.quantize_4bit(
                whole_blocks, blocksize=64, compress_statistics=is_nested, quant_type=kind
            )
            tensors = {"m.weight": packed}
            tensors |= {f"m.weight.{part}": x for part, x in state.as_dict(packed=True).items()}
            settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
            yield FormatCase(
                f"bitsandbytes-{kind}-{is_nested}",
                tensors,
                {"quantization_config": settings},
                functional.dequantize_4bit(packed, state),
            )
    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    yield FormatCase(
        "bitsandbytes-int8",
        {"m.weight": codes, "m.SCB": scales},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        functional.int8_vectorwise_dequant(codes, scales),
    )


def mlx(weight: Tensor) -> Iterator[FormatCase]:
    """All modes of MLX."""
    import mlx.core as mx
    import numpy as np

    affine = [("affine", 32, bits) for bits in (2, 3, 4, 5, 6, 8)]
    for mode, group_size, bits in (*affine, ("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8)):
        settings = {"group_size": group_size, "bits": bits, "mode": mode}
        parts = mx.quantize(mx.array(weight.numpy()), **settings)
        names = ("m.weight", "m.scales", "m.biases")
        yield FormatCase(
            f"mlx-{mode}-{bits}",
            {name: torch.from_numpy(np.array(part)) for name, part in zip(names, parts, strict=False)},
            {"quantization": settings},
            torch.from_numpy(np.array(mx.dequantize(*parts, **settings).astype(mx.float32))),
        )


def write_case(folder: Path, case: FormatCase) -> None:
    """Write the files of a case."""
    path = folder / case.name
    path.mkdir(parents=True)
    stored = {name: tensor.detach().contiguous().clone() for name, tensor in case.tensors.items()}
    metadata = None if case.metadata is None else dict(case.metadata)
    save_file(stored, path / "model.safetensors", metadata=metadata)
    save_file({"weight": case.expected.detach().float().contiguous()}, path / "expected.safetensors")
    (path / "config.json").write_text(json.dumps(case.config))


if __name__ == "__main__":
    sys.path[:0] = sys.argv[2].split(os.pathsep)
    matrix = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    for quantise in (compressed_tensors, bitsandbytes, mlx):
        for made in quantise(matrix):
            write_case(Path(sys.argv[1]), made)
