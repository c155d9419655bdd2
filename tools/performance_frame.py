"""Building blocks of the sections of docs/performance.md: paragraphs, tables, commands."""

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
    """The note on results that are missing."""
    commands = [f"`python benchmarks/{COMMANDS[name]}`" for name in names]
    if len(commands) > 1:
        return ["Not measured yet:", "", *(f"- {command}" for command in commands), ""]
    return [f"Not measured yet: {command}." for command in commands] + [""] * len(commands)


def paragraph(template: str, /, **values: Any) -> list[str]:
    """The lines of a wrapped paragraph, with an empty line after it."""
    text = template.format(**values) if values else template
    return [*wrap(" ".join(text.split()), 118, break_long_words=False, break_on_hyphens=False), ""]


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table, with an empty line after it."""
    return [*(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)), ""]


def size(figures: Row) -> str:
    """The shape of the inputs, in words."""
    return f"{figures['tokens']} tokens, hidden size {figures['hidden']}, vocabulary {figures['vocabulary']}"


def ratio(row: Row, key: str) -> str:
    """A ratio as text; empty if there is none."""
    return f"{row[key]:.2f}" if key in row else ""
