"""compressed-tensors, AutoFP8, FBGEMM and ModelOpt checkpoints: codes with scales, against formulas in float64."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from packed_checkpoints import FLOATS_4, SEQUENCE, bit_string, read_module, save_packed, write_module
from safetensors.torch import load_file
from tiny_models import save_tiny

from kleash.checkpoints.quantised.packed_modules import scale_groups
from kleash.errors import ModelError
from kleash.models import load_pair, score
from kleash.models.filling import unpack

ROWS, COLUMNS = 80, 96
RNG = np.random.default_rng(7)
Case = tuple[dict[str, torch.Tensor], dict[str, Any], np.ndarray, str]
"""Tensors of a module, settings, the matrix in float64, and its kind in records."""


def settings_of(format_name: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": weights, "targets": ["Linear"], "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": format_name, "config_groups": {"group_0": group}}


def spread(values: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The number of each element's block."""
    return np.repeat(np.repeat(values, rows, axis=0), columns, axis=1)[:ROWS, :COLUMNS]


def packed_integers(bits: int, group: int, *, symmetric: bool, order: bool = False) -> Case:
    """compressed-tensors, ``pack_to_int32``: codes + 2^(bits - 1) along a row, zero points along the outputs."""
    half = 2 ** (bits - 1)
    codes = RNG.integers(-half, half, size=(ROWS, COLUMNS))
    groups = COLUMNS // group
    scales = RNG.uniform(0.01, 0.1, size=(ROWS, groups)).astype(np.float16)
    zeros = RNG.integers(-half, half, size=(ROWS, groups)) * (not symmetric)
    group_of = np.arange(COLUMNS) // group
    tensors = {"weight_packed": bit_string(codes + half, bits), "weight_scale": scales}
    tensors["weight_shape"] = np.array([ROWS, COLUMNS])
    if not symmetric:
        tensors["weight_zero_point"] = bit_string((zeros + half).T, bits).T.copy()
    if order:
        group_of = RNG.permutation(group_of)
        tensors["weight_g_idx"] = group_of.astype(np.int32)
    weight = (codes - zeros[:, group_of]) * scales.astype(np.float64)[:, group_of]
    weights = {"type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric}
    settings = settings_of("pack-quantized", num_bits=bits, **weights)
    blocks = "rows" if groups == 1 else f"groups of {group}"
    return to_torch(tensors), settings, weight, f"int{bits}, {blocks}"


def plain_integers(shape: tuple[int, ...], blocks: tuple[int, int], words: str) -> Case:
    """int-quantized: int8 codes and zero points."""
    codes = RNG.integers(-128, 128, size=(ROWS, COLUMNS))
    scales, zeros = RNG.uniform(0.01, 0.1, size=shape).astype(np.float32), RNG.integers(-9, 9, size=shape)
    weight = codes - spread(np.atleast_2d(zeros), *blocks).astype(np.float64)
    weight = weight * spread(np.atleast_2d(scales), *blocks).astype(np.float64)
    tensors = {"weight": codes.astype(np.int8), "weight_scale": scales}
    tensors["weight_zero_point"] = zeros.astype(np.int8)
    settings = settings_of("int-quantized", num_bits=8, type="int", group_size=blocks[1])
    return to_torch(tensors), settings, weight, f"int8, {words}"


def floats_of_8_bits(shape: tuple[int, ...], blocks: tuple[int, int], words: str, **settings: Any) -> Case:
    """float-quantized: E4M3 codes; the oracle reads them by torch and multiplies in float64."""
    codes = torch.from_numpy(RNG.normal(size=(ROWS, COLUMNS))).to(torch.float8_e4m3fn)
    scales = RNG.uniform(0.01, 0.1, size=shape).astype(np.float32)
    weight = codes.double().numpy() * spread(np.atleast_2d(scales), *blocks).astype(np.float64)
    tensors = {"weight": codes, "weight_scale": torch.from_numpy(np.asarray(scales))}
    settings = settings or settings_of("float-quantized", num_bits=8, type="float")
    return tensors, settings, weight, f"fp8, {words}"


def floats_of_4_bits(group: int, kind: str) -> Case:
    """NVFP4 (E4M3 scales and one factor) and MXFP4 (powers of two): two E2M1 codes in a byte, the first lower."""
    codes = RNG.integers(0, 16, size=(ROWS, COLUMNS))
    packed = torch.from_numpy((codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8))
    shape = (ROWS, COLUMNS // group)
    if kind == "mxfp4":
        exponents = RNG.integers(100, 140, size=shape)
        scales, stored = 2.0 ** (exponents - 127), torch.from_numpy(exponents.astype(np.uint8))
    else:
        stored = torch.from_numpy(RNG.uniform(1, 400, size=shape)).to(torch.float8_e4m3fn)
        scales = stored.double().numpy()
    tensors = {"weight_packed": packed, "weight_scale": stored}
    settings = settings_of(f"{kind}-pack-quantized", num_bits=4, type="float", group_size=group)
    if kind == "nvfp4":
        tensors["weight_global_scale"] = torch.tensor([512.0])
        scales = scales / 512
    elif kind == "modelopt":
        tensors = {"weight": packed, "weight_scale": stored, "weight_scale_2": torch.tensor(1 / 256)}
        settings, scales = {"quant_method": "modelopt", "quant_algo": "NVFP4"}, scales / 256
    return tensors, settings, FLOATS_4[codes] * spread(scales, 1, group), f"fp4, groups of {group}"


def with_settings(case: Case, **changes: Any) -> Case:
    """The same tensors with other settings."""
    tensors, settings, weight, kind = case
    return tensors, settings | changes, weight, kind


def column_factors() -> Case:
    """ModelOpt's AWQ: inputs are multiplied by factors before the matrix, and so are its columns."""
    tensors, settings, weight, kind = floats_of_4_bits(16, "modelopt")
    factors = RNG.uniform(0.5, 2, size=COLUMNS).astype(np.float32)
    tensors["pre_quant_scale"] = torch.from_numpy(factors)
    return tensors, settings | {"quant_algo": "NVFP4_AWQ"}, weight * factors.astype(np.float64), kind


def to_torch(tensors: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in tensors.items()}


def exponents() -> Case:
    """mxfp8-quantized: E4M3 codes with scales that are powers of two."""
    tensors, _, _, _ = floats_of_8_bits((ROWS, 3), (1, 32), "")
    stored = RNG.integers(110, 130, size=(ROWS, 3))
    weight = tensors["weight"].double().numpy() * spread(2.0 ** (stored - 127), 1, 32)
    tensors["weight_scale"] = torch.from_numpy(stored.astype(np.uint8))
    settings = settings_of("mxfp8-quantized", num_bits=8, type="float", group_size=32)
    return tensors, settings, weight, "fp8, groups of 32"


BLOCKS = settings_of("float-quantized", num_bits=8, type="float", block_structure=[32, 24])
MIXED = {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"m": {"quant_algo": "NVFP4"}, "n": {"quant_algo": "FP8"}},
}
OTHER = MIXED | {"quant_method": "modelopt", "quantized_layers": {"a": {"quant_algo": "W4A16_AWQ"}}}
NO_BLOCKS = {"config_groups": {"a": {"weights": {"num_bits": 4, "block_structure": [0]}}}}
CASES: dict[str, Callable[[], Case]] = {
    **{f"int{bits}": partial(packed_integers, bits, 32, symmetric=bits % 2 == 0) for bits in range(1, 9)},
    "int4-zeros": lambda: packed_integers(4, 48, symmetric=False),
    "int4-rows": lambda: packed_integers(4, 96, symmetric=False),
    "int4-order": lambda: packed_integers(4, 32, symmetric=False, order=True),
    "int8-matrix": lambda: plain_integers((1,), (ROWS, COLUMNS), "one scale"),
    "int8-rows": lambda: plain_integers((ROWS, 1), (1, COLUMNS), "rows"),
    "int8-groups": lambda: plain_integers((ROWS, 6), (1, 16), "groups of 16"),
    "fp8-matrix": lambda: floats_of_8_bits((), (ROWS, COLUMNS), "one scale"),
    "fp8-rows": lambda: floats_of_8_bits((ROWS, 1), (1, COLUMNS), "rows"),
    "fp8-blocks": lambda: floats_of_8_bits((3, 4), (32, 24), "blocks of 32 x 24", **BLOCKS),
    "autofp8": lambda: floats_of_8_bits((1,), (ROWS, COLUMNS), "one scale", quant_method="fp8"),
    "fbgemm": lambda: floats_of_8_bits((ROWS, 1), (1, COLUMNS), "rows", quant_method="fbgemm_fp8"),
    "modelopt-fp8": lambda: floats_of_8_bits((), (ROWS, COLUMNS), "one scale", quant_method="modelopt"),
    "mxfp8": exponents,
    "nvfp4": lambda: floats_of_4_bits(16, "nvfp4"),
    "mxfp4": lambda: floats_of_4_bits(32, "mxfp4"),
    "modelopt-nvfp4": lambda: floats_of_4_bits(16, "modelopt"),
    "modelopt-awq": column_factors,
    "modelopt-mixed": lambda: with_settings(floats_of_4_bits(16, "modelopt"), **MIXED),
}


@pytest.mark.parametrize("case", CASES)
def test_a_matrix_is_unpacked_to_the_product_of_codes_and_scales(tmp_path, case):
    tensors, settings, expected, kind = CASES[case]()
    module = read_module(write_module(tmp_path, tensors, quantization_config=settings))
    kind_of_method = kind if settings["quant_method"] == "fp8" else f"{settings['quant_method']} {kind}"
    assert (module.shape, module.kind) == ((ROWS, COLUMNS), kind_of_method)
    in_float64, in_float32 = (unpack(module, dtype) for dtype in (torch.float64, torch.float32))
    np.testing.assert_allclose(in_float64.numpy(), expected, rtol=1e-15, atol=0)
    np.testing.assert_allclose(in_float32.numpy(), expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    ("case", "part", "change", "reason"),
    [
        ("int4", "weight_scale", None, "has no tensor weight_scale"),
        ("int4", "weight_shape", None, "has no tensor weight_shape"),
        ("int4", "weight_shape", lambda t: t - 1, r"has a weight_shape of \[79, 95\] and 80"),
        ("int4", "weight_packed", lambda t: t[:, :5], "packs 96 columns into 5 words,"),
        ("int4", "weight_scale", lambda t: t[:, :2].repeat(1, 2), r"has scales of shape \[80, 4\] for 80 x"),
        ("int4", "weight_scale", lambda t: t[:7], r"has scales of shape \[7, 3\] for 80 x 96 weights"),
        ("int4-zeros", "weight_zero_point", lambda t: t[:3], r"has weight_zero_point of shape \[3, 2\]"),
        ("int4-order", "weight_g_idx", lambda t: t + 1, "has a weight_g_idx from 1 to 3, and groups"),
        ("int4-order", "weight_g_idx", lambda t: t[:9], r"has weight_g_idx of shape \[9\]"),
        ("fp8-rows", "weight", lambda t: t.to(torch.bfloat16), r"has weight as BF16 \[80, 96\], and not as"),
        ("fp8-blocks", "weight_scale", lambda t: t[:2], r"has scales of shape \[2, 4\]"),
        ("nvfp4", "weight_global_scale", lambda t: t.repeat(2), r"has weight_global_scale of shape \[2\],"),
    ],
)
def test_damaged_tensors_are_refused_with_their_module(tmp_path, case, part, change, reason):
    tensors, settings, _, _ = CASES[case]()
    tensor = tensors.pop(part)
    if change is not None:
        tensors[part] = change(tensor).contiguous()
    folder = write_module(tmp_path, tensors, quantization_config=settings)
    with pytest.raises(ModelError, match=f"cannot be unpacked: its module m {reason}"):
        unpack(read_module(folder), torch.float32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "marlin-24"}, "its format is 'marlin-24'"),
        ({"format": ["dense"]}, r"""its format is "\['dense'\]\""""),
        ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, r"""its quant_algo is "\['FP8'\]\""""),
        ({"quant_method": "gptq", "checkpoint_format": ["gptq"]}, r"its checkpoint_format is"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "its format is 'sparse-24-bitmask'"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "its transform_config rotates activations"),
        ({"quant_method": "gptq", "rotation": "hadamard"}, "its rotation rotates activations"),
        ({"config_groups": [1]}, "its config_groups is a list"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": None}}}}, "its num_bits is None"),
        (NO_BLOCKS, r"its block_structure is \[0\]"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "its quant_algo is 'W4A8_AWQ'"),
        (OTHER, "its quant_algo is 'W4A16_AWQ'"),
        ({"quant_method": "fp8", "weight_scale_semantics": "inverse"}, "its weight_scale_semantics"),
    ],
)
def test_settings_that_are_not_read_are_refused(tmp_path, change, reason):
    tensors, settings, _, _ = CASES["int4"]()
    folder = write_module(tmp_path, tensors, quantization_config=settings | change)
    with pytest.raises(ModelError, match=f"is quantised .* in a layout that is not read: {reason}"):
        read_module(folder)


def test_settings_without_packed_tensors_are_refused(tmp_path):
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 2}
    folder = write_module(tmp_path, {"weight": torch.ones(2, 2)}, quantization_config=settings)
    with pytest.raises(ModelError, match="and none of its tensors is packed; remove"):
        read_module(folder)


def test_a_model_of_8_bits_is_measured_without_rounding_its_activations(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16}
    source = save_tiny(tmp_path / "source", **sizes)

    def pack(weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        scales = np.abs(weight).max(1, keepdims=True).astype(np.float32) / 127
        codes = np.round(weight / scales).astype(np.int8)
        tensors = {"weight": codes, "weight_scale": scales, "input_scale": np.ones(1, np.float32)}
        return tensors, codes * scales.astype(np.float64)

    settings = settings_of("int-quantized", num_bits=8, type="int")
    settings["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    dense = tmp_path / "dense"
    folder = save_packed(source, tmp_path / "packed", pack, settings, dense=dense)
    pair = load_pair(str(folder), str(dense), dtype="float64")
    assert np.all(score(pair, [SEQUENCE])["kl_policy_reference"] == 0)
    assert score(load_pair(str(folder), str(source)), [SEQUENCE])["kl_policy_reference"].min() > 1e-9
    (note,) = [note for note in pair.notes if "compressed-tensors" in note]
    assert "the format also quantises activations in serving, which is not done here" in note
    assert not any("not used by its architecture" in note for note in pair.notes)
    record = pair.policy.record().weights
    assert record.modules["model.layers.0.mlp.up_proj"] == "compressed-tensors int8, rows"
    assert record.bytes == sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    assert re.match(r"the policy .* is quantised \(compressed-tensors\), and its 7 packed matrices", note)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("stored", "exponent_bits", "bias"), [(torch.float8_e4m3fn, 4, 7), (torch.float8_e5m2, 5, 15)]
)
def test_every_float_of_8_bits_is_decoded_by_its_formula(stored, exponent_bits, bias, dtype):
    # (-1)^s 2^(e - bias) (1 + m), or (-1)^s 2^(1 - bias) m for e = 0, where m is a fraction of one.
    fraction_bits = 7 - exponent_bits
    codes = np.arange(256)
    exponents = codes >> fraction_bits & 2**exponent_bits - 1
    fractions = (codes & 2**fraction_bits - 1) / 2**fraction_bits
    expected = np.where(
        exponents == 0, fractions * 2.0 ** (1 - bias), (1 + fractions) * 2.0 ** (exponents - bias)
    )
    expected *= np.where(codes >= 128, -1, 1)
    highest = exponents == 2**exponent_bits - 1
    is_nan = highest & (fractions == 7 / 8 if exponent_bits == 4 else fractions > 0)
    is_infinite = highest & (fractions == 0) & (exponent_bits == 5)
    expected[is_infinite] = np.where(codes >= 128, -np.inf, np.inf)[is_infinite]
    tensor = torch.from_numpy(codes.astype(np.uint8))
    for chosen in (~is_nan, np.ones(256, dtype=bool)):  # without NaN, and with it
        codes = tensor[torch.from_numpy(chosen)].view(stored)[None]
        one, group = torch.ones(1, 1, dtype=dtype), torch.zeros(codes.shape[1], dtype=torch.long)
        decoded = scale_groups(codes, None, one, group)[0].numpy()
        assert decoded.dtype == expected.astype(np.float64 if dtype == torch.float64 else np.float32).dtype
        np.testing.assert_array_equal(np.isnan(decoded), is_nan[chosen])
        finite = ~is_nan[chosen]
        np.testing.assert_array_equal(decoded[finite], expected[chosen][finite])
        np.testing.assert_array_equal(np.signbit(decoded[finite]), np.signbit(expected[chosen][finite]))
