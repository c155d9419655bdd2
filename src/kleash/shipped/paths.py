"""Where the pair lies. How it was made is in ``data/README.md`` beside it."""

from pathlib import Path
from types import MappingProxyType

from kleash.registry import look_up

SHIPPED_NAMES = ("shipped:policy", "shipped:reference", "shipped:prompts", "shipped:text")
"""What comes with the package, by the names that jobs and the command line know."""

PREFIX = "shipped:"
DATA = Path(__file__).parent / "data"
FOLDERS = MappingProxyType({PREFIX + name: DATA / name for name in ("policy", "reference")})


def shipped_folder(name: str) -> Path:
    """The folder of a shipped model, in Hugging Face format, with its tokenizer.

    The reference is a Llama of two million parameters trained on Jane Austen's novels; the policy is the
    reference after PPO on a leash, rewarded for speaking of the heroine.

    Args:
        name: "policy" or "reference", with or without "shipped:" in front.

    Raises:
        UnknownNameError: if no shipped model is called that.
    """
    return look_up(FOLDERS, PREFIX + name.removeprefix(PREFIX), "shipped model")


def shipped_prompts() -> Path:
    """JSONL with ``prompt``: openings of passages that neither shipped model was trained on."""
    return DATA / "prompts.jsonl"


def shipped_text() -> Path:
    """JSONL with ``text``: documents from chapters that neither shipped model was trained on."""
    return DATA / "text.jsonl"
