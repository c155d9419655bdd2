"""Tiny random models with vision, audio or video parts, saved as their composite class, as the hub has them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny_architectures import tiny_config
from tiny_models import save_moved

FAMILIES = (
    *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "gemma3", "gemma3n", "gemma4", "llama4", "mistral3", "glm4v"),
    *("internvl", "smolvlm", "phi4_multimodal", "llava"),
)


def save_tower(folder: Path, family: str, *, apart: float = 0.0, **settings: Any) -> Path:
    """A random composite model with its tokenizer in ``folder``; ``apart`` moves its weights by that share of noise."""
    config = tiny_config(family, **settings)
    for part in (config, config.get_text_config(decoder=True)):
        part.initializer_range = 0.3
    torch.manual_seed(0)
    with vision_without_timm():
        network = composite_class(config)._from_config(config)
    return save_moved(network, folder, 0, apart)


def load_composite(folder: Path) -> Any:
    """The whole composite model in ``folder``, in float64 and evaluation mode."""
    from transformers import AutoConfig

    with vision_without_timm():
        config = AutoConfig.from_pretrained(folder)
        network = composite_class(config).from_pretrained(folder, dtype=torch.float64).eval()
    if network._can_set_experts_implementation():
        network.set_experts_implementation("eager")
    if config.model_type == "llama4":  # transformers 5.24 asks its text model's output for it, which lacks it
        network.language_model.register_forward_hook(lambda *io: setattr(io[2], "image_outputs", None))
    return network


def composite_class(config: Any) -> Any:
    """The class that ``AutoModelForMultimodalLM`` gives for a configuration."""
    from transformers import AutoModelForMultimodalLM

    return AutoModelForMultimodalLM._model_mapping[type(config)]


@contextmanager
def vision_without_timm() -> Iterator[None]:
    """Context in which Gemma 3n has a linear layer as vision part, since its own needs timm; text does not reach it."""
    from transformers.models.gemma3n import modeling_gemma3n

    auto_class: Any = modeling_gemma3n.AutoModel

    class AutoModelWithoutTimm:
        @staticmethod
        def from_config(config: Any, **options: Any) -> Any:
            is_vision = config.model_type.endswith("vision")
            return torch.nn.Linear(3, 3) if is_vision else auto_class.from_config(config, **options)

    modeling_gemma3n.AutoModel = AutoModelWithoutTimm
    try:
        yield
    finally:
        modeling_gemma3n.AutoModel = auto_class
