"""Packed weights of the formats' own packages, unpacked as the packages dequantise them; skipped without them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kleash.models.quantised import unpacking
from kleash.models.quantised.packed_formats import find_packed_modules
from kleash.models.quantised.packed_modules import TensorReader

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, COLUMNS = 160, 96


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def unpacked(
    folder: Path, tensors: dict[str, torch.Tensor], settings: Any, metadata: Any = None
) -> torch.Tensor:
    """The matrix of the module "m" that the tensors are of."""
    stored = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata=metadata)
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    packed = find_packed_modules(folder, "the policy")
    assert packed is not None
    with TensorReader(packed.headers) as reader:
        return unpacking.unpack(packed.modules[0], reader, torch.float32)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("format_name", "weights"),
    [
        *(
            ("pack-quantized", {"num_bits": bits, "strategy": "group", "group_size": 32})
            for bits in (2, 3, 4, 5, 8)
        ),
        ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    ],
)
def test_compressed_tensors(
    tmp_path: Path, weight: torch.Tensor, format_name: str, weights: dict[str, Any], symmetric: bool
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(type="int", symmetric=symmetric, **weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    size = {"group": 32, "channel": COLUMNS, "tensor": ROWS * COLUMNS}[weights["strategy"]]
    groups = weight.reshape(1 if weights["strategy"] == "tensor" else ROWS, -1, size)
    scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), arguments)
    if weights["strategy"] == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state = {"weight": weight, "weight_scale": scale}
    if not symmetric:
        state["weight_zero_point"] = zero.to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(format_name)
    compressed = compressor.compress(state, scheme)
    group = {"weights": arguments.model_dump(mode="json"), "targets": ["Linear"]}
    settings = {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
    }
    result = unpacked(tmp_path, {f"m.{part}": tensor for part, tensor in compressed.items()}, settings)
    assert torch.equal(result, compressor.decompress(compressed, scheme)["weight"])


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_bitsandbytes_of_4_bits(tmp_path: Path, weight: torch.Tensor, kind: str, is_nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    # Whole blocks in a row: where blocks cross rows, the CPU kernel of 0.50.2 takes the scales of other blocks, and its
    # weights are further from the original than those of its own GPU kernel and of kleash.
    weight = weight[:, :64].contiguous()
    packed, state = functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=is_nested, quant_type=kind
    )
    tensors = {"m.weight": packed}
    tensors |= {f"m.weight.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    result = unpacked(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert torch.equal(result, functional.dequantize_4bit(packed, state))


def test_bitsandbytes_of_8_bits(tmp_path: Path, weight: torch.Tensor) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    result = unpacked(tmp_path, {"m.weight": codes, "m.SCB": scales}, {"quant_method": "bitsandbytes"})
    expected = functional.int8_vectorwise_dequant(codes, scales)
    torch.testing.assert_close(result, expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao(tmp_path: Path, weight: torch.Tensor, name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data.copy_(weight)
    options = {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(32)} if "Intx" in name else {}
    quantization.quantize_(layer, getattr(quantization, name)(**options))
    tensors, metadata = support.flatten_tensor_state_dict({"m.weight": layer.weight})
    result = unpacked(tmp_path, tensors, {"quant_method": "torchao"}, metadata)
    assert torch.equal(result, layer.weight.dequantize())


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_hqq(tmp_path: Path, weight: torch.Tensor, bits: int, axis: int) -> None:
    quantize = pytest.importorskip("hqq.core.quantize")
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data.copy_(weight)
    settings = quantize.BaseQuantizeConfig(nbits=bits, group_size=32, axis=axis)
    packed = quantize.HQQLinear(layer, settings, compute_dtype=torch.float32, device="cpu")
    tensors = {f"m.{part}": tensor for part, tensor in packed.state_dict().items()}
    assert torch.equal(unpacked(tmp_path, tensors, {"quant_method": "hqq"}), packed.dequantize())


def test_quanto(tmp_path: Path, weight: torch.Tensor) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    network = torch.nn.Sequential()
    network.add_module("m", torch.nn.Linear(COLUMNS, ROWS, bias=False))
    network.m.weight.data.copy_(weight)
    quanto.quantize(network, weights=quanto.qint8)
    quanto.freeze(network)
    result = unpacked(tmp_path, network.state_dict(), {"quant_method": "quanto"})
    assert torch.equal(result, network.m.weight.dequantize())
