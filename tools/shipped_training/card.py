"""The card of the pair: ``card.json`` for programs, ``README.md`` for people."""

import json
import platform
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shipped_training import austen

TEMPLATE = Path(__file__).with_name("card.md")


def write(folder: Path, prompts: list[str], texts: list[str], **details: Any) -> None:
    """Write both files; ``details`` are seed, training of both models, and figures."""
    packages = ("torch", "transformers", "tokenizers", "safetensors")
    card: dict[str, Any] = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "source": {"package": austen.PACKAGE, "database_sha256": austen.DATABASE_SHA256},
        **details,
    }
    losses = "\n".join(
        f"| {name} | {of['nats_per_token']:.4f} | {of['perplexity']:.2f} | {of['bits_per_character']:.3f} |"
        for name, of in card["figures"]["held_out"].items()
    )
    words = [len(prompt.split()) for prompt in prompts]
    text = TEMPLATE.read_text(encoding="utf-8").format(
        **card | {"versions": ", ".join(f"{name} {number}" for name, number in card["versions"].items())},
        prompts=len(prompts),
        words=f"{min(words)} to {max(words)}",
        texts=len(texts),
        held_out_at=austen.HELD_OUT_AT + 1,
        held_out_next=austen.HELD_OUT_AT + 1 + austen.HELD_OUT_OF,
        database=Path(austen.DATABASE).name,
        losses=losses,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
