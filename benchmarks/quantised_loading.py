"""Time and memory of loading quantised checkpoints, compared with decoding their weights and with plain safetensors.

    python benchmarks/quantised_loading.py --rounds 5
    python benchmarks/quantised_loading.py --rounds 5 --dtype float32
    python benchmarks/quantised_loading.py --formats gptq Q8_0 --rounds 1 --folder /tmp/trial   # a trial

Random weights of one layer of Llama 8B's shape, and an embedding and a head of 8 192 tokens (310 million weights), are
written in each format. The ways are interleaved in one process after a warm-up, with all files in the page cache:

    load      kleash loads the network, in the dtype of ``--dtype``
    decode    the decoders alone: every tensor of the file in that dtype, in a dictionary; for bf16, every tensor is
              read by safetensors and converted
    package   for GGUF, ``dequantize`` of the package gguf on each mapped tensor, converted to that dtype

The results are medians, in wall and in processor time, and medians of load divided by the others within rounds. The
peak memory is that of a separate process which loads the network once, less the resident memory before; pages of mapped
safetensors count. Writes quantised_loading_DTYPE.json.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from harness import RESULTS, peak_of, ratio, write_result
from safetensors.torch import load_file, save_file

from kleash.models.checkpoints.gguf_files import open_gguf
from kleash.models.checkpoints.resolution import find_checkpoint
from kleash.models.gguf.architecture_table import find_architecture
from kleash.models.gguf.names import ParameterNames
from kleash.models.gguf.network import read_attributes
from kleash.models.gguf.tensor_decoding import read_parameters
from kleash.models.network_loading import load_networks
from kleash.models.quantised.packed_formats import find_packed_modules
from kleash.models.quantised.unpacking import unpack

HIDDEN, MLP, HEADS, VOCABULARY, GROUP = 4096, 14336, 32, 8192, 128
MATRICES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    **{f"mlp.{name}_proj": (MLP, HIDDEN) for name in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, MLP),
}
GGUF_NAMES = {
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
SETTINGS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "group_size": GROUP, "strategy": "group"},
            }
        },
    },
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
}
"""Format → quantization_config; "int4" is that of compressed-tensors."""
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
"""GGUF type → where its blocks hold float16 numbers."""


def random_words(*shape: int) -> torch.Tensor:
    """Random bits in int32."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def pack(kind: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """The tensors of a random module by the last parts of their names."""
    groups = columns // GROUP
    scales = torch.rand(groups, rows).add(0.5).mul(HIDDEN**-0.5 / 4).half()
    zeros = random_words(groups, rows // 8)
    if kind == "gptq":
        order = torch.arange(columns, dtype=torch.int32) // GROUP
        return {
            "qweight": random_words(columns // 8, rows),
            "qzeros": zeros,
            "scales": scales,
            "g_idx": order,
        }
    if kind == "awq":
        return {"qweight": random_words(columns, rows // 8), "qzeros": zeros, "scales": scales}
    if kind == "int4":
        shape = torch.tensor([rows, columns])
        return {
            "weight_packed": random_words(rows, columns // 8),
            "weight_scale": scales.T.bfloat16().contiguous(),
            "weight_shape": shape,
        }
    if kind == "nf4":
        state = {"quant_type": "nf4", "blocksize": 64, "shape": [rows, columns], "dtype": "bfloat16"}
        return {
            "weight": torch.randint(0, 256, (rows * columns // 2, 1), dtype=torch.uint8),
            "weight.absmax": torch.rand(rows * columns // 64) * HIDDEN**-0.5,
            "weight.quant_map": torch.linspace(-1, 1, 16),
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
    weight = torch.randn(rows, columns).mul(HIDDEN**-0.5)
    if kind == "fp8":
        return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.7)}
    return {"weight": weight.bfloat16()}


def write_safetensors(folder: Path, kind: str, layers: int) -> str:
    """A random checkpoint with its matrices in one format; returns its name for kleash."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    tensors: dict[str, torch.Tensor] = {"model.norm.weight": torch.ones(HIDDEN).bfloat16()}
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = torch.randn(VOCABULARY, HIDDEN).mul(HIDDEN**-0.5).bfloat16()
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{stem}.{name}.weight"] = torch.ones(HIDDEN).bfloat16()
        for name, shape in MATRICES.items():
            tensors |= {f"{stem}.{name}.{part}": tensor for part, tensor in pack(kind, *shape).items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = SETTINGS[kind]
    written = config.to_dict() | ({} if settings is None else {"quantization_config": settings})
    (folder / "config.json").write_text(json.dumps(written))
    return str(folder)


def random_blocks(kind: str, rows: int, columns: int) -> np.ndarray:
    """Random blocks of a GGUF type with small finite scales: [rows, bytes]."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(rows + columns)
    blocks = generator.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    for place in HALVES[kind]:
        scales = generator.uniform(1e-5, 3e-5, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write_gguf(path: Path, kind: str, layers: int) -> str:
    """A random Llama with its matrices in one GGUF type; returns its name for kleash."""
    path.parent.mkdir(parents=True)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    quantised = gguf.GGMLQuantizationType[kind]
    matrices = {"token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN)}
    norms = ["output_norm"]
    for layer in range(layers):
        matrices |= {f"blk.{layer}.{GGUF_NAMES[name]}": shape for name, shape in MATRICES.items()}
        norms += [f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"]
    for name, shape in matrices.items():
        writer.add_tensor(f"{name}.weight", random_blocks(kind, *shape), raw_dtype=quantised)
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def weight_file(model: str) -> Path:
    """The file with the weights of a checkpoint."""
    return Path(model) if model.endswith(".gguf") else Path(model) / "model.safetensors"


def load(model: str, dtype: torch.dtype) -> Any:
    """The network as kleash loads it."""
    loaded, _ = load_networks(
        {"policy": find_checkpoint(model)},
        dtype=dtype,
        device=torch.device("cpu"),
        device_map=None,
        trust_remote_code=False,
    )
    return loaded["policy"].network


def decode(model: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of a file, by kleash's decoders alone."""
    if model.endswith(".gguf"):
        files = open_gguf((Path(model),))
        name, architecture = find_architecture(files.settings, [tensor.name for tensor in files.tensors])
        attributes, _ = read_attributes(files, name, architecture)
        with torch.device("meta"):
            config = transformers.AutoConfig.for_model(architecture.model_type, **attributes)
            network = transformers.AutoModelForCausalLM.from_config(config)
        names = ParameterNames.of(name, architecture.names, network)
        return read_parameters(files.tensors, architecture, names, attributes, dtype)[0]
    packed = find_packed_modules(find_checkpoint(model))
    assert packed is not None
    used = {part for module in packed.modules for part in module.parts}
    stored = packed.checkpoint.safetensors
    tensors = {name: stored.read(name).to(dtype) for name in stored if name not in used}
    return tensors | {module.parameter: unpack(module, dtype) for module in packed.modules}


def read_plain(model: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of a plain file, read and converted."""
    return {name: tensor.to(dtype, copy=True) for name, tensor in load_file(weight_file(model)).items()}


def decode_by_package(model: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of a GGUF file, decoded by the package gguf."""
    return {
        tensor.name: torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=dtype)
        for tensor in gguf.GGUFReader(model).tensors
    }


def ways_of(model: str, kind: str, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """The ways of one format."""
    ways: dict[str, Callable[[], object]] = {"load": lambda: load(model, dtype)}
    if kind == "bf16":
        return ways | {"decode": lambda: read_plain(model, dtype)}
    ways["decode"] = lambda: decode(model, dtype)
    if kind in HALVES:
        ways["package"] = lambda: decode_by_package(model, dtype)
    return ways


def peak_memory(model: str, dtype: torch.dtype) -> float:
    """Peak memory of a process that loads the network, in MB."""
    command = [sys.executable, __file__, "--peak", model, "--dtype", str(dtype).removeprefix("torch.")]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(completed.stdout.split()[-1])


def time_ways(
    ways: dict[str, dict[str, Callable[[], object]]], rounds: int
) -> tuple[dict[tuple[str, str, str], list[float]], list[float]]:
    """Seconds of each format and way in each round by both clocks, after a warm-up, and the load averages."""
    times: dict[tuple[str, str, str], list[float]] = {}
    loads: list[float] = []
    for number in range(rounds + 1):
        loads.append(round(os.getloadavg()[0], 1))
        for kind, ways_of_kind in ways.items():
            for name, way in ways_of_kind.items():
                gc.collect()
                wall, processor = perf_counter(), process_time()
                way()
                if number:
                    times.setdefault((kind, name, "processor"), []).append(process_time() - processor)
                    times.setdefault((kind, name, "wall"), []).append(perf_counter() - wall)
    return times, loads[1:]


def figures_of(
    kind: str, model: str, times: dict[tuple[str, str, str], list[float]], args: argparse.Namespace
) -> dict[str, Any]:
    """The figures of one format."""
    names = [name for name in ("load", "decode", "package") if (kind, name, "wall") in times]
    figures: dict[str, Any] = {"file_mb": round(weight_file(model).stat().st_size / 1e6, 1)}
    for clock in ("wall", "processor"):
        figures[f"{clock}_seconds"] = {name: round(median(times[kind, name, clock]), 3) for name in names}
        figures[f"{clock}_load_over"] = {
            name: ratio(times[kind, "load", clock], times[kind, name, clock]) for name in names[1:]
        }
    figures["peak_mb"] = peak_memory(model, args.torch_dtype)
    return figures


def main() -> None:
    """Write the checkpoints, run the rounds and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = (*SETTINGS, *HALVES)
    parser.add_argument("--formats", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--models", type=Path, help="folder in which the checkpoints are kept")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.torch_dtype = getattr(torch, args.dtype)
    if args.peak is not None:
        load_imports(args.torch_dtype)
        print(peak_of(lambda: load(args.peak, args.torch_dtype)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = args.models or Path(temporary)
        models = {kind: find_or_write(root, kind, args.layers) for kind in args.formats}
        ways = {kind: ways_of(model, kind, args.torch_dtype) for kind, model in models.items()}
        times, loads = time_ways(ways, args.rounds)
        figures = {kind: figures_of(kind, model, times, args) for kind, model in models.items()}
    for kind, values in figures.items():
        print(kind, json.dumps(values))
    result = {"dtype": args.dtype, "rounds": args.rounds, "load_averages": loads, "formats": figures}
    packages = ("transformers", "safetensors", "gguf", "numpy")
    print(write_result(f"quantised_loading_{args.dtype}", result, args.folder, packages))


def find_or_write(root: Path, kind: str, layers: int) -> str:
    """The checkpoint in a format, which is written unless it is there."""
    torch.manual_seed(0)
    path = root / f"{kind}-{layers}"
    if kind in HALVES:
        path = path / "model.gguf"
        return str(path) if path.exists() else write_gguf(path, kind, layers)
    return str(path) if path.exists() else write_safetensors(path, kind, layers)


def load_imports(dtype: torch.dtype) -> None:
    """Load small checkpoints, so that all modules and buffers of the libraries are there."""
    with tempfile.TemporaryDirectory() as temporary:
        for kind in ("bf16", "gptq", "Q8_0"):
            load(find_or_write(Path(temporary), kind, 1), dtype)


if __name__ == "__main__":
    main()
