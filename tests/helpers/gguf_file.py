"""Writes a small Llama checkpoint with a byte-level BPE as a GGUF file in float32, for llama-cpp-python.

    python tests/helpers/gguf_file.py MODEL_FOLDER FILE.gguf

Needs the packages gguf and safetensors, and neither torch nor transformers.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of llama.cpp's rotary embedding."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder: Path, path: Path) -> None:
    """Write the checkpoint in ``folder`` to ``path``."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    special = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    names = {index: token for token, index in {**tokenizer["model"]["vocab"], **special}.items()}
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names[index] for index in range(config["vocab_size"])])
    writer.add_token_types(
        [
            gguf.TokenType.CONTROL if names[index] in special else gguf.TokenType.NORMAL
            for index in range(config["vocab_size"])
        ]
    )
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.astype(np.float32)
        if ".q_proj." in name or ".k_proj." in name:
            kind = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            values = interleaved(values, config[kind])
        if name.startswith("model.layers."):
            layer, _, part = name.removeprefix("model.layers.").partition(".")
            target = f"blk.{layer}.{LAYER_NAMES[part.removesuffix('.weight')]}.weight"
        else:
            target = {
                "model.embed_tokens.weight": "token_embd.weight",
                "model.norm.weight": "output_norm.weight",
                "lm_head.weight": "output.weight",
            }[name]
        writer.add_tensor(target, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
