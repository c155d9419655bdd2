"""Memory and time of scoring a million tokens with two models, by arithmetic: the table of "Several GPUs".

python tools/memory_and_hours.py
"""

SIZES = (1, 7, 32, 70)
"""Billions of weights of each model."""
MACHINES = {"1 × 24 GB": (1, 24, 70), "1 × 80 GB": (1, 80, 312), "8 × 80 GB": (8, 80, 312)}
"""Cards, gigabytes of each, and bfloat16 TFLOP/s of each."""
SHARE_OF_PEAK = 0.4
OVERHEAD = 2
"""Gigabytes of a card for logits and activations."""


def cell(billions: int, cards: int, gigabytes: int, teraflops: int) -> str:
    """Gigabytes of a card and minutes for a million tokens, or a dash."""
    needed = 2 * 2 * billions / cards + OVERHEAD
    minutes = 2 * 2 * billions * 1e9 * 1e6 / (cards * teraflops * 1e12 * SHARE_OF_PEAK) / 60
    return f"{needed:.0f} GB, {minutes:.2g} min" if needed <= gigabytes else "–"


def table() -> str:
    """Rows of pairs, columns of machines."""
    lines = [f"| pair | {' | '.join(MACHINES)} |", "|" + "---|" * (len(MACHINES) + 1)]
    lines += [
        f"| 2 × {size}B | {' | '.join(cell(size, *card) for card in MACHINES.values())} |" for size in SIZES
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
