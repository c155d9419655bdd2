"""The GGUF architectures that are read, and which one a file has."""

from collections.abc import Collection, Mapping

from kleash.errors import ModelError
from kleash.models.gguf.architectures import GGUFArchitecture, Settings
from kleash.models.gguf.families.dense import DENSE_FAMILIES
from kleash.models.gguf.families.gemma import GEMMA_FAMILY
from kleash.models.gguf.families.hybrids import HYBRID_FAMILIES
from kleash.models.gguf.families.llama import LLAMA_FAMILY
from kleash.models.gguf.families.qwen import QWEN_FAMILY
from kleash.models.gguf.families.routed import ROUTED_FAMILIES
from kleash.models.gguf.families.shared import SIGMOID

ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    **LLAMA_FAMILY,
    **QWEN_FAMILY,
    **GEMMA_FAMILY,
    **HYBRID_FAMILIES,
    **ROUTED_FAMILIES,
    **DENSE_FAMILIES,
}
"""``general.architecture``, or the kind of it that ``find_architecture`` tells apart → mapping."""
KINDS = ("mixtral", "ministral3", "olmo3", "deepseek3", "glm4v")
"""Entries that are no ``general.architecture``."""
SCORE_BIAS = ".exp_probs_b.bias"


def find_architecture(settings: Settings, tensors: Collection[str]) -> tuple[str, GGUFArchitecture]:
    """The prefix of a file's settings, and the mapping of its architecture.

    Args:
        settings: of the file.
        tensors: names of its tensors.

    Raises:
        ModelError: if it is not supported, with the list of those that are.
    """
    name = settings.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise ModelError("it does not name its general.architecture")
    kind = name
    if name == "llama" and settings.get("llama.expert_count"):
        kind = "mixtral"
    elif name == "mistral3" and settings.get("mistral3.attention.temperature_scale"):
        kind = "ministral3"
    elif name == "olmo2" and settings.get("olmo2.attention.sliding_window"):
        kind = "olmo3"
    elif name == "glm4" and settings.get("glm4.rope.dimension_sections"):
        kind = "glm4v"
    elif name == "deepseek2" and (
        settings.get("deepseek2.expert_gating_func") == SIGMOID
        or any(tensor.endswith(SCORE_BIAS) for tensor in tensors)
    ):
        kind = "deepseek3"
    if kind not in ARCHITECTURES or name in KINDS:
        listed = ", ".join(sorted(set(ARCHITECTURES) - set(KINDS)))
        raise ModelError(
            f"it is of the architecture {name[:40]!r}, and kleash reads GGUF files of {listed}; give the model as a "
            "folder of safetensors"
        )
    return name, ARCHITECTURES[kind]
