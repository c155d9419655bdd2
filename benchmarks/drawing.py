"""What a draw costs beside softmax and multinomial, and how many draws a change of the logits turns.

    python benchmarks/drawing.py speed
    python benchmarks/drawing.py turned

"speed": 32 rows of logits at each vocabulary, from logits to tokens and their log-probabilities, interleaved with
``torch.multinomial(logits.softmax(-1), 1)``; the median of the rounds' ratios is the result. "turned": the share of
draws that change with noise added to the logits, by kleash's draw, by plain Gumbel-max with the same keyed noise for
each word, and by the inverse of a cumulative sum.
"""

import argparse
import json
from statistics import median
from time import perf_counter
from typing import Any

import torch
from harness import interleaved, ratio, write_result

from kleash.linear import Head, log_probabilities
from kleash.models import draw, exponentials

VOCABULARIES = (32_768, 151_936, 262_144)
ROWS = 32
NOISES = (1e-6, 4e-3)
WORDS, BLOCK = 4096, 500


def speed(rounds: int, device: str) -> dict[str, Any]:
    """Milliseconds and ratio at each vocabulary."""
    keys = [(f"{row:016x}", row, 3) for row in range(ROWS)]
    head = Head(weight=None)
    figures: dict[str, Any] = {"rows": ROWS, "rounds": rounds}
    for words in VOCABULARIES:
        logits = 3 * torch.randn(ROWS, words, generator=torch.Generator().manual_seed(0)).to(device)

        def ours(logits: torch.Tensor = logits) -> list[int]:
            return draw(log_probabilities(logits, head), 7, keys)[0].tolist()

        def peer(logits: torch.Tensor = logits) -> list[int]:
            return torch.multinomial(logits.softmax(-1), 1)[:, 0].tolist()

        jobs = {"kleash": ours, "multinomial": peer}
        interleaved(jobs, 2)
        times, _ = interleaved(jobs, rounds, clock=perf_counter)
        figures[str(words)] = {
            **{f"{name}_ms": round(1e3 * median(each), 2) for name, each in times.items()},
            "ratio": ratio(times["kleash"], times["multinomial"]),
        }
    return figures


def turned(draws: int) -> dict[str, Any]:
    """Shares of draws that change, for some shapes of distribution and sizes of noise."""
    some = torch.Generator().manual_seed(1)
    normal = torch.randn(WORDS, generator=some, dtype=torch.float64)
    ranks = torch.randperm(WORDS, generator=some).double()
    shapes = {
        "flat": torch.zeros(WORDS, dtype=torch.float64),
        "normal, deviation 1": normal,
        "normal, deviation 4": 4 * normal,
        "Zipf, exponent 1.2": -1.2 * torch.log1p(ranks),
    }
    return {
        name: {f"{noise:g}": _turned(logits, noise, draws, some) for noise in NOISES}
        for name, logits in shapes.items()
    }


def _turned(logits: torch.Tensor, noise: float, draws: int, some: torch.Generator) -> dict[str, float]:
    counts = dict.fromkeys(("kleash", "gumbel_max", "inverse_cdf"), 0)
    before = logits.log_softmax(-1).expand(BLOCK, -1)
    for start in range(0, draws, BLOCK):
        keys = [("prompt", number, 0) for number in range(start, start + BLOCK)]
        gumbel = -exponentials(3, keys, WORDS).log()
        uniform = torch.rand(BLOCK, 1, generator=some, dtype=torch.float64)
        moved = logits + noise * torch.randn(BLOCK, WORDS, generator=some, dtype=torch.float64)
        after = moved.log_softmax(-1)
        for name, (one, other) in {
            "kleash": (draw(logp, 3, keys)[0] for logp in (before, after)),
            "gumbel_max": ((logp + gumbel).argmax(-1) for logp in (before, after)),
            "inverse_cdf": (
                torch.searchsorted(logp.exp().cumsum(-1), uniform)[:, 0] for logp in (before, after)
            ),
        }.items():
            counts[name] += int((one != other).sum())
    return {name: count / draws for name, count in counts.items()}


def main() -> None:
    """Run what the command line asks for, print it and write it beside the other results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["speed", "turned"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    result = speed(given.rounds, given.device) if given.what == "speed" else turned(given.draws)
    print(json.dumps(result, indent=2))
    write_result(f"drawing_{given.what}", result)


if __name__ == "__main__":
    main()
