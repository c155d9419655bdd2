"""What the sections of docs/performance.md are put together from."""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from performance_bars import Figures

COMMANDS = {
    "linear_peers_main": "linear_peers.py",
    "linear_training": "linear_training.py",
    "linear_speed": "linear_speed.py",
    "linear_peaks_main": "linear_peaks.py --part main",
    "linear_peaks_tokens": "linear_peaks.py --part tokens",
    "linear_peaks_vocabulary": "linear_peaks.py --part vocabulary",
    "linear_memory": "linear_memory.py",
    "linear_accuracy": "linear_accuracy.py",
    "linear_step": "linear_step.py",
    "linear_skipping": "linear_skipping.py",
    "linear_peers_main_bfloat16": "linear_peers.py --dtype bfloat16 --rounds 3",
    "linear_peers_h4096": "linear_peers.py --shape h4096",
    "linear_peers_v152k": "linear_peers.py --shape v152k",
    "linear_peers_v128k": "linear_peers.py --shape v128k",
    "linear_peers_v262k": "linear_peers.py --shape v262k",
    "linear_peers_n1k": "linear_peers.py --shape n1k",
    "linear_peers_n4k": "linear_peers.py --shape n4k",
    "linear_peers_n4k_v128k": "linear_peers.py --shape n4k_v128k",
    "linear_peers_n4k_v152k": "linear_peers.py --shape n4k_v152k",
    "linear_peers_n4k_v262k": "linear_peers.py --shape n4k_v262k",
    "linear_peers_n8k": "linear_peers.py --shape n8k",
    "linear_gpu": "linear_gpu.py",
}
SHAPES = [name for name in COMMANDS if name.startswith("linear_peers_") and "main" not in name]
Results = Mapping[str, Figures]
Row = Mapping[str, Any]


def absent(*names: str) -> list[str]:
    """What is said of results that are not there."""
    commands = [f"`python benchmarks/{COMMANDS[name]}`" for name in names]
    if len(commands) > 1:
        return ["Not measured yet:", "", *(f"- {command}" for command in commands), ""]
    return [f"Not measured yet: {command}." for command in commands] + [""] * len(commands)


def said(words: str, /, **values: Any) -> list[str]:
    """A paragraph, folded, and the empty line behind it."""
    text = words.format(**values) if values else words
    return [*wrap(" ".join(text.split()), 118, break_long_words=False, break_on_hyphens=False), ""]


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table and the empty line behind it."""
    return [*(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)), ""]


def size(found: Row) -> str:
    """The shape of the inputs."""
    return f"{found['tokens']} tokens, hidden size {found['hidden']}, vocabulary {found['vocabulary']}"


def ratio(row: Row, key: str) -> str:
    """A ratio, or nothing."""
    return f"{row[key]:.2f}" if key in row else ""
