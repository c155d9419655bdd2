"""GGUF files as models: weights and settings against the checkpoints that they were made from."""

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from damaged_files import outcomes_of_damage
from gguf_file import interleaved, write_all, write_gguf
from gguf_models import MODELS
from packed_checkpoints import IDS, SEQUENCE
from tiny_models import ATTENTION, SHAPE, SPECIAL, double_logits, save_tiny, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from kleash.checkpoints.gguf.tensor_decoding import ParameterNames, decode, read_parameters
from kleash.checkpoints.gguf.vocabulary import adds_begin_token, begin_token
from kleash.checkpoints.gguf_files import read_gguf_header
from kleash.checkpoints.resolution import find_checkpoint
from kleash.errors import ModelError, RunFolderError
from kleash.measuring import cache_reference, measure
from kleash.measuring.dry_run import dry_run
from kleash.models import Pair, load_pair, read_text, score
from kleash.models.gguf_network import ARCHITECTURES
from kleash.models.tokenizers import load_tokenizers
from kleash.records import CacheJob, MeasureJob

KINDS = (
    *("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q4_1", "Q3_K", "Q2_K"),
    *("IQ4_XS", "IQ4_NL", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
)


def tiny_gguf(folder: Path, name: str = "llama", **options: Any) -> tuple[Path, Path]:
    """A tiny model of ``MODELS`` whose norms and biases differ, as a folder, and as a GGUF file in it."""
    model_type, settings = MODELS[name]
    if name.startswith(("deepseek2", "gemma4", "granitehybrid", "nemotron_h")):
        pytest.importorskip("transformers", "5.15", "older ones have other settings")
    config = AutoConfig.for_model(model_type, **{**SHAPE, **ATTENTION, **SPECIAL, **settings})
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config)
    for values in network.state_dict().values():
        if values.is_floating_point() and (values == values.flatten()[0]).all():
            values.add_(torch.randint_like(values, -16, 17) / 64)  # exact if 1 is added
    network.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder, write_gguf(folder, folder / "model.gguf", **options)


def logits(pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of policy and reference for all kinds of tokens, beyond the sliding windows."""
    ids = torch.arange(3, 63).reshape(1, -1) * 5 % 300
    with torch.no_grad():
        return pair.policy.network(ids).logits, pair.reference.network(ids).logits


def with_equal_decays(pair: Pair) -> Pair:
    """The pair after its decays were seen to be equal but for the last bit, which files of -exp(A_log) lose.

    Tiny networks magnify that bit by 1e5 at some positions.
    """
    stored = pair.policy.network.state_dict()
    for parameter, values in pair.reference.network.state_dict().items():
        if parameter.endswith(".A_log"):
            torch.testing.assert_close(stored[parameter], values, rtol=0, atol=3e-7)
            stored[parameter].copy_(values)
    return pair


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_gguf(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", MODELS)
def test_a_float32_file_gives_the_logits_of_the_checkpoint_it_was_made_from(tmp_path, name):
    folder, path = tiny_gguf(tmp_path, name)
    pair = with_equal_decays(load_pair(str(path), str(folder)))
    stored = pair.policy.network.state_dict()
    for parameter, values in pair.reference.network.state_dict().items():
        if name != "falcon-h1":  # whose file has the multipliers in the weights
            torch.testing.assert_close(stored[parameter], values, rtol=0, atol=0)
    torch.testing.assert_close(*logits(pair), rtol=0, atol=2e-4 if name == "falcon-h1" else 0)
    assert pair.policy.eos_token_ids == (1,)
    assert not [note for note in pair.notes if "not mapped" in note]


def test_all_architectures_are_tested():
    aliases = {
        "mistral3",
        "qwen2vl",
        "qwen3vl",
        "qwen3vlmoe",
        "glm4v",
    }  # of llama, qwen2, qwen3, qwen3moe, glm4
    assert set(ARCHITECTURES) - aliases <= set(MODELS)


def fuse_projections(tensors: dict[str, np.ndarray]) -> None:
    """Queries, keys and values in one tensor, as by llama.cpp's option --fuse-qkv."""
    for name in [name for name in tensors if ".attn_q." in name]:
        parts = [tensors.pop(name.replace(".attn_q.", f".attn_{part}.")) for part in "qkv"]
        tensors[name.replace(".attn_q.", ".attn_qkv.")] = np.concatenate(parts)


def fuse_experts(tensors: dict[str, np.ndarray]) -> None:
    """Gate and up projections of experts in one tensor, as by llama.cpp's option --fuse-gate-up-exps."""
    for name in [name for name in tensors if ".ffn_gate_exps." in name]:
        parts = [tensors.pop(name.replace("_gate_", f"_{part}_")) for part in ("gate", "up")]
        tensors[name.replace("_gate_", "_gate_up_")] = np.concatenate(parts, axis=1)


@pytest.mark.parametrize("name", ["biases", "qwen2", "chatglm", "nemotron_h", "qwen35", "qwen3moe"])
def test_tensors_that_are_joined_or_apart_are_read(tmp_path, name):
    change = fuse_experts if name == "qwen3moe" else fuse_projections
    folder, path = tiny_gguf(tmp_path, name, edit_tensors=change)
    assert torch.equal(*logits(with_equal_decays(load_pair(str(path), str(folder)))))


def settings_of(values: dict[str, Any]) -> Any:
    """The edit of a file that gives it these settings; None for none."""

    def edit(writer: Any) -> None:
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add = kinds | {str: writer.add_string}
        for key, value in values.items():
            writer.kv_data[0].pop(key, None)
            if value is not None:
                add.get(type(value), writer.add_array)(key, value)

    return edit


def rename(writer: Any, old: str, new: str) -> None:
    """Change the architecture of a file."""
    settings = writer.kv_data[0]
    renamed = {key.replace(f"{old}.", f"{new}.", 1): value for key, value in settings.items()}
    settings.clear()
    settings.update(renamed)
    settings.pop("general.architecture")
    writer.add_string("general.architecture", new)


@pytest.mark.parametrize(("name", "arch"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl")])
def test_language_models_of_qwen_vl_are_those_of_qwen(tmp_path, name, arch):
    def edit(writer: Any) -> None:
        rename(writer, name, arch)
        writer.add_array(f"{arch}.rope.dimension_sections", [1, 1, 2, 0])
        if name != "qwen2":
            writer.add_uint32(f"{arch}.n_deepstack_layers", 3)

    folder, path = tiny_gguf(tmp_path, name, edit=edit)
    pair = load_pair(str(path), str(folder))
    assert torch.equal(*logits(pair))
    assert not [note for note in pair.notes if "not mapped" in note]


def test_heads_of_glm_4v_have_the_order_of_glm_4(tmp_path):
    def edit(writer: Any) -> None:
        writer.add_array("glm4.rope.dimension_sections", [1, 1, 0, 0])

    def permute(tensors: dict[str, np.ndarray]) -> None:  # conversion/glm.py, normal_to_neox
        for name in [name for name in tensors if ".attn_q." in name or ".attn_k." in name]:
            heads = tensors[name].reshape(-1, 8, *tensors[name].shape[1:])
            order = [0, 2, 1, 3, 4, 5, 6, 7]
            tensors[name] = heads[:, order].reshape(tensors[name].shape)

    folder, path = tiny_gguf(tmp_path, "glm4", edit=edit, edit_tensors=permute)
    assert torch.equal(*logits(load_pair(str(path), str(folder))))


UNGROUPED = ("group_count", "group_used_count", "weights_scale")
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
OLDER_SCALE = dict.fromkeys(("llama.rope.scaling.type", "llama.rope.scaling.factor"))
OLDER_SCALE |= {"llama.rope.scale_linear": 3.0}
RMS = "attention.layer_norm_rms_epsilon"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("granite", {"granite.attention.head_count_kv": [2, 2], "granite.ssm.conv_kernel": 4}),
        ("gemma2 with its caps", dict.fromkeys(f"gemma2.{name}" for name in CAPS)),
        ("granitehybrid as Bamba", {"granitehybrid.attention.scale": None}),
        ("deepseek3 without groups", dict.fromkeys(f"deepseek2.expert_{name}" for name in UNGROUPED)),
        ("linear", {"llama.rope.scaling.type": None}),
        ("linear", OLDER_SCALE),
        ("yarn", {"llama.rope.scaling.original_context_length": None, "llama.context_length": 32}),
        ("nemotron_h", {f"nemotron_h.{RMS}": None, "nemotron_h.attention.layer_norm_epsilon": 1e-5}),
    ],
)
def test_settings_that_a_file_lacks_or_lists_are_those_of_llama_cpp(tmp_path, name, change):
    folder, path = tiny_gguf(tmp_path, name, edit=settings_of(change))
    pair = load_pair(str(path), str(folder))
    torch.testing.assert_close(*logits(pair), rtol=0, atol=2e-4 if "rope" not in str(change) else 0)
    assert not [note for note in pair.notes if "not mapped" in note]


@pytest.mark.parametrize(
    ("name", "settings", "note"),
    [
        ("gemma2", {"gemma2.attention.sliding_window_pattern": 3}, "not mapped .*: attention.sliding_window"),
        ("llama", {"llama.attention.new_scale": 2.0}, "1 settings that are not mapped"),
        ("qwen3", {"qwen3.pooling_type": 3}, "is a model of embeddings .its pooling_type is 3"),
    ],
)
def test_settings_that_nothing_reads_and_pooling_are_noted(tmp_path, name, settings, note):
    folder, path = tiny_gguf(tmp_path, name, edit=settings_of(settings))
    notes = "\n".join(load_pair(str(path), str(folder)).notes)
    assert re.search(note, notes) and f"the tensors of the policy {path} are decoded before" in notes


@pytest.mark.parametrize("experts", [0, 3])
def test_the_factors_of_nvfp4_multiply_its_weights(tmp_path, experts):
    rng = np.random.default_rng(experts)
    rows, columns, count = 4, 128, max(1, experts)
    codes = rng.integers(0, 16, size=(count, rows, columns // 16, 16))
    scales = rng.integers(24, 100, size=(count, rows, columns // 16)).astype(np.uint8)  # E4M3 without a sign
    packed = codes[..., :8] | codes[..., 8:] << 4
    both = [scales.reshape(count, rows, -1, 4), packed.reshape(count, rows, -1, 32)]
    blocks = np.concatenate(both, axis=-1).astype(np.uint8)
    factors = rng.uniform(0.5, 2, size=count).astype(np.float32)
    part = "ffn_up_exps" if experts else "attn_output"
    writer = gguf.GGUFWriter(str(tmp_path / "nvfp4.gguf"), "qwen3moe")
    shape = (count, rows, -1) if experts else (rows, -1)
    kind = gguf.GGMLQuantizationType.NVFP4
    writer.add_tensor(f"blk.0.{part}.weight", blocks.reshape(shape), raw_dtype=kind)
    writer.add_tensor(f"blk.0.{part}.scale", factors)
    writer.add_tensor(f"blk.0.{part}.input_scale", np.ones(1, np.float32))  # of activations
    write_all(writer)
    tensors = read_gguf_header(tmp_path / "nvfp4.gguf").tensors
    names = ParameterNames(
        exceptions=ARCHITECTURES["qwen3moe"].names,
        converted={"blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight"},
    )
    parameters, unused = read_parameters(tensors, ARCHITECTURES["qwen3moe"], names, {}, torch.float64)
    assert unused == ()
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.where(codes < 8, 1, -1) * table[codes % 8]
    scale = torch.from_numpy(scales).view(torch.float8_e4m3fn).double().numpy()
    expected = (values * scale[..., None]).reshape(count, rows, columns)
    expected = expected * factors.astype(np.float64)[:, None, None]
    stored = np.stack([parameter.numpy() for parameter in parameters.values()])
    np.testing.assert_allclose(stored, expected, rtol=1e-7, atol=0)


def test_the_factors_of_llama_3_divide_the_rotary_frequencies(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 32}
    save_tiny(tmp_path, rope_scaling=scaling)

    def add_factors(tensors: dict[str, np.ndarray]) -> None:
        # llama.cpp, conversion/llama.py, generate_extra_tensors
        frequencies = 1.0 / 10_000.0 ** (np.arange(0, 8, 2) / 8)
        wavelengths = 2 * np.pi / frequencies
        smooth = (32 / wavelengths - 1) / (4 - 1)
        factors = np.where(wavelengths < 8, 1, np.where(wavelengths > 32, 8, 1 / ((1 - smooth) / 8 + smooth)))
        tensors["rope_freqs.weight"] = factors.astype(np.float32)

    path = write_gguf(tmp_path, tmp_path / "model.gguf", edit_tensors=add_factors)
    policy, reference = logits(load_pair(str(path), str(tmp_path)))
    torch.testing.assert_close(policy, reference, rtol=0, atol=2e-5)
    plain = logits(load_pair(str(write_gguf(tmp_path, tmp_path / "plain.gguf")), str(tmp_path)))[0]
    assert (plain - reference).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_decoded_as_by_transformers_own_decoder(tmp_path, kind):
    decoder = pytest.importorskip("transformers.integrations.gguf.dequant")
    number = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(int(number))
    blocks = rng.integers(0, 256, size=(6, 512 // block * block_bytes), dtype=np.uint8)
    path = tmp_path / "blocks.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=number)
    write_all(writer)
    (tensor,) = read_gguf_header(path).tensors
    assert (tensor.kind, tensor.shape) == (kind, (6, 512))
    decoded = decode(tensor)
    expected = decoder.dequantize(torch.from_numpy(blocks).reshape(-1), int(number)).reshape(6, 512)
    finite = expected.isfinite() & decoded.isfinite()
    assert finite.float().mean() > 0.9
    torch.testing.assert_close(decoded[finite], expected[finite], rtol=1e-6, atol=0)


def test_a_quantised_file_is_measured_like_its_decoded_weights(tmp_path):
    folder, path = tiny_gguf(tmp_path, kind="Q8_0")
    pair = load_pair(str(path), str(folder))
    original = pair.reference.network.state_dict()
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, weight in pair.policy.network.state_dict().items():
        expected = original[name].numpy()
        if expected.ndim == 2 and expected.shape[1] % 32 == 0:
            rows = np.arange(len(expected))[:, None]
            if "q_proj" in name or "k_proj" in name:
                rows = interleaved(rows, len(expected) // 8)
            stored = gguf.quants.quantize(expected[rows[:, 0]], q8)
            expected = np.empty_like(expected)
            expected[rows[:, 0]] = gguf.quants.dequantize(stored, q8)
        assert np.array_equal(weight.numpy(), expected), name
    pair.policy.network.save_pretrained(tmp_path / "decoded")
    logp, logq = (double_logits(place, IDS).log_softmax(-1)[:-1] for place in (tmp_path / "decoded", folder))
    kl = (logp.exp() * (logp - logq)).sum(-1).numpy()
    assert np.abs(score(pair, [SEQUENCE])["kl_policy_reference"] - kl).max() < 1e-6
    assert kl.max() > 1e-5


def test_the_record_has_bytes_bits_and_the_type_of_each_module(tmp_path):
    folder, path = tiny_gguf(tmp_path, kind="Q8_0")
    pair = load_pair(str(path), str(folder))
    weights = pair.policy.record().weights
    header = read_gguf_header(path)
    stored = gguf.GGUFReader(path).tensors
    assert weights.bytes == sum(int(tensor.n_bytes) for tensor in stored)
    assert weights.bits_per_weight == 8 * weights.bytes / sum(int(tensor.n_elements) for tensor in stored)
    assert weights.modules["blk.0-1.attn_q"] == "Q8_0"
    assert weights.modules["blk.0-1.ffn_down"] == "F32"  # its 48 columns are no whole blocks
    assert len(header.tensors) == len(stored)
    plain = pair.reference.record().weights
    assert (plain.bits_per_weight, plain.modules["model.layers.0-1.self_attn.q_proj"]) == (32.0, "F32")


def test_two_files_of_one_folder_are_two_models(tmp_path):
    folder, path = tiny_gguf(tmp_path)
    coarse = write_gguf(folder, folder / "coarse.gguf", "Q4_0")
    pair = load_pair(str(path), str(coarse), tokenizer=str(folder))
    assert pair.policy.network is not pair.reference.network
    assert pair.policy.fingerprint != pair.reference.fingerprint
    policy, reference = logits(pair)
    assert (policy - reference).abs().max() > 0.01
    same = load_pair(str(coarse), str(coarse), tokenizer=str(folder))
    assert same.policy.network is same.reference.network


def test_parts_of_a_split_file_are_one_model(tmp_path):
    folder, path = tiny_gguf(tmp_path, parts=3)
    assert path.name == "model-00001-of-00003.gguf"
    for name in (path, path.with_name("model-00002-of-00003.gguf")):
        assert torch.equal(*logits(load_pair(str(name), str(folder))))
    second = path.with_name("model-00002-of-00003.gguf").rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(ModelError, match=r"there is no file .*model-00002-of-00003.gguf"):
        load_pair(str(path), str(folder))
    with pytest.raises(ModelError, match="says that it is file 2 of 3, and its name says 1 of 1"):
        load_pair(str(second), str(folder))
    path.with_name("model-00003-of-00003.gguf").rename(tmp_path / "model-00002-of-00003.gguf")
    second.rename(tmp_path / "model-00003-of-00003.gguf")
    with pytest.raises(ModelError, match="says that it is file 3 of 3, and its name says"):
        load_pair(str(path), str(folder))


def with_tensor(name: str, *shape: int) -> Any:
    return lambda tensors: tensors.update({name: np.ones(shape, np.float32)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("blk.1.ffn_up.weight"), "lacks 1 of its weights, which would be random"),
        (with_tensor("blk.0.attn_sinks.weight", 4), "1 tensors that the architecture 'llama' does"),
        (with_tensor("blk.0.ffn_up.weight", 40, 32), "has 1 weights of other shapes"),
        (lambda tensors: tensors.update({"rope_freqs.weight": np.zeros(4, np.float32)}), "rope_freqs.weight"),
        (lambda tensors: tensors.pop("token_embd.weight"), "it has no matrix token_embd.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(llama, tmp_path, change, reason):
    folder, path = llama[0], write_gguf(llama[0], tmp_path / "model.gguf", edit_tensors=change)
    with pytest.raises(ModelError, match=reason):
        load_pair(str(path), str(folder))


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("llama", {"general.architecture": "mpt"}, "is of the architecture 'mpt', and kleash reads"),
        ("llama", {"llama.block_count": 2**31}, "claims 2147483648 layers and has 21 tensors"),
        ("llama", {"llama.feed_forward_length": 2**31}, "describes in its settings a network of 4"),
        ("llama", {"llama.attention.head_count": [4, 2]}, r"head_count is \[4, 2\], and should be one"),
        ("llama", {"llama.attention.value_length": 4}, "its keys have 8 numbers a head and its values 4"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "its positions are scaled by 'longrope'"),
        ("llama", {"llama.attention.causal": False}, "its attention is not causal"),
        ("deepseek2", {"deepseek2.attention.temperature_scale": 0.1}, "queries are scaled by their"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "positions are switched off"),
        ("granitehybrid", {"granitehybrid.rope.dimension_count": 4}, "it rotates 4 of 8 numbers of a head"),
        ("gpt-oss", {"gpt-oss.rope.freq_base_swa": 5.0}, "its layers with a sliding window have"),
        ("qwen35", {"qwen35.attention.recurrent_layers": [True]}, "its attention.recurrent_layers is no"),
        ("qwen35", {"qwen35.nextn_predict_layers": 4}, "nextn_predict_layers is 4, and it has 4 layers"),
        ("qwen35", {"qwen35.ssm.inner_size": "many"}, r"values that qwen35 cannot have \(.*convert"),
        ("gemma4", {"gemma4.attention.head_count_kv": [2, 2, 1, 2, 2, 2]}, "its attention.head_count_kv"),
        ("gemma4", {"gemma4.feed_forward_length": [48, 48, 48, 48, 96, 48]}, r"its feed_forward_length is"),
        ("gemma4", {"gemma4.attention.sliding_window_pattern": [True]}, "its attention.sliding_window_p"),
        ("lfm2", {"lfm2.attention.head_count_kv": [2, 1, 0]}, "its attention.head_count_kv is no list of 0"),
        ("olmo", {"olmo.attention.layer_norm_epsilon": 1e-6}, "its attention.layer_norm_epsilon is 1e-06"),
        ("llama4", {"llama4.attention.sliding_window": 0}, r"its attention.sliding_window is 0"),
        ("ministral3", {"mistral3.rope.scaling.type": "none"}, "it has attention.temperature_scale without"),
    ],
)
def test_settings_that_an_architecture_cannot_have_are_refused(tmp_path, name, settings, reason):
    folder, path = tiny_gguf(tmp_path, name, edit=settings_of(settings))
    with pytest.raises(ModelError, match=reason):
        load_pair(str(path), str(folder))
    with pytest.raises(ModelError, match=reason):
        dry_run(MeasureJob(policy=str(path), reference=str(folder), text="shipped:text"))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    def edit(writer: Any) -> None:
        writer.kv_data[0].pop("qwen35.block_count")
        writer.add_block_count(5)
        writer.add_uint32("qwen35.nextn_predict_layers", 1)

    def add_tensors(tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.4.attn_norm.weight"] = tensors["blk.4.nextn.enorm.weight"] = np.ones(32, np.float32)

    folder, path = tiny_gguf(tmp_path, "qwen35", edit=edit, edit_tensors=add_tensors)
    pair = with_equal_decays(load_pair(str(path), str(folder)))
    torch.testing.assert_close(*logits(pair), rtol=0, atol=0)


def test_a_gguf_needs_a_tokenizer(llama, tmp_path):
    folder, path = llama
    alone = tmp_path / "model.gguf"
    alone.write_bytes(path.read_bytes())
    with pytest.raises(ModelError, match="no other model has a tokenizer for it; give"):
        load_pair(str(alone), str(alone))
    assert load_pair(str(alone), str(alone), tokenizer=str(folder)).is_one_model
    assert load_pair(str(path), str(path)).is_one_model  # with the tokenizer beside it
    with pytest.raises(ModelError, match="holds GGUF files; name one of them, such"):
        load_pair(str(tmp_path), str(folder))
    with pytest.raises(ModelError, match="is a file, which has no revision 'main'"):
        load_pair(str(path), str(folder), revision_policy="main")
    with pytest.raises(ModelError, match=r"owner/name is not a folder here"):
        load_pair("owner/name:model.gguf", str(folder))


@pytest.mark.parametrize(
    ("tokens", "edit", "reason"),
    [
        ({40: "wrong"}, None, "320 tokens, of which 1 differ from"),
        ({1: "</end>"}, None, r"token 1 is '</end>' in the file and '</s>'"),
        ({}, lambda w: w.kv_data[0]["tokenizer.ggml.merges"].value.reverse(), r"merges .* merge 0 is"),
        ({}, lambda w: w.kv_data[0]["tokenizer.ggml.merges"].value.pop(), r"has 40 merges and .* 41: merge"),
        ({}, lambda w: w.kv_data[0]["tokenizer.ggml.tokens"].value.pop(), r"319 tokens and 320 values of"),
        ({}, lambda w: w.kv_data[0]["tokenizer.ggml.token_type"].value.__setitem__(0, 1), "is normal in the"),
        ({}, lambda w: w.kv_data[0].pop("tokenizer.ggml.tokens"), r"has no tokenizer.ggml.tokens"),
    ],
)
def test_another_vocabulary_is_refused_with_the_first_difference(llama, tmp_path, tokens, edit, reason):
    folder, path = llama[0], write_gguf(llama[0], tmp_path / "model.gguf", tokens=tokens, edit=edit)
    with pytest.raises(ModelError, match=reason):
        load_pair(str(path), str(folder))


def test_added_tokens_may_be_written_as_they_are_decoded(tmp_path):
    folder, _ = tiny_gguf(tmp_path)
    tokenizer = tiny_tokenizer.__wrapped__()
    tokenizer.add_tokens(["\u2581\u2581"])
    tokenizer.save_pretrained(folder)
    path = write_gguf(folder, folder / "model.gguf", tokens={300: "  "}, edit=_user_defined(300))
    assert load_pair(str(path), str(folder)).policy.vocab_size == 320
    path = write_gguf(folder, folder / "model.gguf", tokens={300: "   "}, edit=_user_defined(300))
    with pytest.raises(ModelError, match="token 300 is '   ' in the file"):
        load_pair(str(path), str(folder))


def _user_defined(token_id: int) -> Any:
    return lambda writer: writer.kv_data[0]["tokenizer.ggml.token_type"].value.__setitem__(token_id, 4)


def test_begin_and_end_tokens_and_chat_templates_that_differ_are_named(tmp_path):
    def edit(writer: Any) -> None:
        writer.kv_data[0].pop("tokenizer.ggml.add_bos_token")
        writer.add_add_bos_token(False)
        writer.add_uint32("tokenizer.ggml.eot_token_id", 5)
        writer.add_chat_template("{{ messages }}")

    folder, path = tiny_gguf(tmp_path, edit=edit)
    pair = load_pair(str(path), str(folder))
    assert pair.policy.eos_token_ids == (1, 5)
    assert any("puts the begin token before a text" in note and "puts none" in note for note in pair.notes)
    owner = "the reference's tokenizer, which renders messages"
    assert f"the policy {path} has another chat template than {owner}" in pair.notes


def test_damaged_files_are_refused_in_a_sentence(llama, tmp_path):
    folder, path = llama
    header = min(tensor.offset for tensor in read_gguf_header(path).tensors)

    def read(mutant: Path) -> Any:
        checkpoints = {"policy": find_checkpoint(str(mutant)), "reference": find_checkpoint(str(folder))}
        return list(load_tokenizers(checkpoints, False)[1])

    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(path.read_bytes())
    outcomes, failures = outcomes_of_damage(damaged, header, read, 120)
    assert failures == [] and outcomes["refused"] > 60


@pytest.mark.parametrize(
    ("layout", "offset", "value", "reason"),
    [
        ("<4s", 0, b"GGML", "it does not begin with GGUF"),
        ("<I", 4, 1, "does not begin with GGUF and version 2 or 3"),
        ("<I", 4, 3 << 24, "version 2 or 3, in little-endian order"),
        ("<Q", 8, 2**40, "it ends within"),
        ("<Q", 24, 2**62, "it ends within 'a key'"),
    ],
)
def test_hostile_numbers_at_the_beginning_are_named(llama, tmp_path, layout, offset, value, reason):
    data = bytearray(llama[1].read_bytes())
    struct.pack_into(layout, data, offset, value)
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=reason):
        read_gguf_header(path)


def test_a_truncated_file_names_both_sizes(llama, tmp_path):
    data = llama[1].read_bytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(data[:-64])
    with pytest.raises(ModelError, match=rf"it should have {len(data)} bytes and has {len(data) - 64}"):
        read_gguf_header(path)
    path.write_bytes(data + bytes(64))
    with pytest.raises(ModelError, match=rf"it should have {len(data)} bytes and has {len(data) + 64}"):
        read_gguf_header(path)


def test_measurements_resume_and_use_a_cache(llama, tmp_path):
    folder, path = llama
    coarse = write_gguf(folder, tmp_path / "coarse.gguf", "Q4_0")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The {animal} is here." for animal in ("cat", "dog", "cow", "fox", "hen")))

    settings = {"policy": str(coarse), "reference": str(path), "text": str(text), "tokenizer": str(folder)}
    settings |= {"out": str(tmp_path / "run"), "reference_cache": str(tmp_path / "cache")}
    out = settings["reference_cache"]
    cache_reference(CacheJob(reference=str(path), text=str(text), tokenizer=str(folder), out=out))
    cached = measure(MeasureJob(**settings))
    pair = load_pair(str(coarse), str(path), tokenizer=str(folder))
    columns = score(pair, list(read_text(str(text), pair)))
    kl = cached.per_token["kl_policy_reference"]
    assert kl.value == pytest.approx(float(columns["kl_policy_reference"].mean()), abs=1e-6)
    assert kl.value > 1e-4
    write_gguf(folder, coarse, "Q8_0")
    with pytest.raises(RunFolderError, match="the fingerprint of the policy"):
        measure(MeasureJob(**settings, resume=True))


@pytest.mark.parametrize(
    ("model", "pre", "stored", "begin", "expected"),
    [
        ("llama", None, None, None, 1),
        ("llama", None, None, 2, 2),
        ("llama", None, False, 2, None),
        ("gpt2", "llama-bpe", None, 3, 3),
        ("gpt2", "qwen2", None, 3, None),
        ("gpt2", "qwen2", True, 3, 3),
        ("gpt2", "llama-bpe", False, 3, None),
        ("gpt2", "llama-bpe", None, None, 11),
        ("gemma4", "gemma4", False, 3, 3),
        ("gpt2", "gemma4", False, 3, 3),
        ("t5", None, None, 3, None),
        ("llama", None, True, 2**32 - 1, None),
    ],
)
def test_the_begin_token_is_that_of_llama_cpp(model, pre, stored, begin, expected):
    """By src/llama-vocab.cpp of llama.cpp, version of August 2026."""
    values = {"model": model, "pre": pre, "add_bos_token": stored, "bos_token_id": begin, "tokens": [""] * 12}
    settings = {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
    assert (begin_token(settings) if adds_begin_token(settings) else None) == expected
