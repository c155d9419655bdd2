"""Random models of a few thousand parameters, saved as folders, for tests that need a real architecture."""

import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from kleash.auditing.targets.packages import quiet

DOCUMENTS = [
    "The sea was calm and the boat went out before the sun had come up.",
    "She counted the birds on the wire, and then she counted them again, to be sure. Nobody knew why she did.",
    "A long road leads out of the town; nobody remembers where it was meant to end. " * 2,
    "It is said that the clock has never been right.",
]
SENTENCES = (
    "The sea was calm and the boat went out before the sun had come up over the hills.",
    "She counted the birds on the wire, and then she counted them again, to be sure.",
    "A long road leads out of the town; nobody remembers where it was meant to end.",
    "When the rain stopped they opened the windows, and the house smelled of wet grass.",
    "It is said that the old clock has never been right, and never been wrong for long.",
    "Two men carried the ladder to the orchard while the children ran ahead to the trees.",
)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SHAPE: dict[str, Any] = {"vocab_size": 320, "max_position_embeddings": 128, "initializer_range": 0.3}
ATTENTION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
WITHOUT_HEAD_DIM = {name: size for name, size in ATTENTION.items() if name != "head_dim"}
SPECIAL: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def small(kind: Any, sizes: dict[str, Any], **settings: Any) -> Any:
    """A function that returns a configuration of a kind with these sizes and settings, and with those it is given."""
    return lambda **more: kind(**{**SHAPE, **sizes, **SPECIAL, **settings, **more})


CONFIGS: dict[str, Any] = {
    "llama": small(LlamaConfig, ATTENTION),
    "qwen3": small(Qwen3Config, ATTENTION, tie_word_embeddings=True),
    "gpt2": small(GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "gemma2": small(
        Gemma2Config, ATTENTION, sliding_window=8, query_pre_attn_scalar=8, final_logit_softcapping=3.0
    ),
    "cohere": small(CohereConfig, WITHOUT_HEAD_DIM, logit_scale=0.25),
    "cohere2": small(
        Cohere2Config, ATTENTION, logit_scale=0.25, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "granite": small(GraniteConfig, WITHOUT_HEAD_DIM, logits_scaling=4.0),
}  # fmt: skip
ARCHITECTURES = tuple(CONFIGS)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Of few words; as those of Llama 2 and Mistral, it decodes " was" alone as "was"."""
    words = {"▁The": 0, "▁sea": 1, "▁was": 2, "?": 3, "\n": 4, "was": 5}
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@cache
def tiny_tokenizer(vocabulary: int = 300, bos: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE of ``vocabulary`` tokens, <s> </s> <pad> first, with a chat template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_tiny(
    folder: Path, architecture: str = "llama", *, seed: int = 0, apart: float = 0.0, **config: Any
) -> Path:
    """A random model with its tokenizer in ``folder``; ``apart`` moves its weights by that share of noise."""
    torch.manual_seed(seed)
    return save_moved(AutoModelForCausalLM.from_config(CONFIGS[architecture](**config)), folder, seed, apart)


def save_moved(network: Any, folder: Path, seed: int, apart: float) -> Path:
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(apart * torch.randn_like(weight) * (weight.std() if weight.numel() > 1 else 1.0))
    network.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_pair(
    folder: Path, architecture: str = "llama", *, apart: float = 0.2, **config: Any
) -> tuple[Path, Path]:
    """Folders of a policy and of the reference it has moved away from: (policy, reference)."""
    reference = save_tiny(folder / f"{architecture}-reference", architecture, **config)
    policy = save_tiny(folder / f"{architecture}-policy", architecture, apart=apart, **config)
    return policy, reference


def tiny_adapter(
    folder: Path, base: Path, *, seed: int = 0, size: float = 0.3, base_name: str | None = None, **more: Any
) -> Path:
    """An adapter (a LoRA, or of ``kind``) over the model in ``base``, whose weights are not zero, in ``folder``."""
    import peft

    kind = more.pop("kind", "Lora")
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_pretrained(base)
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    settings |= {"lora_alpha": 8} if kind == "Lora" else {}
    with quiet():  # peft still reads attributes that transformers has renamed
        adapted = peft.get_peft_model(network, getattr(peft, f"{kind}Config")(**{**settings, **more}))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if weight.requires_grad:
                weight.add_(size * torch.randn_like(weight) * (0.3 if "lora" in name else 0.1))
    adapted.peft_config["default"].base_model_name_or_path = base_name or str(base)
    with quiet():
        adapted.save_pretrained(folder)
    return folder


def double_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """The model's own logits for one sequence alone, in float64: [tokens, rows]."""
    with torch.no_grad():
        return _in_float64(folder)(torch.tensor([token_ids])).logits[0]


@lru_cache(maxsize=4)
def _in_float64(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def edit_json(path: Path, **changes: object) -> None:
    """Changes or adds keys of a file that holds an object."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
