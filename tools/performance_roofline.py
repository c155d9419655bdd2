"""What the size of a chunk costs on a GPU, by arithmetic: bytes moved and operations against published peaks."""

from dataclasses import dataclass

from performance_frame import markdown_table

ROWS = (128, 256, 512, 1024, 2048, 4096)
"""Tokens in a chunk."""
VOCABULARY, HIDDEN, LOGIT, HALF = 151_936, 4096, 4, 2
"""Words and hidden size of Qwen3-8B; bytes of a float32 logit and of a bfloat16 number."""
OLD_BUDGET = 128 * 2**20
"""The buffer that was the default on every device until there was one for GPUs."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU's published peaks, dense and at boost clock."""

    name: str
    tera_operations: float
    """bfloat16 products summed in float32, 10^12 multiplications and additions a second."""
    gigabytes: float
    """Memory bandwidth, 10^9 bytes a second."""
    source: str


CARDS = (
    Card(name="A100 SXM 80 GB", tera_operations=312, gigabytes=2039, source="NVIDIA A100 datasheet (2021)"),
    Card(name="H100 SXM", tera_operations=989, gigabytes=3350, source="NVIDIA H100 datasheet (2023)"),
    Card(name="H200 SXM", tera_operations=989, gigabytes=4800, source="NVIDIA H200 datasheet (2023)"),
    Card(
        name="RTX 4090, 24 GB",
        tera_operations=165.2,
        gigabytes=1008,
        source="NVIDIA Ada GPU architecture whitepaper (2022), appendix A",
    ),
    Card(
        name="L4, 24 GB",
        tera_operations=121,
        gigabytes=300,
        source="NVIDIA L4 datasheet (2023), without sparsity",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One step of a chunk of ``rows`` tokens."""

    operations: float
    moved: float
    """Bytes read and written."""


def phases(rows: float, *, trained: bool) -> list[Phase]:
    """Value and gradient of a chunk: both logits, two reads by the row kernels, and the gradient's products."""
    weight, logits, product = VOCABULARY * HIDDEN, rows * VOCABULARY, 2.0 * rows * VOCABULARY * HIDDEN
    hidden = rows * HIDDEN * HALF
    logit = Phase(operations=product, moved=weight * HALF + hidden + logits * LOGIT)
    kernels = [
        Phase(operations=0, moved=2 * logits * LOGIT),
        Phase(operations=0, moved=2 * logits * LOGIT + logits * HALF),
    ]
    into_hidden = Phase(operations=product, moved=weight * HALF + logits * HALF + hidden)
    # The sum of the head's gradient is float32, and each chunk reads and writes all of it.
    into_weight = Phase(operations=product, moved=2 * weight * LOGIT + logits * HALF + hidden)
    return [logit, logit, *kernels, into_hidden, *([into_weight] if trained else [])]


def seconds(rows: float, card: Card, *, trained: bool) -> float:
    """Of a token: each step takes as long as the slower of its operations and its bytes."""
    steps = phases(rows, trained=trained)
    peak, bandwidth = card.tera_operations * 1e12, card.gigabytes * 1e9
    return sum(max(step.operations / peak, step.moved / bandwidth) for step in steps) / rows


def of_matmuls(rows: float, card: Card, *, trained: bool) -> float:
    """The same as a multiple of what the operations alone take."""
    operations = sum(step.operations for step in phases(rows, trained=trained)) / rows
    return seconds(rows, card, trained=trained) / (operations / (card.tera_operations * 1e12))


def section() -> list[str]:
    """The lines of the page."""
    old = int(OLD_BUDGET / (2 * VOCABULARY * LOGIT))
    heads = ["tokens in a chunk", "both logits", *(card.name for card in CARDS)]
    lines = [
        "### Chunk size on GPUs, computed and not measured",
        "",
        "Time of `linear_kl_loss` on a GPU as a multiple of its matmuls at the card's peak, computed from the bytes",
        f"and operations of each step, for a vocabulary of {VOCABULARY} and hidden size {HIDDEN} in bfloat16. Every",
        "chunk reads the weights for each product; if the head is trained, it also reads and writes the float32 sum",
        "of the head's gradient. Small chunks therefore take several times as long as the matmuls. **No number here",
        "has been measured.** `tools/performance_roofline.py` computes them: a step takes as long as the slower of",
        "its operations and its memory traffic, and steps do not overlap. Results of `benchmarks/linear_gpu.py` will",
        "replace the table.",
        "",
    ]
    for title, trained in (
        ("The head is trained (four matmuls)", True),
        ("The head is frozen (three matmuls)", False),
    ):
        rows = [
            [
                f"{n}" + (f" (the former default, {OLD_BUDGET >> 20} MiB)" if n == old else ""),
                f"{2 * n * VOCABULARY * LOGIT / 1e9:.2f} GB",
                *(f"{of_matmuls(n, card, trained=trained):.2f}" for card in CARDS),
            ]
            for n in (old, *ROWS)
        ]
        lines += [f"{title}:", "", *markdown_table(heads, rows), ""]
    peaks = ";\n".join(
        f"{c.name} {c.tera_operations:g} TFLOP/s and {c.gigabytes:g} GB/s ({c.source})" for c in CARDS
    )
    return [
        *lines,
        "`LinearOptions(buffer_bytes=None)`, the default, uses chunks of 1024 tokens on a GPU, or fewer if they would",
        "take more than an eighth of its free memory. Larger chunks gain little. Published peaks, bfloat16 without",
        "sparsity:",
        peaks + ".",
        "",
    ]
