"""Writes a small checkpoint with a byte-level BPE as a GGUF file, as llama.cpp's converter does.

    python tests/helpers/gguf_file.py MODEL_FOLDER FILE.gguf

Needs the packages gguf and safetensors, and neither torch nor transformers.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_families import FAMILY_LAYOUTS, add_family_settings
from gguf_layouts import LAYOUTS, add_layout_settings
from safetensors.numpy import load_file

ARCHITECTURES = {
    **{
        name: name.replace("_", "") for name in ("qwen2_moe", "qwen3_moe", "gpt_neox", "glm4_moe", "lfm2_moe")
    },
    **{
        name: name.removesuffix("_text")
        for name in ("gemma3_text", "gemma3n_text", "gemma4_text", "llama4_text")
    },
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "deepseek2"),
    "mixtral": "llama",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "olmo3": "olmo2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "cohere": "command-r",
    "ernie4_5_moe": "ernie4_5-moe",
    "phi": "phi2",
    "glm": "chatglm",
    "granitemoeshared": "granitemoe",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
}
"""transformers' model type → llama.cpp's architecture, where they differ."""
INTERLEAVED = (
    *("llama", "mixtral", "granite", "smollm3", "ministral3", "arcee", "olmo", "granitemoeshared"),
    *("granitemoehybrid", "nemotron_h"),
)
"""Model types whose query and key projections are stored in the order of llama.cpp's rotary embedding."""
WITH_OFFSET = ("gemma", "gemma2", "gemma3_text")
"""Model types whose norms have 1 added."""
GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
NORM_EPSILONS = ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon")
LAYER_NORMS = ("cohere", "cohere2", "nemotron", "starcoder2", "stablelm", "phi", "gpt2", "gpt_neox")
"""Model types with LayerNorms."""
Edit = Callable[[gguf.GGUFWriter], None]


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of llama.cpp's rotary embedding."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    *,
    edit: Edit | None = None,
    edit_tensors: Callable[[dict[str, np.ndarray]], Any] | None = None,
    tokens: Mapping[int, str] | None = None,
    parts: int = 1,
) -> Path:
    """Write the checkpoint in ``folder`` to ``path``; ``kind`` is that of matrices whose rows are whole blocks."""
    config = read_config(folder)
    arch = architecture_of(config)
    writer = gguf.GGUFWriter(str(path), arch)
    add_settings(writer, config)
    add_vocabulary(writer, folder, config["vocab_size"], tokens or {})
    if edit is not None:
        edit(writer)
    tensors = dict(named_tensors(folder, config, arch))
    if edit_tensors is not None:
        edit_tensors(tensors)
    if parts == 1:
        write_file(writer, tensors, kind)
        return path
    names = list(tensors)
    for number in range(parts):
        part = path.with_name(f"{path.stem}-{number + 1:05d}-of-{parts:05d}.gguf")
        part_writer = gguf.GGUFWriter(str(part), arch)
        if number == 0:
            part_writer.kv_data[0].update(writer.kv_data[0])
        part_writer.add_uint16("split.no", number)
        part_writer.add_uint16("split.count", parts)
        part_writer.add_int32("split.tensors.count", len(names))
        write_file(part_writer, {name: tensors[name] for name in names[number::parts]}, kind)
    return path.with_name(f"{path.stem}-00001-of-{parts:05d}.gguf")


def read_config(folder: Path) -> dict[str, Any]:
    """The settings of a checkpoint, under the usual names."""
    config = json.loads((folder / "config.json").read_text())
    return {GPT2_NAMES.get(name, name): value for name, value in config.items()}


def architecture_of(config: Mapping[str, Any]) -> str:
    """llama.cpp's name of an architecture."""
    kind = config["model_type"]
    if kind == "nemotron_h":
        return "nemotron_h_moe" if "moe" in config["layers_block_type"] else kind
    return ARCHITECTURES.get(kind, kind)


def write_file(writer: gguf.GGUFWriter, tensors: Mapping[str, np.ndarray], kind: str) -> None:
    """Write the file of ``writer`` with ``tensors``."""
    quantised = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[quantised]
    for name, tensor in tensors.items():
        values = np.ascontiguousarray(tensor)
        if values.ndim > 1 and values.shape[-1] % block == 0 and kind != "F32":
            writer.add_tensor(name, gguf.quants.quantize(values, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
    write_all(writer)


def write_all(writer: gguf.GGUFWriter) -> None:
    """Write header, settings and tensors, and close the file."""
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def add_settings(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write the settings of the architecture."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config.get("num_hidden_layers", 0))
    writer.add_feed_forward_length(config.get("intermediate_size") or 4 * config["hidden_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    epsilon = next((config[name] for name in NORM_EPSILONS if name in config), None)
    if config["model_type"] in LAYER_NORMS:
        writer.add_layer_norm_eps(epsilon)
    elif epsilon is not None:
        writer.add_layer_norm_rms_eps(epsilon)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.get("rope_parameters") or older_rope_parameters(config)
    local, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if local is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            if "attention_factor" in rope:
                writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    for name, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("num_local_experts", writer.add_expert_count),
        ("num_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
    ):
        if config.get(name) is not None:
            add(config[name])
    if config["model_type"] in ("gemma2", "gemma3_text", "phi3"):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    add_layout_settings(writer, config)
    add_family_settings(writer, config)


def older_rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the rotary embedding as transformers 4 writes them."""
    if "rope_theta" not in config:
        return {}
    rope = {"rope_theta": config["rope_theta"], "rope_type": "default", **(config.get("rope_scaling") or {})}
    if "rope_local_base_freq" not in config:
        return rope
    return {"full_attention": rope, "sliding_attention": {"rope_theta": config["rope_local_base_freq"]}}


def add_vocabulary(writer: gguf.GGUFWriter, folder: Path, rows: int, changed: Mapping[int, str]) -> None:
    """Write the tokens of ``tokenizer.json``, filled up to the rows of the embedding."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    names = {index: token for token, index in {**tokenizer["model"]["vocab"], **special}.items()}
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    types = dict.fromkeys(names, gguf.TokenType.NORMAL)
    types |= dict.fromkeys(special.values(), gguf.TokenType.CONTROL)
    names |= changed
    writer.add_token_list([names.get(index, f"[PAD{index}]") for index in range(rows)])
    writer.add_token_types([types.get(index, gguf.TokenType.UNUSED) for index in range(rows)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)


def written_tensors(folder: Path, config: Mapping[str, Any]) -> Any:
    """The tensors of a checkpoint in float32, in the layout that a file has."""
    layout = (LAYOUTS | FAMILY_LAYOUTS).get(config["model_type"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.astype(np.float32)
        yield from [(name, values)] if layout is None else layout(name, values, config)


def named_tensors(folder: Path, config: Mapping[str, Any], arch: str) -> Any:
    """The tensors of a checkpoint with their names in a GGUF file; experts of a layer are stacked."""
    key = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]  # a KeyError: see ARCHITECTURES
    names = gguf.get_tensor_name_map(key, config.get("num_hidden_layers") or len(config["layers_block_type"]))
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in written_tensors(folder, config):
        if config["model_type"] in INTERLEAVED and re.search(r"\.[qk]_proj\.", name):
            kind = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            values = interleaved(values, config[kind])
        if config["model_type"] in WITH_OFFSET and name.endswith("norm.weight"):
            values = values + 1
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.([\w.]+)\.weight", name)
        projection = re.fullmatch(r"(model\.altup_\w*projections)\.(\d+)\.weight", name)
        if projection is not None:
            experts.setdefault(f"{projection[1]}.weight", {})[int(projection[2])] = values
            continue
        if expert is not None:
            experts.setdefault(f"{expert[1]}.{expert[3]}.weight", {})[int(expert[2])] = values
            continue
        if name.endswith("shared_expert_gate.weight"):
            values = values[0]
        stem, _, suffix = name.rpartition(".")
        whole = names.get_name(name)
        yield whole or (f"{names.get_name(stem)}.{suffix}" if names.get_name(stem) else name), values
    for name, weights in experts.items():
        merged = names.get_name(name.removesuffix(".weight").replace(".experts.self_attn.", ".self_attn."))
        yield f"{merged}.weight", np.stack([weights[number] for number in range(len(weights))])


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
